"""Step k holds the same samples at every number of ranks; every sample once per epoch."""

import random
from collections.abc import Callable, Iterable, Iterator, Sized
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Generator
from torch.utils.data import BatchSampler, RandomSampler, Sampler, SubsetRandomSampler, WeightedRandomSampler

from ddp_kit.data import sampler
from ddp_kit.data.sampler import (
    BatchPlan,
    Epochs,
    RankBatches,
    checksum,
    lengths_in,
    passes_of,
    plan_batches,
)
from ddp_kit.errors import DataError


def train_batches(
    samples: int, global_batch: int, world_size: int = 1, rank: int = 0, passes: int | None = 2, **options: Any
) -> RankBatches:
    epochs = Epochs(range(samples), 3, global_batch, **{"shuffle": "sampler" not in options} | options)
    return RankBatches(epochs, rank, plan_batches(global_batch, None, passes, world_size).micro_batches)


def own_batches(
    batches: Iterable[Any], rank: int = 0, world_size: int = 1, accumulation: int = 1, **options: bool
) -> RankBatches:
    """Each batch goes to one rank as a whole."""
    epochs = Epochs([], 0, accumulation * world_size, batch_sampler=batches, **options)
    return RankBatches(epochs, rank, partial(passes_of, 1, world_size))


def divided_batches(batches: Iterable[Any], rank: int, plan: BatchPlan) -> RankBatches:
    """Each batch is one step, divided among the ranks."""
    return RankBatches(Epochs([], 0, 1, batch_sampler=batches, divided=True), rank, plan.micro_batches)


def eval_batches(rank: int, world_size: int, size: int, data: Sized = (), **own: Any) -> RankBatches:
    return RankBatches(Epochs(data, 0, **own), rank, partial(passes_of, size, world_size))


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
            for samples_of_pass in batches.pass_sizes(step):
                indices = next(given_out)
                assert len(indices) == samples_of_pass
                steps[number] += indices
        assert next(given_out, None) is None
    assert [len(step) for step in steps] == [batches.samples(step) for step in range(first_step, batches.steps)]
    return steps


@given(
    samples=st.integers(1, 120), global_batch=st.integers(1, 50), world_size=st.integers(1, 6), epoch=st.integers(0, 5)
)
def test_sampler_step_has_the_same_samples_at_every_number_of_ranks(
    samples: int, global_batch: int, world_size: int, epoch: int
) -> None:
    alone = steps_of(samples, global_batch, 1, epoch)
    assert steps_of(samples, global_batch, world_size, epoch) == alone
    assert sorted(sample for step in alone for sample in step) == list(range(samples))


@given(first_step=st.integers(0, 4), world_size=st.integers(1, 4))
def test_sampler_from_a_later_step_yields_the_rest_of_the_epoch(first_step: int, world_size: int) -> None:
    assert steps_of(50, 10, world_size, 1, first_step) == steps_of(50, 10, world_size, 1)[first_step:]


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("own", [None, [7, 3, 9, 1, 5, 0, 2, 4, 6, 8]], ids=["shuffled", "sampler"])
def test_checksum_of_a_step_covers_all_ranks_in_order(world_size: int, own: list[int] | None) -> None:
    batches = train_batches(10, 4, world_size, passes=None, sampler=own, shuffle=True)
    order = list(batches.epochs.keys())
    assert [batches.checksum(step) for step in range(3)] == [checksum(order[at : at + 4]) for at in (0, 4, 8)]
    of_batches = own_batches([order[at : at + 2] for at in range(0, 10, 2)], accumulation=2)
    assert of_batches.checksum(1) == batches.checksum(1)
    divided = divided_batches([order[:4], order[4:8]], 0, BatchPlan(1, 2, 1, world_size))
    assert divided.checksum(1) == batches.checksum(1)


@pytest.mark.parametrize("own", [None, BatchSampler(range(23), 3, drop_last=False)])
def test_passes_before_a_step_are_those_of_the_steps_before(own: Any) -> None:
    for rank in range(3):
        divide = partial(passes_of, 1, 3) if own else plan_batches(5, 1, None, 3).micro_batches
        batches = RankBatches(Epochs(range(23), 0, 3 if own else 5, batch_sampler=own), rank, divide)
        steps = range(batches.steps + 1)
        assert [batches.passes_before(step) for step in steps] == [
            sum(len(batches.pass_sizes(before)) for before in range(step)) for step in steps
        ]


def test_passes_before_a_late_step_are_not_counted_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = RankBatches(Epochs(range(10**9), 0, 4), 0, plan_batches(4, 2, None, 1).micro_batches)
    monkeypatch.setattr(batches, "pass_sizes", None)
    assert batches.passes_before(10**8) == 2 * 10**8


def test_checksum_of_keys_depends_on_their_order_and_kind() -> None:
    different = [[1, 2], [2, 1], [1], [], ["1", "2"], [(1, "a"), (2, "b")], [10**30, 1]]
    assert len({checksum(keys) for keys in different}) == len(different)
    assert checksum(range(3)) == checksum([0, 1, 2]) == checksum(torch.arange(3).numpy().data)
    assert checksum(("a", "b")) == checksum(["a", "b"])


def test_sampler_order_changes_with_epoch_and_seed() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        return list(Epochs(range(50), seed, shuffle=True, epoch=epoch).keys())

    orders = [order(seed, epoch) for seed in range(4) for epoch in range(4)]
    assert len({tuple(one) for one in orders}) == 16
    assert order(2, 3) == order(2, 3)


def test_sampler_without_shuffling_keeps_the_order_of_the_dataset() -> None:
    assert list(train_batches(5, 4, 1, 0, shuffle=False)) == [[0, 1], [2, 3], [4]]


def test_sampler_with_drop_last_omits_the_short_step() -> None:
    assert train_batches(11, 4, 1, 0, drop_last=True).steps == 2


def test_sampler_without_a_whole_step_raises_error() -> None:
    with pytest.raises(DataError, match="3 samples, fewer than the global batch of 4"):
        train_batches(3, 4, 1, 0, drop_last=True)


@given(samples=st.integers(1, 60), world_size=st.integers(1, 7), size=st.integers(1, 20))
def test_eval_batches_have_each_sample_once(samples: int, world_size: int, size: int) -> None:
    seen = []
    for rank in range(world_size):
        batches = eval_batches(rank, world_size, size, range(samples))
        own = list(batches)
        assert tuple(len(batch) for batch in own) == batches.pass_sizes(0)
        seen += [sample for batch in own for sample in batch]
    assert seen == list(range(samples))


# --- orders of the user's own -----------------------------------------------------------------------------------


class DrawsFromEverything(Sampler[int]):
    """An order that depends on every generator there is, and on the epoch that it is told."""

    def __init__(self) -> None:
        self.generator = Generator()
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Iterator[int]:
        yield random.randrange(10**6)
        yield int(np.random.randint(10**6))
        yield int(torch.randint(10**6, ()))
        yield int(torch.randint(10**6, (), generator=self.generator))


def order_of(own: object, epoch: int, seed: int = 0) -> list[int]:
    return list(Epochs([], seed, sampler=own, epoch=epoch).keys())  # type: ignore[arg-type]


def test_user_sampler_has_the_same_order_on_every_rank_and_varies_by_epoch() -> None:
    orders = [order_of(DrawsFromEverything(), epoch) for epoch in (0, 1)]
    random.seed(7)
    np.random.seed(7)
    torch.manual_seed(7)
    assert orders == [order_of(DrawsFromEverything(), epoch) for epoch in (0, 1)]
    differing = [a != b for a, b in zip(*orders, strict=True)]
    assert differing == [True] * 4
    assert order_of(DrawsFromEverything(), 0, seed=1) != orders[0]


def test_user_sampler_gets_the_epoch_and_changes_no_random_state() -> None:
    own = DrawsFromEverything()
    states = random.getstate(), torch.get_rng_state().tolist(), own.generator.get_state().tolist()
    numpy_state = np.random.get_state()[1].tolist()  # type: ignore[index, union-attr]
    epochs = Epochs([], 0, sampler=own, epoch=5)
    first = list(epochs.keys())
    epochs.set_epoch(5)
    assert list(epochs.keys()) == first
    assert own.epochs == [5], "an epoch's order is drawn once"
    assert (random.getstate(), torch.get_rng_state().tolist(), own.generator.get_state().tolist()) == states
    assert np.random.get_state()[1].tolist() == numpy_state  # type: ignore[index, union-attr]


OWN = {
    "weighted": lambda: WeightedRandomSampler([1.0, 5.0, 0.0, 1.0], 13),
    "weighted, with a generator": lambda: WeightedRandomSampler([1.0, 5.0], 13, generator=Generator()),
    "subset": lambda: SubsetRandomSampler([2, 5, 7, 8, 9]),
    "with replacement": lambda: RandomSampler(range(10), replacement=True, num_samples=21),
    "a list": lambda: [3, 1, 2],
    "keys": lambda: ["b", "a", "c"],
}


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("own", OWN.values(), ids=OWN)
def test_user_sampler_step_has_the_same_samples_at_every_number_of_ranks(own: object, world_size: int) -> None:
    def steps(ranks: int) -> list[list[int]]:
        found: list[list[int]] = []
        for rank in range(ranks):
            batches = train_batches(10, 6, ranks, rank, sampler=own())  # type: ignore[operator]
            batches.set_position(1, 0)
            given_out = iter(batches)
            found = found or [[] for _ in range(batches.steps)]
            for step in range(batches.steps):
                found[step] += [sample for _ in batches.pass_sizes(step) for sample in next(given_out)]
        return found

    alone = steps(1)
    assert steps(world_size) == alone
    assert sum(map(len, alone)) == len(own())  # type: ignore[operator]


class Miscounts(Sampler[int]):
    def __len__(self) -> int:
        return 3

    def __iter__(self) -> Iterator[int]:
        return iter([1, 2])


def test_user_sampler_with_a_wrong_or_missing_length_is_refused() -> None:
    with pytest.raises(DataError, match=r"sampler .generator. has no length"):
        Epochs(range(3), 0, sampler=(n for n in range(3)))
    with pytest.raises(DataError, match="has length 3, but yields 2 items in epoch 5"):
        order_of(Miscounts(), 4)
    with pytest.raises(DataError, match="batch sampler .Miscounts. has length 3, but"):
        eval_batches(0, 1, 1, batch_sampler=Miscounts())


class CountsItself(Sampler[int]):
    """Has another length in each epoch, which it counts itself."""

    epoch = 0

    def __len__(self) -> int:
        return 3 + self.epoch

    def __iter__(self) -> Iterator[int]:
        yield from range(len(self))
        self.epoch += 1


class IsTold(CountsItself):
    """Has another length in each epoch, which it is told."""

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self)))


@pytest.mark.parametrize("kind", [CountsItself, IsTold])
def test_user_sampler_with_varying_length_determines_the_steps_of_each_epoch(kind: type[CountsItself]) -> None:
    batches = train_batches(10, 2, passes=None, sampler=kind())
    assert batches.epochs.steps_in(range(3)) == (2 + 2 + 3 if kind is IsTold else 2 * 3)
    for epoch in range(3):
        batches.set_position(epoch, 0)
        assert [sample for batch in batches for sample in batch] == [*range(3 + epoch)]
        assert batches.steps == (2, 2, 3)[epoch]


def test_steps_in_later_epochs_leaves_the_sampler_in_its_epoch() -> None:
    own = IsTold()
    batches = train_batches(10, 2, passes=None, sampler=own)
    batches.set_position(1, 0)
    assert batches.epochs.steps_in(range(1, 50)) == sum(-(-length // 2) for length in range(4, 53))
    assert own.epoch == 1


class DrawsItsLength(IsTold):
    """Draws its length in `set_epoch` from the global generators and from its own ones, one of them a new one."""

    def __init__(self) -> None:
        self.generator = Generator()
        self.latest = random.Random()

    def set_epoch(self, epoch: int) -> None:
        drawn = [random.randrange(50), int(torch.randint(50, (), generator=self.generator)), self.latest.randrange(50)]
        self.epoch = sum(drawn) + epoch % 2
        self.latest = random.Random(epoch)


@pytest.mark.parametrize("count", [2, 200])
def test_lengths_of_later_epochs_are_those_of_each_epoch_alone(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    kept: list[None] = []
    states = sampler.random_states_kept

    def counting(*arguments: Any) -> Any:
        kept.append(None)
        return states(*arguments)

    alone = [lengths_in(DrawsItsLength(), "sampler", 3, [epoch]) for epoch in range(count)]
    own = DrawsItsLength()
    before = random.getstate(), torch.get_rng_state().tolist(), own.generator.get_state().tolist()
    monkeypatch.setattr(sampler, "random_states_kept", counting)
    assert [[length] for length in lengths_in(own, "sampler", 3, range(count))] == alone
    assert len(kept) == 1, "for any number of epochs"
    assert (random.getstate(), torch.get_rng_state().tolist(), own.generator.get_state().tolist()) == before


BUCKETS = [[1], [2, 3], [4, 5, 6], [7], [8, 9], [10]]


def test_user_batches_are_assigned_to_ranks_in_turn() -> None:
    ranks = [own_batches(BUCKETS, rank, 2, 2) for rank in range(2)]
    assert [list(batches) for batches in ranks] == [[[1], [2, 3], [8, 9]], [[4, 5, 6], [7], [10]]]
    assert [batches.steps for batches in ranks] == [2, 2]
    assert [[batches.samples(step) for step in range(2)] for batches in ranks] == [[7, 3], [7, 3]]
    assert [[batches.pass_sizes(step) for step in range(2)] for batches in ranks] == [[(1, 2), (2,)], [(3, 1), (1,)]]


def test_user_batches_at_the_end_may_leave_a_rank_without_a_batch() -> None:
    ranks = [own_batches(BUCKETS, rank, 4) for rank in range(4)]
    assert [batches.pass_sizes(1) for batches in ranks] == [(2,), (1,), (), ()]
    assert [list(batches) for batches in ranks] == [[[1], [8, 9]], [[2, 3], [10]], [[4, 5, 6]], [[7]]]
    assert own_batches(BUCKETS, 0, 4, drop_last=True).steps == 1


def test_user_batches_continue_in_mid_epoch_and_vary_by_epoch() -> None:
    def drawn(epoch: int, first_step: int) -> list[list[int]]:
        own = BatchSampler(SubsetRandomSampler(range(20)), 3, drop_last=False)
        batches = own_batches(own, accumulation=2)
        batches.set_position(epoch, first_step)
        return list(batches)

    assert drawn(1, 2) == drawn(1, 0)[4:]
    assert drawn(0, 0) != drawn(1, 0)
    assert drawn(1, 0) == drawn(1, 0)


def test_user_batches_that_are_empty_or_too_few_are_refused() -> None:
    with pytest.raises(DataError, match="yields 6 batches, but one step needs 8"):
        own_batches(BUCKETS, 0, 4, 2, drop_last=True)
    with pytest.raises(DataError, match="an empty batch at index 1"):
        eval_batches(0, 1, 1, batch_sampler=[[1], []])


@pytest.mark.parametrize("world_size", [1, 2, 4, 7])
def test_user_eval_batches_are_each_used_once(world_size: int) -> None:
    ranks = [eval_batches(rank, world_size, 1, batch_sampler=BUCKETS) for rank in range(world_size)]
    assert [batch for batches in ranks for batch in batches] == BUCKETS
    assert [size for batches in ranks for size in batches.pass_sizes(0)] == list(map(len, BUCKETS))


def test_configured_batches_are_one_step_each_divided_among_ranks() -> None:
    def ranks(world_size: int, micro_batch: int = 100) -> list[RankBatches]:
        plan = BatchPlan(1, micro_batch, 1, world_size)
        return [divided_batches(BUCKETS, rank, plan) for rank in range(world_size)]

    assert [list(batches) for batches in ranks(1)] == [BUCKETS]
    assert [list(batches) for batches in ranks(2)] == [[[1], [2], [4, 5], [7], [8], [10]], [[3], [6], [9]]]
    assert [batches.pass_sizes(2) for batches in ranks(3)] == [(1,), (1,), (1,)]
    assert [batches.pass_sizes(2) for batches in ranks(2, micro_batch=1)] == [(1, 1), (1,)]
    assert [batches.pass_sizes(0) for batches in ranks(2)] == [(1,), ()]
    for batches in (*ranks(2), *ranks(3)):
        assert [batches.samples(step) for step in range(batches.steps)] == [*map(len, BUCKETS)]
        assert [batches.max_passes(step) for step in range(batches.steps)] == [1] * len(BUCKETS)
    assert len({batches.epochs.fingerprint() for batches in (*ranks(1), *ranks(3))}) == 1


def test_a_rank_without_a_batch_repeats_the_first_batch() -> None:
    assert own_batches(BUCKETS[1:]).epochs.first_batch() == [2, 3]
    assert divided_batches(BUCKETS[2:], 0, BatchPlan(1, 1, 1, 1)).epochs.first_batch() == [4, 5, 6]
    assert train_batches(9, 4, sampler=[7, 8, 9]).epochs.first_batch() == [7]


def test_keys_of_user_batches_reach_the_dataset_unchanged() -> None:
    batches = [[np.int64(1), "a"], [(2, 3), 10**30]]
    assert list(map(type, next(iter(own_batches(batches))))) == [np.int64, str]
    assert [*own_batches(batches)] == batches
    assert [*own_batches([[10**30, 1]])] == [[10**30, 1]]


@st.composite
def divided_epochs(draw: st.DrawFn) -> Callable[[int, int], RankBatches]:
    """An epoch of any kind, divided: a function of (rank, ranks)."""
    sizes = draw(st.lists(st.integers(1, 6), min_size=1, max_size=30))
    positions = iter(draw(st.permutations(range(sum(sizes)))))
    batches = [[next(positions) for _ in range(size)] for size in sizes]
    samples = [position for batch in batches for position in batch]
    per_step = draw(st.integers(1, 12))
    passes = draw(st.integers(1, 4))
    micro_batch = draw(st.integers(1, 7))
    shuffle = draw(st.booleans())

    def kind_of_epoch(kind: str, rank: int, ranks: int) -> RankBatches:
        if kind == "batches":
            return RankBatches(Epochs([], 0, 8, batch_sampler=batches), rank, partial(passes_of, 1, ranks))
        if kind == "divided batches":
            return divided_batches(batches, rank, BatchPlan(1, micro_batch, passes, ranks))
        if kind == "evaluation":
            return eval_batches(rank, ranks, micro_batch, samples)
        if kind == "evaluation of batches":
            return eval_batches(rank, ranks, 1, batch_sampler=batches)
        own = samples if kind == "sampler" else None
        return train_batches(len(samples), per_step, ranks, rank, passes, sampler=own, shuffle=shuffle)

    kinds = ["dataset", "sampler", "batches", "divided batches", "evaluation", "evaluation of batches"]
    return partial(kind_of_epoch, draw(st.sampled_from(kinds)))


@given(divide=divided_epochs(), epoch=st.integers(0, 3), first_step=st.integers(0, 40))
def test_steps_have_the_same_samples_at_1_2_and_8_ranks_and_after_a_resume(
    divide: Callable[[int, int], RankBatches], epoch: int, first_step: int
) -> None:
    found = []
    for ranks in (1, 2, 8):
        everyone = [divide(rank, ranks) for rank in range(ranks)]
        for batches in everyone:
            batches.set_position(epoch, min(first_step, batches.steps - 1))
        one = everyone[0]
        resumed = [iter(batches) for batches in everyone]
        steps = []
        for step in range(one.first_step, one.steps):
            sizes = [batches.pass_sizes(step) for batches in everyone]
            assert one.max_passes(step) == max(map(len, sizes))
            assert one.samples(step) == sum(map(sum, sizes))
            keys = [
                batches.keys(step, number)
                for batches, own in zip(everyone, sizes, strict=True)
                for number in range(len(own))
            ]
            assert keys == [next(batches) for batches, own in zip(resumed, sizes, strict=True) for _ in own]
            assert [len(batch) for batch in keys if batch] == [size for own in sizes for size in own]
            assert one.keys(step, len(sizes[0])) is None
            steps.append([key for batch in keys for key in batch or ()])
            assert one.checksum(step) == checksum(steps[-1])
        assert [next(batches, None) for batches in resumed] == [None] * ranks
        found.append((one.steps, one.epochs.fingerprint(), steps))
    assert found[1:] == found[:1] * 2
