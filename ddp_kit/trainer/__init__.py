"""The Trainer: the training loop and what it calls."""

from ddp_kit.trainer.trainer import Trainer

__all__ = ["Trainer"]
