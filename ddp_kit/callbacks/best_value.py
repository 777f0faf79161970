"""The best value of a metric over a run's evaluations."""

import math
from collections.abc import Iterable
from typing import Any, Literal

from ddp_kit.errors import ConfigError, nearest
from ddp_kit.log import logger
from ddp_kit.state_values import real_number


def check_metric(owner: str, metric: str, metrics: Iterable[str]) -> None:
    """Raise `ConfigError` if `metric` is not among the `metrics` of an evaluation. `owner`: who monitors it."""
    names = list(metrics)
    if metric not in names:
        likely = nearest(metric, names)
        raise ConfigError(
            f"{owner} monitors {metric!r}, but evaluations return {', '.join(names)}",
            f"did you mean {likely!r}?" if likely else "use one of these, or add it to the Trainer's metrics",
        )


class BestValue:
    """The best value so far of one metric.

    `owner`: who monitors it, for messages. `min_delta`: an improvement must be larger than this, in the metric's unit.
    """

    def __init__(self, owner: str, metric: str, mode: Literal["min", "max"], min_delta: float = 0.0) -> None:
        if mode not in ("min", "max"):
            raise ConfigError(f"{owner} got mode={mode!r}", "use 'min' if lower is better, 'max' if higher is better")
        if not min_delta >= 0:
            raise ConfigError(f"{owner} got min_delta={min_delta!r}", "use a number that is at least 0")
        self.metric = metric
        self.mode = mode
        self.best: float | None = None
        self._owner = owner
        self._sign = 1.0 if mode == "min" else -1.0
        self._min_delta = min_delta

    def improved(self, metrics: dict[str, float]) -> bool:
        """Record the value if it is the best so far; NaN never is. Raises `ConfigError` for an unknown name."""
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
        """Load the best value. If it is of another metric or mode, warn and return False."""
        saved, own = (state["metric"], state["mode"]), (self.metric, self.mode)
        if saved != own:
            logger.warning(
                "{} starts without a best value: it monitors {!r} ({}), in the checkpoint {!r} ({})",
                self._owner,
                *own,
                *saved,
            )
            return False
        self.best = None if state["best"] is None else real_number(state["best"], f"the best {self.metric}")
        return True
