"""The third floor: the loop over the parts."""

from ddp_kit.trainer.records import FitResult, LogRow, Step
from ddp_kit.trainer.trainer import Trainer

__all__ = ["FitResult", "LogRow", "Step", "Trainer"]
