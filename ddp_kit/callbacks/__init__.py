"""What watches a run from outside, by the events of `Callback` alone."""

from ddp_kit.callbacks.best_model import BestModel
from ddp_kit.callbacks.callback import Callback
from ddp_kit.callbacks.csv_logger import CSVLogger
from ddp_kit.callbacks.early_stopping import EarlyStopping
from ddp_kit.callbacks.ema import EMA
from ddp_kit.callbacks.json_lines_logger import JSONLinesLogger
from ddp_kit.callbacks.tensorboard_logger import TensorBoardLogger
from ddp_kit.callbacks.wandb_logger import WandbLogger

__all__ = [
    "EMA",
    "BestModel",
    "CSVLogger",
    "Callback",
    "EarlyStopping",
    "JSONLinesLogger",
    "TensorBoardLogger",
    "WandbLogger",
]
