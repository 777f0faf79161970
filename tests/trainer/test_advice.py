"""What is said about where the time goes, and when nothing is."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from ddp_kit.records import StepTimes
from ddp_kit.trainer import logging
from ddp_kit.trainer.logging import WATCHED_SECONDS, Adviser, OwnTimes


def times(scale: float = 1.0, **seconds: float) -> StepTimes:
    """A step of 100 ms in good order, but for what is given (in ms)."""
    usual = {"data": 1, "transfer": 1, "forward": 30, "backward": 50, "communication": 10, "optimizer": 7, "other": 1}
    return StepTimes(**{phase: value / 1000 * scale for phase, value in (usual | seconds).items()})


def table(ranks: Sequence[StepTimes]) -> Any:
    """The times of each rank as an array."""
    return np.array([each.figures for each in ranks])


def advice(ranks: Sequence[StepTimes], num_workers: int, **optimizer: bool) -> str | None:
    return logging.advice(table(ranks), num_workers, **optimizer)


def test_advice_on_a_balanced_step_is_none() -> None:
    assert advice([times()], 0) is None
    assert advice([times(), times(forward=35), times(data=3)], 0) is None


@pytest.mark.parametrize(
    ("out_of_order", "said"),
    [
        ({"data": 44}, "data 31%: raise data.num_workers (now 2) or use data.device_transform"),
        ({"transfer": 30}, "transfer 23%: use smaller dtypes, such as uint8 images, and convert on the device"),
        (
            {"communication": 90},
            "communication 50%: use larger micro-batches or more accumulation_steps, or set parallel.compression",
        ),
        ({"optimizer": 60}, "optimizer 39%: pass fused=True to the optimizer"),
        ({"optimizer": 60, "data": 80}, "data 34%: raise data.num_workers (now 2) or use data.device_transform"),
        ({"other": 900}, None),
    ],
)
def test_advice_on_a_phase_that_is_too_long_names_a_remedy(out_of_order: dict[str, float], said: str | None) -> None:
    assert advice([times(**out_of_order)] * 2, 2) == said


@pytest.mark.parametrize(
    ("phase", "below", "above"),
    [("data", 10.9, 11.1), ("transfer", 10.9, 11.1), ("communication", 38.4, 38.7), ("optimizer", 30.9, 31.1)],
)
def test_advice_thresholds_are_shares_of_the_step(phase: str, below: float, above: float) -> None:
    assert advice([times(**{phase: below})], 0) is None
    assert (advice([times(**{phase: above})], 0) or "").startswith(phase)


def test_advice_ignores_costs_below_a_millisecond() -> None:
    assert advice([times(0.02, data=44)], 0) is None
    assert advice([times(0.025, data=44)], 0) is not None
    assert advice([times(0.01), times(0.01, forward=100)], 0) is None


def test_advice_does_not_propose_settings_already_in_use() -> None:
    assert advice([times(optimizer=60)], 0, fused=True) is None
    assert "compression" not in (advice([times(communication=90)], 0, compressed=True) or "compression")


def test_advice_names_a_slow_rank_before_the_communication_it_causes() -> None:
    waiting = times(communication=70)
    said = advice([waiting, waiting, times(communication=10, forward=90), waiting], 0)
    assert said is not None
    assert said.startswith(
        "rank 2 takes 1.7x the median time of the other ranks, mostly in forward: check what else runs"
    )


def test_advice_ignores_a_slightly_slow_rank() -> None:
    assert advice([times(), times(forward=47)], 0) is None
    assert "rank 1 takes 1.2x" in (advice([times(), times(forward=49)], 0) or "")


def test_advice_names_the_slow_phase_of_a_slow_rank() -> None:
    said = advice([times(communication=70), times(data=61, backward=51)], 4)
    assert said is not None
    assert "mostly in data: check how fast this rank reads its samples" in said


def test_slowest_rank_has_the_most_time_besides_communication() -> None:
    alone = OwnTimes(table([times()]))
    assert (alone.slowest, alone.factor) == (0, 1.0)
    ranks = [times(communication=900), times(forward=120), times(), times()]
    own = OwnTimes(table(ranks))
    assert (own.slowest, own.factor) == (1, pytest.approx(2.0))
    assert own.seconds.tolist() == pytest.approx([each.own for each in ranks])
    assert own.summary == pytest.approx((0.09, 0.09, 0.18))
    assert OwnTimes(table([times(data=11), times(data=21)])).summary == pytest.approx((0.1, 0.105, 0.11))
    idle = OwnTimes(table([StepTimes(0, 0, 0, 0, 0, 0, 0)] * 2))
    assert (idle.slowest, idle.factor) == (0, 1.0)


# --- over several intervals ------------------------------------------------------------------------------------------


class WatchedRun:
    """Intervals of ten steps, each watched for long enough."""

    def __init__(self, *, waits: bool = False) -> None:
        self.adviser = Adviser(0, compressed=False, fused=False, waits=waits)

    def interval(self, *ranks: StepTimes, graphs: int = 0, idle: float = 0.0) -> str | None:
        ranks = ranks or (times(),)
        steps = int(WATCHED_SECONDS / ranks[0].total) + 1
        return self.adviser.watch(steps, table(ranks), graphs, idle)


def test_advice_skips_the_first_interval_and_gives_each_kind_once() -> None:
    run = WatchedRun()
    assert run.interval(times(data=44)) is None
    assert (run.interval(times(data=44)) or "").startswith("data 31%")
    assert run.interval(times(data=80)) is None
    assert (run.interval(times(optimizer=60)) or "").startswith("optimizer 39%")


def test_advice_does_not_call_a_rank_slow_in_an_interval_with_compilation() -> None:
    run = WatchedRun()
    slow = times(), times(forward=300)
    assert run.interval(*slow, graphs=1) is None
    assert run.interval(*slow, graphs=2) is None
    assert run.interval(times(), times(), graphs=2) is None
    assert (run.interval(*slow, graphs=2) or "").startswith("rank 1")


def test_advice_on_a_gpu_that_is_idle_in_each_step_is_given() -> None:
    run = WatchedRun()
    short = times(0.2)
    assert run.interval(short, idle=1.0) is None
    assert run.interval(short, idle=0.8) is None
    assert run.interval(times(1.5), idle=1.0) is None, "a millisecond of 150"
    said = run.interval(short, idle=0.96)
    assert said is not None
    assert said.startswith(
        "host-device synchronisation, or steps that are too small: the GPU ran out of work in 96% of them"
    )
    assert 'profile={"steps": [10, 12]}' in said
    assert run.interval(short, idle=1.0) is None


def test_advice_on_an_idle_gpu_is_omitted_if_a_phase_or_setting_explains_it() -> None:
    run = WatchedRun()
    assert run.interval(idle=1.0) is None
    assert (run.interval(times(0.2, data=80), idle=1.0) or "").startswith("data")
    run = WatchedRun(waits=True)
    assert [run.interval(times(0.2), idle=1.0) for _ in range(3)] == [None] * 3
