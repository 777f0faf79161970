"""The third floor: the loop over the parts."""

from ddp_kit.trainer.trainer import Trainer

__all__ = ["Trainer"]
