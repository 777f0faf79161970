"""Who takes which samples: for any sizes, nothing lost and nothing twice."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_kit.data.sampler import BatchPlan, plan_batches, split
from ddp_kit.errors import ConfigError

size = st.integers(1, 300)
maybe = st.none() | st.integers(1, 40)
ranks = st.integers(1, 9)


@given(total=st.integers(0, 500), parts=st.integers(1, 50))
def test_split_makes_consecutive_parts_of_almost_equal_size(total: int, parts: int) -> None:
    pieces = [split(total, parts, number) for number in range(parts)]
    assert [position for piece in pieces for position in piece] == list(range(total))
    assert max(map(len, pieces)) - min(map(len, pieces)) <= 1


@given(global_batch=st.none() | size, micro_batch=maybe, accumulation=maybe, world_size=ranks, data=st.data())
def test_batch_plan_assigns_every_sample_of_a_step_once(
    global_batch: int | None, micro_batch: int | None, accumulation: int | None, world_size: int, data: st.DataObject
) -> None:
    if global_batch and micro_batch and accumulation:
        accumulation = None  # three that agree by chance are the exception; they have a test of their own
    plan = plan_batches(global_batch, micro_batch, accumulation, world_size)
    samples = data.draw(st.integers(1, plan.global_batch), label="samples in the step")
    taken = []
    for rank in range(world_size):
        passes = plan.micro_batches(rank, samples)
        assert len(passes) <= plan.accumulation
        assert all(1 <= len(one) <= plan.micro_batch for one in passes)
        taken += [position for one in passes for position in one]
    assert taken == list(range(samples))


def test_batch_plan_of_a_rank_without_samples_has_no_passes() -> None:
    plan = plan_batches(8, None, 2, 4)
    assert [plan.micro_batches(rank, 2) for rank in range(4)] == [(range(1),), (range(1, 2),), (), ()]
    assert plan.micro_batches(1, 8) == (range(2, 3), range(3, 4))


@given(samples=st.integers(1, 2000), global_batch=size, drop_last=st.booleans())
def test_batch_plan_steps_cover_the_epoch(samples: int, global_batch: int, drop_last: bool) -> None:
    plan = plan_batches(global_batch, None, None, 1)
    steps = [plan.step_samples(step, samples) for step in range(plan.steps(samples, drop_last))]
    covered = [position for step in steps for position in step]
    assert covered == list(range(samples - samples % global_batch if drop_last else samples))
    assert all(len(step) == global_batch for step in steps[:-1])


@given(micro_batch=st.integers(1, 40), accumulation=st.integers(1, 40), world_size=ranks)
def test_plan_batches_multiplies_micro_batch_and_accumulation(
    micro_batch: int, accumulation: int, world_size: int
) -> None:
    plan = plan_batches(None, micro_batch, accumulation, world_size)
    assert plan == BatchPlan(micro_batch * accumulation * world_size, micro_batch, accumulation, world_size)
    assert plan_batches(plan.global_batch, micro_batch, accumulation, world_size) == plan


def test_plan_batches_without_settings_is_a_global_batch_of_32() -> None:
    assert plan_batches(None, None, None, 1) == BatchPlan(32, 32, 1, 1)
    assert plan_batches(None, None, None, 3) == BatchPlan(32, 11, 1, 3)


@given(global_batch=size, micro_batch=st.integers(1, 40), accumulation=st.integers(1, 40), world_size=ranks)
def test_plan_batches_with_inconsistent_sizes_names_sizes_that_work(
    global_batch: int, micro_batch: int, accumulation: int, world_size: int
) -> None:
    asked = {"global_batch_size": global_batch, "micro_batch_size": micro_batch, "accumulation_steps": accumulation}
    try:
        plan = plan_batches(*asked.values(), world_size)
    except ConfigError as error:
        assert str(micro_batch * accumulation * world_size) in str(error)
        for way in error.problems:
            name, value = way.split(" ")[0].split("=")
            plan_batches(*(asked | {name: int(value)}).values(), world_size)
    else:
        assert (plan.global_batch, plan.micro_batch, plan.accumulation) == (global_batch, micro_batch, accumulation)


def test_plan_batches_with_inconsistent_sizes_shows_the_arithmetic() -> None:
    with pytest.raises(ConfigError, match="micro_batch_size 8 x accumulation_steps 4 x 2 ranks = 64, but .* is 100"):
        plan_batches(100, 8, 4, 2)
