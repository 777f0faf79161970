"""The callback that stops a run when a metric no longer improves."""

from typing import Any, Literal

from ddp_kit.callbacks.callback import BestValue, Callback, creation_error
from ddp_kit.log import logger
from ddp_kit.state_values import whole_number


class EarlyStopping(Callback):
    """Stops the run after `patience` consecutive evaluations without improvement.

    All ranks have the same metrics, so they stop at the same step. A new call of `fit` resets the count. A run that
    resumes from a checkpoint restores the count, and stops at once if the count has already reached `patience`.

    Args:
        metric: "loss" or the name of one of the Trainer's metrics.
        patience: The number of evaluations, at least 1.
        mode: "min" if lower values are better, "max" if higher values are better.
        min_delta: A value is an improvement only if it is better than the best value by more than this amount, in the
            metric's unit. NaN is never an improvement.

    Raises:
        ConfigError: For an invalid argument; at the first evaluation, if the metric is unknown.
    """

    def __init__(
        self, metric: str = "loss", patience: int = 3, mode: Literal["min", "max"] = "min", min_delta: float = 0.0
    ) -> None:
        if patience < 1:
            raise creation_error(
                f"EarlyStopping got an invalid argument: patience={patience!r}", "set patience to at least 1 evaluation"
            )
        self._best_value = BestValue("EarlyStopping", metric, mode, min_delta)
        self.metrics_needed = (metric,)
        self._patience = patience
        self.waited = 0
        """Evaluations since the best one."""
        self._resumed = False  # whether a checkpoint was loaded since the last call of `fit`

    @property
    def best(self) -> float | None:
        """The best value so far; None before the first evaluation."""
        return self._best_value.best

    def state_dict(self) -> dict[str, Any]:
        """The best value, and the number of evaluations since the best one."""
        return {"watched": self._best_value.state_dict(), "waited": self.waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the best value and the count."""
        if self._best_value.load_state_dict(state["watched"]):
            self.waited = whole_number(state["waited"], "waited")
            self._resumed = True

    def on_fit_start(self, trainer: Any) -> None:
        """Reset the count, unless a checkpoint was loaded."""
        if not self._resumed:
            self.waited = 0
        self._resumed = False
        self._stop_if_due(trainer)

    def on_evaluate(self, trainer: Any, metrics: dict[str, float]) -> None:
        """Stop the run after `patience` evaluations without improvement."""
        self.waited += 1
        if self._best_value.improved(metrics):
            self.waited = 0
        self._stop_if_due(trainer)

    def _stop_if_due(self, trainer: Any) -> None:
        if self.waited >= self._patience:
            logger.info(
                "stopping at step {}: {} has not improved on {} in {} evaluations",
                trainer.step,
                self._best_value.metric,
                "NaN" if self.best is None else f"{self.best:.4g}",
                self.waited,
            )
            trainer.stop()
