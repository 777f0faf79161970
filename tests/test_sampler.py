"""Step k holds the same samples at every number of ranks; every sample once per epoch."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_kit.batch import plan_batches
from ddp_kit.errors import DataError
from ddp_kit.sampler import EvalBatches, ExactDistributedSampler, TrainBatches


def train_batches(samples: int, global_batch: int, world_size: int, rank: int, **options: bool) -> TrainBatches:
    sampler = ExactDistributedSampler(range(samples), rank, world_size, shuffle=options.get("shuffle", True), seed=3)
    plan = plan_batches(global_batch, None, 2, world_size)
    return TrainBatches(sampler, plan, drop_last=options.get("drop_last", False))


def steps_of(samples: int, global_batch: int, world_size: int, epoch: int, first_step: int = 0) -> list[list[int]]:
    """The samples of each optimizer step, put together from all ranks in the order of the ranks."""
    steps: list[list[int]] = []
    for rank in range(world_size):
        batches = train_batches(samples, global_batch, world_size, rank)
        batches.set_position(epoch, first_step)
        given_out = iter(batches)
        for number, step in enumerate(range(first_step, batches.steps)):
            if rank == 0:
                steps.append([])
            for one in batches.micro_batches(step):
                indices = next(given_out)
                assert len(indices) == len(one.positions)
                steps[number] += indices if one.samples else []
        assert next(given_out, None) is None
    return steps


@given(
    samples=st.integers(1, 120), global_batch=st.integers(1, 50), world_size=st.integers(1, 6), epoch=st.integers(0, 5)
)
def test_a_step_holds_the_same_samples_at_every_number_of_ranks(
    samples: int, global_batch: int, world_size: int, epoch: int
) -> None:
    alone = steps_of(samples, global_batch, 1, epoch)
    assert steps_of(samples, global_batch, world_size, epoch) == alone
    assert sorted(sample for step in alone for sample in step) == list(range(samples))


@given(first_step=st.integers(0, 4), world_size=st.integers(1, 4))
def test_starting_in_the_middle_gives_the_rest_of_the_same_epoch(first_step: int, world_size: int) -> None:
    assert steps_of(50, 10, world_size, 1, first_step) == steps_of(50, 10, world_size, 1)[first_step:]


def test_the_order_changes_with_the_epoch_and_the_seed_and_never_repeats_another_seed_s() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        sampler = ExactDistributedSampler(range(50), 0, 1, shuffle=True, seed=seed)
        sampler.set_epoch(epoch)
        return list(sampler.order())

    orders = [order(seed, epoch) for seed in range(4) for epoch in range(4)]
    assert len({tuple(one) for one in orders}) == 16
    assert order(2, 3) == order(2, 3)


def test_without_shuffling_the_order_is_the_dataset_s() -> None:
    assert list(train_batches(5, 4, 1, 0, shuffle=False)) == [[0, 1], [2, 3], [4]]


def test_drop_last_leaves_out_the_short_step() -> None:
    assert train_batches(11, 4, 1, 0, drop_last=True).steps == 2


def test_no_step_at_all_is_an_error() -> None:
    with pytest.raises(DataError, match="3 samples and a global batch 4"):
        train_batches(3, 4, 1, 0, drop_last=True)


@given(samples=st.integers(1, 60), world_size=st.integers(1, 7), size=st.integers(1, 20))
def test_evaluation_counts_each_sample_once(samples: int, world_size: int, size: int) -> None:
    seen = []
    for rank in range(world_size):
        batches = EvalBatches(ExactDistributedSampler(range(samples), rank, world_size, shuffle=False, seed=0), size)
        own = list(batches)
        assert [len(batch) for batch in own] == batches.sizes()
        seen += [sample for batch in own for sample in batch]
    assert seen == list(range(samples))
