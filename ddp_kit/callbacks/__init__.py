"""Callbacks: callback.py has the base class `Callback`, rows.py that of loggers; each other file has one callback."""

from ddp_kit.callbacks.callback import Callback, Gradients
from ddp_kit.callbacks.csv_logger import CSVLogger
from ddp_kit.callbacks.early_stopping import EarlyStopping
from ddp_kit.callbacks.ema import EMA
from ddp_kit.callbacks.json_lines_logger import JSONLinesLogger
from ddp_kit.callbacks.mlflow_logger import MLflowLogger
from ddp_kit.callbacks.rows import RowLogger
from ddp_kit.callbacks.tensorboard_logger import TensorBoardLogger
from ddp_kit.callbacks.trackio_logger import TrackioLogger
from ddp_kit.callbacks.wandb_logger import WandbLogger

__all__ = [
    "EMA",
    "CSVLogger",
    "Callback",
    "EarlyStopping",
    "Gradients",
    "JSONLinesLogger",
    "MLflowLogger",
    "RowLogger",
    "TensorBoardLogger",
    "TrackioLogger",
    "WandbLogger",
]
