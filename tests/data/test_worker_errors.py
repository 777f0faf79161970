"""An error while data is read says which sample, and which part of the data is at fault."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from ddp_kit import DataConfig, DataError
from ddp_kit.data import build_loader, build_stream
from ddp_kit.data.collate import checked_batches
from ddp_kit.distributed.world import World

ALONE = World(0, 1, 0, 1, 0, torch.device("cpu"))


class Photos(Dataset[Tensor]):
    def __init__(self, message: str = "broken image") -> None:
        self.message = message

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Tensor:
        if index == 17:
            raise RuntimeError(self.message)
        return torch.ones(2)


class Exhausted(Photos):
    """Reads from an iterator that has no items left."""

    def __getitem__(self, index: int) -> Tensor:
        return next(iter(())) if index == 17 else torch.ones(2)


class ExhaustedAtOnce(Exhausted):
    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        return [self[index] for index in indices]


def exhausted(samples: list[Tensor]) -> Tensor:
    return next(each for each in samples if each.sum() > 2)


class AtOnce(Photos):
    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        return [self[index] for index in indices]


class Lines(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        yield from torch.ones(9, 2)
        raise RuntimeError("broken line")


class Batches(list[list[int]]):
    seed, epoch = 0, 0


def error_of(data: Any, workers: int, **config: Any) -> str:
    """What is shown of the error, with its notes."""
    settings = DataConfig(num_workers=workers, **config)
    batches = Batches([[7, 3], [17, 2], [4, 5]])
    loader: Any = (
        build_stream(data, [4], settings, ALONE, seed=0)
        if isinstance(data, IterableDataset)
        else checked_batches(build_loader(data, batches, settings, ALONE, seed=0))
    )
    with pytest.raises(RuntimeError) as caught:
        list(loader)
    return "\n".join([str(caught.value), *getattr(caught.value, "__notes__", ())])


@pytest.mark.parametrize(
    ("data", "where"),
    [
        (Photos(), "while reading sample 17 of Photos"),
        (Subset(Photos(), range(10, 40)), "while reading sample 7 of a Subset, which is sample 17 of Photos"),
        (AtOnce(), "while reading samples 17, 2 of AtOnce"),
        (Lines(), "while reading item 1 of batch 2 of Lines (numbers start at 0)"),
    ],
)
def test_read_error_names_the_sample(data: Any, where: str) -> None:
    assert error_of(data, workers=0).splitlines()[-1] == where


@pytest.mark.slow  # torch waits for 5 s for such a worker to end
def test_read_error_in_a_dataloader_worker_names_the_sample() -> None:
    assert error_of(Photos(), workers=1).rstrip().endswith("while reading sample 17 of Photos")


@pytest.mark.parametrize(
    ("data", "config", "said"),
    [
        (Exhausted(), {}, "__getitem__ of Exhausted raised StopIteration"),
        (Exhausted(), {"seed_samples": True}, "__getitem__ of Exhausted raised StopIteration"),
        (Subset(Exhausted(), range(40)), {}, "__getitem__ of Exhausted raised StopIteration"),
        (ExhaustedAtOnce(), {}, "__getitems__ of ExhaustedAtOnce raised StopIteration"),
        (Photos(), {"collate_fn": exhausted}, "the collate function raised StopIteration"),
        (Photos(), {"collate_fn": exhausted, "seed_samples": True}, "the collate function raised StopIteration"),
        (Lines(), {"collate_fn": exhausted}, "the collate function raised StopIteration"),
    ],
)
@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_stop_iteration_in_user_code_does_not_end_the_epoch(
    data: Any, config: dict[str, Any], said: str, workers: int
) -> None:
    found = error_of(data, workers, **config)
    assert said in found
    assert ("while reading" in found) == ("__getitem" in said)


def end_at_once(_number: int) -> None:
    raise StopIteration


@pytest.mark.slow  # torch waits for 5 s for such a worker to end
def test_stop_iteration_in_worker_init_fn_does_not_end_the_epoch() -> None:
    own = DataLoader(Photos(), batch_size=2, num_workers=1, worker_init_fn=end_at_once)
    with pytest.raises(RuntimeError, match="Caught StopIteration in DataLoader worker process 0"):
        list(checked_batches(build_loader(Photos(), [[7, 3], [4, 5]], DataConfig(), ALONE, 0, own)))


class EndlessIndices(list[int]):
    def __getitem__(self, place: Any) -> Any:
        return next(iter(()))


def test_stop_iteration_in_the_indices_of_a_subset_does_not_end_the_epoch() -> None:
    data = Subset(TensorDataset(torch.ones(4)), EndlessIndices(range(4)))
    with pytest.raises(RuntimeError, match="StopIteration"):
        list(checked_batches(build_loader(data, [[0, 1]], DataConfig(), ALONE, seed=0)))


def test_timeout_error_of_the_dataset_is_not_taken_for_that_of_torch() -> None:
    assert "the server timed out" in error_of(Photos("the server timed out"), 0)


def test_dataset_that_cannot_be_sent_to_spawned_workers_is_named() -> None:
    class Hidden(Photos):
        """Cannot be pickled: no module has it."""

    loader = DataLoader(Hidden(), num_workers=1, multiprocessing_context="spawn")
    with pytest.raises(DataError, match=r"cannot be sent to DataLoader workers .*Hidden") as caught:
        next(checked_batches(loader))
    assert 'multiprocessing_context="fork"' in caught.value.hint
