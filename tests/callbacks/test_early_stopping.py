"""A run that no longer gets better ends."""

import math
from collections.abc import Callable
from typing import Any

import pytest

from ddp_kit import ConfigError, EarlyStopping, Trainer

Build = Callable[..., Trainer]


class StubTrainer:
    """As much of a Trainer as is needed to tell it values that no real run would give."""

    step = 0
    stopped = False

    def stop(self) -> None:
        self.stopped = True


def stopped_after(stopping: EarlyStopping, values: list[float]) -> int | None:
    """The number of evaluations after which it stopped, if it did."""
    run = StubTrainer()
    stopping.on_fit_start(run)
    for number, value in enumerate(values, 1):
        stopping.on_evaluate(run, {"loss": value})
        if run.stopped:
            return number
    return None


@pytest.mark.parametrize(
    ("settings", "values", "stopped"),
    [
        ({"patience": 2}, [3, 2, 1, 1, 1], 5),
        ({"patience": 2}, [3, 2, 2.5, 1.9, 2, 1.8, 1.8], None),
        ({"patience": 1}, [3, 3], 2),
        ({"patience": 1, "mode": "max"}, [1, 2, 3, 2], 4),
        ({"patience": 2, "min_delta": 0.5}, [3, 2.6, 2.5, 1], 3),
        ({"patience": 2, "min_delta": 0.5}, [3, 2.6, 2.4, 2, 2], 5),
        ({"patience": 2, "mode": "max", "min_delta": 0.5}, [1, 1.4, 1.5], 3),
        ({"patience": 2}, [math.nan, math.nan], 2),
        ({"patience": 2}, [math.nan, 5, math.nan, 4, math.nan, math.nan], 6),
        ({"patience": 2}, [math.inf, 5, 4, 3], None),
    ],
)
def test_early_stopping_stops_after_patience_evaluations_without_improvement(
    settings: dict[str, Any], values: list[float], stopped: int | None
) -> None:
    assert stopped_after(EarlyStopping(**settings), values) == stopped


def test_early_stopping_in_a_new_fit_counts_from_zero() -> None:
    stopping = EarlyStopping(patience=2)
    assert stopped_after(stopping, [1, 2, 2]) == 3
    assert stopped_after(stopping, [2, 0.5, 1, 1]) == 4
    assert stopping.best == 0.5


def test_early_stopping_ends_a_real_run(build: Build, train_data: Any, eval_data: Any) -> None:
    stopping = EarlyStopping(metric="absolute", patience=3, mode="max", min_delta=1e9)  # nothing is ever better
    result = build(stopping, epochs=50, eval_every_steps=2).fit(train_data, eval_data)
    assert result.steps == 8
    assert stopping.best is not None


def test_early_stopping_with_an_unknown_metric_suggests_the_nearest(
    build: Build, train_data: Any, eval_data: Any
) -> None:
    with pytest.raises(ConfigError, match=r"'absolut', but evaluations return loss, absolute\n.*mean 'absolute'"):
        build(EarlyStopping(metric="absolut")).fit(train_data, eval_data)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"patience": 0}, "patience=0"),
        ({"mode": "least"}, "mode='least'"),
        ({"min_delta": -1.0}, "min_delta=-1.0"),
        ({"min_delta": math.nan}, "min_delta=nan"),
    ],
)
def test_early_stopping_refuses_invalid_settings(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        EarlyStopping(**settings)
