"""Stops a run that no longer improves."""

from typing import Any, Literal

from ddp_kit.callbacks.best_value import Watched
from ddp_kit.callbacks.callback import Callback
from ddp_kit.errors import ConfigError
from ddp_kit.log import logger
from ddp_kit.state_values import whole_number


class EarlyStopping(Callback):
    """Stops after `patience` evaluations in a row without improvement.

    `metric`: "loss" or the name of one of the Trainer's metrics. `mode`: "min" or "max", what better means.
    `min_delta`: by how much a value has to be better than the best to count. NaN is no improvement.
    All ranks see the same values, so they decide the same. A new call of `fit` resets the count; one that resumes from
    a checkpoint restores it, and stops at once if it had reached `patience`.
    Raises `ConfigError`; for an unknown metric at the first evaluation.
    """

    def __init__(
        self, metric: str = "loss", patience: int = 3, mode: Literal["min", "max"] = "min", min_delta: float = 0.0
    ) -> None:
        if patience < 1:
            raise ConfigError(f"EarlyStopping got patience={patience!r}", "use a number of evaluations, at least 1")
        self._watched = Watched("EarlyStopping", metric, mode, min_delta)
        self.metrics_needed = (metric,)
        self._patience = patience
        self.waited = 0
        """Evaluations since the best one."""
        self._taken_up = False  # from a checkpoint, since the last call of `fit`

    @property
    def best(self) -> float | None:
        """The best value so far; None before the first evaluation."""
        return self._watched.best

    def state_dict(self) -> dict[str, Any]:
        """The best value, and the number of evaluations since then."""
        return {"watched": self._watched.state_dict(), "waited": self.waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue counting."""
        if self._watched.load_state_dict(state["watched"]):
            self.waited, self._taken_up = whole_number(state["waited"], "waited"), True

    def on_fit_start(self, trainer: Any) -> None:
        """Reset the count, unless a checkpoint was loaded."""
        if not self._taken_up:
            self.waited = 0
        self._taken_up = False
        self._stop_where_due(trainer)

    def on_evaluate(self, trainer: Any, metrics: dict[str, float]) -> None:
        """Stop the run after `patience` evaluations without improvement."""
        self.waited = 0 if self._watched.improved(metrics) else self.waited + 1
        self._stop_where_due(trainer)

    def _stop_where_due(self, trainer: Any) -> None:
        if self.waited >= self._patience:
            logger.info(
                "stopping at step {}: {} has not improved on {} in {} evaluations",
                trainer.step,
                self._watched.metric,
                "NaN" if self.best is None else f"{self.best:.4g}",
                self.waited,
            )
            trainer.stop()
