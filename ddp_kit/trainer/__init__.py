"""The Trainer: the training loop and the modules that it uses."""

from ddp_kit.trainer.learning_rates import scheduler_steps
from ddp_kit.trainer.trainer import Trainer
from ddp_kit.trainer.updates import Update

__all__ = ["Trainer", "Update", "scheduler_steps"]
