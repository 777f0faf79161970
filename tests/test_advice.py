"""What is said about where the time goes, and when nothing is."""

import pytest

from ddp_kit.advice import advice, slowest_rank
from ddp_kit.records import StepTimes


def times(scale: float = 1.0, **seconds: float) -> StepTimes:
    """A step of 100 ms in good order, but for what is given (in ms)."""
    usual = {"data": 1, "transfer": 1, "forward": 30, "backward": 50, "communication": 10, "optimizer": 7, "other": 1}
    return StepTimes(**{phase: value / 1000 * scale for phase, value in (usual | seconds).items()})


def test_a_step_in_good_order_is_left_alone() -> None:
    assert advice([times()], 0) is None
    assert advice([times(), times(forward=35), times(data=3)], 0) is None


@pytest.mark.parametrize(
    ("out_of_order", "said"),
    [
        ({"data": 44}, "data 31%: raise data.num_workers (2) or move transforms to the device"),
        ({"transfer": 30}, "transfer 23%: send smaller types, such as uint8 images, and convert them on the device"),
        (
            {"communication": 90},
            "communication 50%: larger micro-batches or more accumulation_steps, or parallel.compression",
        ),
        ({"optimizer": 60}, "optimizer 39%: make the optimizer with fused=True"),
        ({"optimizer": 60, "data": 80}, "data 34%: raise data.num_workers (2) or move transforms to the device"),
        ({"other": 900}, None),
    ],
)
def test_a_phase_that_stands_out_has_a_remedy(out_of_order: dict[str, float], said: str | None) -> None:
    assert advice([times(**out_of_order)] * 2, 2) == said


@pytest.mark.parametrize(
    ("phase", "below", "above"),
    [("data", 10.9, 11.1), ("transfer", 10.9, 11.1), ("communication", 38.4, 38.7), ("optimizer", 30.9, 31.1)],
)
def test_the_limits_are_shares_of_the_step(phase: str, below: float, above: float) -> None:
    assert advice([times(**{phase: below})], 0) is None
    assert (advice([times(**{phase: above})], 0) or "").startswith(phase)


def test_what_costs_less_than_a_millisecond_is_noise() -> None:
    assert advice([times(0.02, data=44)], 0) is None
    assert advice([times(0.025, data=44)], 0) is not None
    assert advice([times(0.01), times(0.01, forward=100)], 0) is None


def test_what_is_done_already_is_not_proposed() -> None:
    assert advice([times(optimizer=60)], 0, fused=True) is None
    assert "compression" not in (advice([times(communication=90)], 0, compressed=True) or "compression")


def test_a_slow_rank_comes_before_the_communication_that_it_makes_of_the_others() -> None:
    waiting = times(communication=70)
    said = advice([waiting, waiting, times(communication=10, forward=90), waiting], 0)
    assert said is not None
    assert said.startswith("rank 2 is 1.7 x as slow as the median of the others, mostly in forward: see what else runs")


def test_a_rank_that_is_slow_by_a_little_is_left_alone() -> None:
    assert advice([times(), times(forward=47)], 0) is None
    assert "rank 1 is 1.2 x" in (advice([times(), times(forward=49)], 0) or "")


def test_a_slow_rank_s_own_phase_is_named() -> None:
    said = advice([times(communication=70), times(data=61, backward=51)], 4)
    assert said is not None
    assert "mostly in data: see how fast it reads its samples" in said


def test_the_slowest_rank_is_the_one_that_needs_most_for_itself() -> None:
    assert slowest_rank([times()]) == (0, 1.0)
    rank, factor = slowest_rank([times(communication=900), times(forward=120), times(), times()])
    assert (rank, factor) == (1, pytest.approx(2.0))
    assert slowest_rank([StepTimes(0, 0, 0, 0, 0, 0, 0)] * 2) == (0, 1.0)
