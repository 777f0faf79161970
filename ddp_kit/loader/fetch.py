"""Fetches a dataset's samples: a whole batch at once where the result is the same, or each with its own seed."""

from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate, get_worker_info

from ddp_kit.world import (
    RandomStates,
    mixed_seed,
    random_states,
    random_states_kept,
    seed_generators,
    set_random_states,
)


class Batches(Protocol):
    """Iterates over the keys of each batch of an epoch."""

    seed: int

    @property
    def epoch(self) -> int:
        """The epoch of the next iteration."""

    def __iter__(self) -> Iterator[list[Any]]: ...


class WholeBatches(Dataset[Any]):
    """A TensorDataset, or a Subset of one, that returns a whole batch at once.

    The result equals that of `default_collate`: a list of tensors with memory of their own.
    """

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset
        self._subsets, self._tensors = _opened(dataset)

    def __getitems__(self, keys: list[int]) -> list[Tensor]:
        indices = keys
        try:
            for subset in self._subsets:
                chosen = subset.indices
                indices = [chosen[index] for index in indices]
            index = torch.frombuffer(
                array("q", indices), dtype=torch.int64
            )  # takes a fifth of the time of torch.tensor(indices)
            return [tensor.index_select(0, index) for tensor in self._tensors.tensors]
        except (IndexError, OverflowError, RuntimeError, TypeError, ValueError):
            # negative or invalid indices: sample by sample, which gives torch's own batch or error
            return default_collate([self.dataset[key] for key in keys])  # type: ignore[no-any-return]


def gives_whole_batches(dataset: Dataset[Any]) -> bool:
    """Whether `WholeBatches` gives the same as fetching each sample: no user code is involved."""
    _, inner = _opened(dataset)
    return type(inner) is TensorDataset and all(map(_usual, inner.tensors))


def _opened(dataset: Any) -> tuple[list[Any], Any]:
    """The nested Subsets, outermost first, and the innermost dataset."""
    subsets = []
    while type(dataset) is Subset:
        subsets.append(dataset)
        dataset = dataset.dataset
    return subsets, dataset


def _usual(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.layout == torch.strided and tensor.device.type == "cpu"


class WholeBatchLoader:
    """The batches of `data`, fetched in this process, as by a DataLoader without workers."""

    def __init__(self, data: WholeBatches, batches: Iterable[list[int]], pinned: bool) -> None:
        self._data = data
        self._batches = batches
        self._fetch: Callable[[list[int]], list[Tensor]] = self._pinned if pinned else data.__getitems__

    def __iter__(self) -> Iterator[list[Tensor]]:
        return map(self._fetch, self._batches)

    def _pinned(self, keys: list[int]) -> list[Tensor]:
        return [tensor.pin_memory() for tensor in self._data.__getitems__(keys)]


class SeededSamples(Dataset[Any]):
    """A dataset whose samples are fetched with random states that depend on (seed, epoch, sample) alone.

    Its keys are those of `WithEpoch`. The random states of training are not touched.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset = dataset
        self._seed = seed

    def __getitems__(self, keys: list[tuple[int, Any]]) -> list[Any]:
        with random_states_kept() if get_worker_info() is None else nullcontext():
            return [self._fetched(epoch, key) for epoch, key in keys]

    def _fetched(self, epoch: int, key: Any) -> Any:
        seed_generators(mixed_seed(self._seed, epoch, key))
        if callable(several := getattr(self.dataset, "__getitems__", None)):
            return several([key])[0]  # the method that torch would call, for one sample
        return self.dataset[key]


class SeededBatches(Dataset[Any]):
    """A dataset whose batches are fetched with random states of (seed, epoch, batch) alone.

    So a resumed run draws the same random numbers, however far ahead batches are fetched.
    Its keys are those of `WithEpoch`. It leaves the states so, for what makes a batch of the samples: it is for loader
    processes, or for `Apart`.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset = dataset
        self._seed = seed

    def __getitems__(self, keys: list[tuple[int, Any]]) -> list[Any]:
        own = [key for _, key in keys]
        seed_generators(mixed_seed(self._seed, keys[0][0], *own))
        if callable(several := getattr(self.dataset, "__getitems__", None)):
            return several(own)  # type: ignore[no-any-return]
        return [self.dataset[key] for key in own]


class Apart:
    """A loader that draws in this process from random states of its own; those of training are kept."""

    def __init__(self, loader: "DataLoader[Any]") -> None:
        self._loader = loader
        self.batch_sampler, self.in_order = (
            loader.batch_sampler,
            loader.in_order,
        )  # for error messages that name samples

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._loader)
        while True:
            with random_states_kept():
                try:
                    batch = next(batches)
                except StopIteration:
                    return
            yield batch


class OwnRandomStates:
    """Random states separate from those of training: this process draws from them inside the context.

    They continue where they were left. A DataLoader worker has no other states.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._alone = get_worker_info() is not None
        self._states: RandomStates | None = None

    def __enter__(self) -> None:
        if not self._alone:
            self._outside = random_states()
        if self._states is None:
            seed_generators(self._seed)
        elif not self._alone:
            set_random_states(self._states)

    def __exit__(self, *_: object) -> None:
        self._states = random_states()
        if not self._alone:
            set_random_states(self._outside)

    @property
    def states(self) -> RandomStates:
        """The states as they were left last."""
        assert self._states is not None
        return self._states


class WithEpoch:
    """Batches of keys that also hold their epoch, which persistent DataLoader workers cannot learn otherwise."""

    def __init__(self, batches: Batches) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[list[tuple[int, Any]]]:
        epoch = self.batches.epoch
        return ([(epoch, key) for key in keys] for keys in self.batches)


class ShowsOwnDataset:
    """A `worker_init_fn` for a wrapped dataset: `get_worker_info()` shows the user's own dataset."""

    def __init__(self, then: Callable[[int], None] | None) -> None:
        self._then = then

    def __call__(self, number: int) -> None:
        info: Any = get_worker_info()
        # The record is frozen. What is fetched does not change.
        object.__setattr__(info, "dataset", info.dataset.dataset)
        if self._then is not None:
            self._then(number)
