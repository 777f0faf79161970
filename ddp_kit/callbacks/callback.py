"""The base class of callbacks with all events, and helpers to track the best value of a metric."""

import math
from collections.abc import Iterable
from typing import Any, Literal

from ddp_kit.errors import ConfigError, nearest
from ddp_kit.log import logger
from ddp_kit.records import FitResult, LogRow
from ddp_kit.state_values import real_number


class Callback:
    """The base class of callbacks: override the events that you need. Every rank calls all events, in the same order.

        on_fit_start -> (on_step -> [on_log] -> [on_evaluate_start -> on_evaluate -> on_evaluate_end])* -> on_fit_end

    `trainer` is the `Trainer` that calls the event. To end the run after the current step, call `trainer.stop()` on all
    ranks.
    """

    state_per_rank = False
    """Whether checkpoints hold the state of every rank. If False, they hold rank 0's state, and all ranks load it."""

    metrics_needed: tuple[str, ...] = ()
    """The metrics that this callback reads from evaluations. The sanity check of `fit` fails if any is missing."""

    def state_dict(self) -> dict[str, Any]:
        """The state to save in a checkpoint: numbers, strings and tensors, in any nested containers."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state that `state_dict()` returned. Called when a checkpoint is loaded, before the next step.

        Args:
            state: The state from the checkpoint.
        """

    def on_fit_start(self, trainer: Any) -> None:
        """Called by `fit` before the first optimizer step; a loop over `steps` does not call it.

        Args:
            trainer: The `Trainer` that calls the event.
        """

    def on_step(self, trainer: Any) -> None:
        """Called after each optimizer step. Reading a value from the device here makes the host wait.

        Args:
            trainer: The `Trainer` that calls the event.
        """

    def on_log(self, trainer: Any, row: LogRow) -> None:
        """Called at each log point.

        Args:
            trainer: The `Trainer` that calls the event.
            row: The row, as in `FitResult.history`. On a GPU, this is the row of the previous log point.
        """

    def on_evaluate_start(self, trainer: Any) -> None:
        """Called before each evaluation, and again when a resumed run repeats an interrupted evaluation.

        Args:
            trainer: The `Trainer` that calls the event.
        """

    def on_evaluate(self, trainer: Any, metrics: dict[str, float]) -> None:
        """Called after each evaluation.

        Args:
            trainer: The `Trainer` that calls the event.
            metrics: The mean loss and all metrics by name, the same on all ranks.
        """

    def on_evaluate_end(self, trainer: Any) -> None:
        """Called after `on_evaluate` has run in all callbacks, to undo what `on_evaluate_start` changed.

        Also called if the evaluation failed. It may have failed on this rank only, so do not run collectives here.

        Args:
            trainer: The `Trainer` that calls the event.
        """

    def on_fit_end(self, trainer: Any, result: FitResult) -> None:
        """Called by `fit` after the last step, unless the run was interrupted.

        Args:
            trainer: The `Trainer` that calls the event.
            result: The `FitResult` that `fit` will return.
        """


# --- Best value of a metric -------------------------------------------------------------------------------------------


def check_metric(owner: str, metric: str, metrics: Iterable[str]) -> None:
    """Raise `ConfigError` if `metric` is not among the `metrics` of an evaluation.

    `owner`: the name of the callback or setting that monitors the metric.
    """
    names = list(metrics)
    if metric not in names:
        likely = nearest(metric, names)
        raise ConfigError(
            f"{owner} monitors {metric!r}, but evaluations return {', '.join(names)}",
            f"did you mean {likely!r}?" if likely else "use one of these, or add the metric to the Trainer's metrics",
        )


class BestValue:
    """The best value so far of one metric.

    `owner`: the name of the callback that monitors the metric. `min_delta`: an improvement must be larger than this, in
    the metric's unit.
    """

    def __init__(self, owner: str, metric: str, mode: Literal["min", "max"], min_delta: float = 0.0) -> None:
        if mode not in ("min", "max"):
            raise ConfigError(
                f"{owner} got an invalid argument: mode={mode!r}",
                "use 'min' if lower is better, 'max' if higher is better",
            )
        if not min_delta >= 0:
            raise ConfigError(
                f"{owner} got an invalid argument: min_delta={min_delta!r}", "use a number that is at least 0"
            )
        self.metric = metric
        self.mode = mode
        self.best: float | None = None
        self._owner = owner
        self._sign = 1.0 if mode == "min" else -1.0
        self._min_delta = min_delta

    def improved(self, metrics: dict[str, float]) -> bool:
        """Return whether the metric is better than the best value so far, and if so, record it. NaN is never better.

        Raises `ConfigError` if the metric is unknown.
        """
        check_metric(self._owner, self.metric, metrics)
        value = metrics[self.metric]
        if math.isnan(value):
            return False
        if self.best is not None and not self._sign * (self.best - value) > self._min_delta:
            return False
        self.best = value
        return True

    def state_dict(self) -> dict[str, Any]:
        """The metric, its mode and the best value."""
        return {"metric": self.metric, "mode": self.mode, "best": self.best}

    def load_state_dict(self, state: dict[str, Any]) -> bool:
        """Load the best value and return True. If it belongs to another metric or mode, warn and return False."""
        saved, own = (state["metric"], state["mode"]), (self.metric, self.mode)
        if saved != own:
            logger.warning(
                "{} starts without a best value: it monitors {!r} ({}), but the best value in the checkpoint is for "
                "{!r} ({})",
                self._owner,
                *own,
                *saved,
            )
            return False
        self.best = None if state["best"] is None else real_number(state["best"], f"the best {self.metric}")
        return True
