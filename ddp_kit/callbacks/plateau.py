"""Drives torch's ReduceLROnPlateau, which lowers the learning rate when a metric stops improving."""

from typing import Any

from torch.optim.lr_scheduler import ReduceLROnPlateau

from ddp_kit.callbacks.callback import Callback
from ddp_kit.errors import ConfigError
from ddp_kit.state_values import real_number, whole_number

_COUNTS = ("num_bad_epochs", "cooldown_counter", "last_epoch")


class Plateau(Callback):
    """Steps a ReduceLROnPlateau at each evaluation. The Trainer adds this callback for such a scheduler.

    `metric`: "loss" or the name of one of the Trainer's metrics. `mode`: the mode that the scheduler must have; None:
    any. `after_step`: evaluations before this optimizer step, which ends the warm-up, do not step the scheduler.
    Raises `ConfigError` if the scheduler's mode is not `mode`.
    """

    def __init__(self, scheduler: ReduceLROnPlateau, metric: str, mode: str | None, after_step: int = 0) -> None:
        if mode not in (None, scheduler.mode):
            raise ConfigError(
                f"the scheduler has mode={scheduler.mode!r}, but checkpoint.best_mode is {mode!r} for {metric!r}",
                f"create the scheduler with mode={mode!r}",
            )
        self.metrics_needed = (metric,)
        self._scheduler = scheduler
        self._metric = metric
        self._after_step = after_step

    def on_evaluate(self, trainer: Any, metrics: dict[str, float]) -> None:
        """Step the scheduler."""
        if trainer.step >= self._after_step:
            self._scheduler.step(metrics[self._metric])

    def state_dict(self) -> dict[str, Any]:
        """The scheduler's best value and counts. The learning rates are in the optimizer's state."""
        return {"best": float(self._scheduler.best)} | {name: getattr(self._scheduler, name) for name in _COUNTS}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the scheduler's best value and counts."""
        self._scheduler.best = real_number(state["best"], "the best value")
        for name in _COUNTS:
            setattr(self._scheduler, name, whole_number(state[name], name))
