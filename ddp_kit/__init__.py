"""ddpkit: training on several GPUs with one command and one object.

Public names are imported on first use, so that `import ddp_kit` does not import torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Public name -> the module that defines it.
_HOME = {
    "BatchPlan": "data.sampler",
    "Callback": "callbacks",
    "CheckpointConfig": "config.settings",
    "CheckpointError": "errors",
    "ConfigError": "errors",
    "CSVLogger": "callbacks",
    "DataConfig": "config.settings",
    "DataError": "errors",
    "DdpKitError": "errors",
    "EarlyStopping": "callbacks",
    "EMA": "callbacks",
    "FitResult": "records",
    "Gradients": "callbacks",
    "JSONLinesLogger": "callbacks",
    "LaunchError": "errors",
    "LearningRateSearch": "records",
    "LoadedWeights": "records",
    "LogRow": "records",
    "Loss": "metrics",
    "LossError": "errors",
    "MemoryConfig": "config.settings",
    "MemoryPlan": "memory.estimate",
    "MLflowLogger": "callbacks",
    "ParallelConfig": "config.settings",
    "ProfileConfig": "config.settings",
    "RowLogger": "callbacks",
    "Step": "records",
    "TensorBoardLogger": "callbacks",
    "TokenBatchSampler": "data.token_batches",
    "TrackioLogger": "callbacks",
    "Trainer": "trainer",
    "TrainerConfig": "config.settings",
    "Update": "trainer",
    "UsageError": "errors",
    "WandbLogger": "callbacks",
    "World": "distributed.world",
    "WorldError": "errors",
    "launch": "launcher.function",
    "load_model": "checkpoint.load_model",
    "scheduler_steps": "trainer",
}

__all__ = ["__version__", *_HOME]

if TYPE_CHECKING:
    from ddp_kit.callbacks import EMA as EMA
    from ddp_kit.callbacks import Callback as Callback
    from ddp_kit.callbacks import CSVLogger as CSVLogger
    from ddp_kit.callbacks import EarlyStopping as EarlyStopping
    from ddp_kit.callbacks import Gradients as Gradients
    from ddp_kit.callbacks import JSONLinesLogger as JSONLinesLogger
    from ddp_kit.callbacks import MLflowLogger as MLflowLogger
    from ddp_kit.callbacks import RowLogger as RowLogger
    from ddp_kit.callbacks import TensorBoardLogger as TensorBoardLogger
    from ddp_kit.callbacks import TrackioLogger as TrackioLogger
    from ddp_kit.callbacks import WandbLogger as WandbLogger
    from ddp_kit.checkpoint.load_model import load_model as load_model
    from ddp_kit.config.settings import CheckpointConfig as CheckpointConfig
    from ddp_kit.config.settings import DataConfig as DataConfig
    from ddp_kit.config.settings import MemoryConfig as MemoryConfig
    from ddp_kit.config.settings import ParallelConfig as ParallelConfig
    from ddp_kit.config.settings import ProfileConfig as ProfileConfig
    from ddp_kit.config.settings import TrainerConfig as TrainerConfig
    from ddp_kit.data.sampler import BatchPlan as BatchPlan
    from ddp_kit.data.token_batches import TokenBatchSampler as TokenBatchSampler
    from ddp_kit.distributed.world import World as World
    from ddp_kit.errors import CheckpointError as CheckpointError
    from ddp_kit.errors import ConfigError as ConfigError
    from ddp_kit.errors import DataError as DataError
    from ddp_kit.errors import DdpKitError as DdpKitError
    from ddp_kit.errors import LaunchError as LaunchError
    from ddp_kit.errors import LossError as LossError
    from ddp_kit.errors import UsageError as UsageError
    from ddp_kit.errors import WorldError as WorldError
    from ddp_kit.launcher.function import launch as launch
    from ddp_kit.memory.estimate import MemoryPlan as MemoryPlan
    from ddp_kit.metrics import Loss as Loss
    from ddp_kit.records import FitResult as FitResult
    from ddp_kit.records import LearningRateSearch as LearningRateSearch
    from ddp_kit.records import LoadedWeights as LoadedWeights
    from ddp_kit.records import LogRow as LogRow
    from ddp_kit.records import Step as Step
    from ddp_kit.trainer import Trainer as Trainer
    from ddp_kit.trainer import Update as Update
    from ddp_kit.trainer import scheduler_steps as scheduler_steps


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value  # the next lookup finds it without calling this function
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
