"""Batches from an IterableDataset: their sizes, in every process, in every epoch."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from ddp_kit.config.settings import DataConfig
from ddp_kit.data import build_stream, on_device
from ddp_kit.distributed.world import World
from ddp_kit.errors import DataError

CPU = torch.device("cpu")
ALONE = World(rank=0, world_size=1, local_rank=0, local_world_size=1, node_rank=0, device=CPU)


class DividedNumbers(IterableDataset[int]):
    """Divides itself over the DataLoader workers, as is usual, and says the epoch in the thousands."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return iter(range(1000 * self.epoch + first, 1000 * self.epoch + self.total, step))


def drawn(stream: Any) -> list[tuple[int, list[int]]]:
    return [(samples, batch.tolist()) for samples, batch in stream]


def test_stream_batches_have_the_requested_sizes_in_turn() -> None:
    stream = build_stream(DividedNumbers(9), [3, 2], DataConfig(), ALONE, seed=0)
    assert drawn(stream) == [(3, [0, 1, 2]), (2, [3, 4]), (3, [5, 6, 7]), (1, [8])]
    assert drawn(stream) == drawn(stream), "an epoch can be had again"


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("sizes", [[2], [1, 2, 3], [4, 1]])
def test_stream_workers_keep_to_the_sizes_by_batch_number(workers: int, sizes: list[int]) -> None:
    stream = build_stream(DividedNumbers(60), sizes, DataConfig(num_workers=workers), ALONE, seed=0)
    found = drawn(stream)
    whole = [samples for samples, _ in found[: 60 // max(sizes) // 2]]
    assert whole == [sizes[number % len(sizes)] for number in range(len(whole))]
    assert sorted(number for _, batch in found for number in batch) == list(range(60))
    assert all(samples == len(batch) for samples, batch in found)


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_stream_with_persistent_workers_passes_the_epoch_to_the_dataset(workers: int) -> None:
    stream = build_stream(DividedNumbers(4), [2], DataConfig(num_workers=workers), ALONE, seed=0)
    for epoch in (2, 0, 1):
        stream.set_position(epoch)
        numbers = sorted(number for _, batch in stream for number in batch.tolist())
        assert numbers == [1000 * epoch + number for number in range(4)]


def test_stream_abandoned_in_an_epoch_starts_the_next_from_the_beginning() -> None:
    stream = build_stream(DividedNumbers(40), [2], DataConfig(num_workers=2), ALONE, seed=0)
    assert next(iter(stream))[0] == 2
    stream.set_position(1)
    assert sorted(number for _, batch in stream for number in batch.tolist()) == list(range(1000, 1040))


def as_set(samples: list[int]) -> set[int]:
    return set(samples)


def only_the_even(number: int) -> None:
    dataset: Any = get_worker_info().dataset  # type: ignore[union-attr]
    dataset.total //= 2


def test_build_stream_keeps_the_settings_of_the_users_loader() -> None:
    own = DataLoader(DividedNumbers(10), batch_size=3, collate_fn=as_set, num_workers=1, worker_init_fn=only_the_even)
    stream = build_stream(DividedNumbers(10), [3], DataConfig(), ALONE, seed=0, template=own)
    assert list(stream) == [(3, {0, 1, 2}), (2, {3, 4})]


@pytest.mark.parametrize("workers", [0, 2])
def test_build_stream_honours_drop_last_of_the_users_loader(workers: int) -> None:
    own = DataLoader(DividedNumbers(11), batch_size=3, drop_last=True, num_workers=workers)
    stream = build_stream(own.dataset, [3], DataConfig(), ALONE, seed=0, template=own)  # type: ignore[arg-type]
    assert [samples for samples, _ in stream] == [3, 3, 3] if workers == 0 else [3, 3]


@dataclass
class Pair:
    names: list[str]
    values: Tensor


class Whole(IterableDataset[Any]):
    def __init__(self, *batches: Any) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


@pytest.mark.parametrize("workers", [0, 1])
def test_stream_of_whole_batches_counts_samples_by_the_first_tensor(workers: int) -> None:
    batches = [torch.zeros(3, 7), ["a", (torch.zeros(2), torch.zeros(9))], {"x": torch.zeros(4)}]
    own = DataLoader(Whole(*batches), batch_size=None, num_workers=workers)
    stream = build_stream(own.dataset, [5], DataConfig(), ALONE, seed=0, template=own)  # type: ignore[arg-type]
    assert [samples for samples, _ in stream] == [3, 2, 4]


def test_stream_of_whole_batches_accepts_objects() -> None:
    own = DataLoader(Whole(Pair(["a"], torch.zeros(6))), batch_size=None)
    stream = build_stream(own.dataset, [5], DataConfig(), ALONE, seed=0, template=own)  # type: ignore[arg-type]
    assert [samples for samples, _ in stream] == [6]


@pytest.mark.parametrize(
    ("batch", "found"), [("text", "contains no tensor"), (torch.zeros(()), "begins with a scalar tensor")]
)
@pytest.mark.parametrize("workers", [0, 1])
def test_stream_with_a_whole_batch_of_unknown_size_raises_error(batch: Any, found: str, workers: int) -> None:
    own = DataLoader(Whole(batch), batch_size=None, num_workers=workers)
    stream = build_stream(own.dataset, [5], DataConfig(), ALONE, seed=0, template=own)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=found):
        list(stream)


def test_stream_with_seed_samples_is_refused() -> None:
    with pytest.raises(DataError, match="have no index to seed from") as caught:
        build_stream(DividedNumbers(3), [1], DataConfig(seed_samples=True), ALONE, seed=0)
    assert "__getitem__" in caught.value.hint


@pytest.mark.parametrize("workers", [0, 1])
def test_stream_with_mismatched_samples_names_them(workers: int) -> None:
    data = Whole(torch.zeros(1), torch.zeros(1), torch.zeros(2))
    stream = build_stream(data, [3], DataConfig(num_workers=workers), ALONE, seed=0)
    with pytest.raises(DataError, match=r"shape \(1,\) in item 0 of the batch, shape \(2,\) in item 2"):
        list(stream)


class BrokenStream(IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        yield 1
        raise FileNotFoundError("shard 2 is gone")


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])  # its end takes torch five seconds
def test_stream_raises_exceptions_of_the_dataset_unchanged(workers: int) -> None:
    with pytest.raises(FileNotFoundError, match="shard 2 is gone"):
        list(build_stream(BrokenStream(), [1], DataConfig(num_workers=workers), ALONE, seed=0))


def test_stream_batches_are_moved_to_the_device() -> None:
    stream = build_stream(DividedNumbers(3), [2], DataConfig(), ALONE, seed=0)
    assert [samples for samples, _ in on_device(stream, CPU, torch.bfloat16, ahead=2)] == [2, 1]
