"""DataLoaders that iterate in their own way, such as a subclass with an `__iter__` of its own.

Their options do not say what they yield: every rank iterates over the whole DataLoader, and takes its own batches.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from typing import Any

from torch.utils.data import (
    DataLoader,
    IterableDataset,
    RandomSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from ddp_kit.data.collate import identity_collate
from ddp_kit.data.sampler import samplers_in, split
from ddp_kit.distributed.world import World, gathered
from ddp_kit.errors import DataError
from ddp_kit.structures import digest_of_value, tensors_in

_ITERATION = ("__iter__", "__len__", "_get_iterator", "_index_sampler", "_auto_collation")
"""The members of torch's DataLoader that determine the batches, besides its options."""
_PLAIN = ("torch.utils.data.", "torchdata.stateful_dataloader.")
"""Modules whose DataLoaders yield exactly what their options say."""


def iterates_itself(loader: "DataLoader[Any]") -> bool:
    """Whether user code determines what a DataLoader yields: a subclass with an `__iter__` of its own, for example.

    The options of such a DataLoader do not describe its batches, so it has to be iterated over.
    """
    classes = type(loader).__mro__
    definers = (next(kind for kind in classes if name in vars(kind)) for name in _ITERATION)
    return "_get_iterator" in vars(loader) or any(not f"{kind.__module__}.".startswith(_PLAIN) for kind in definers)


class LoaderBatches(IterableDataset[Any]):
    """The batches of a DataLoader that iterates in its own way. Each rank iterates over all of them, and takes its own.

    `own`: this rank's batches among all batches: start, stop and step, with None for a stop at the end.
    """

    def __init__(self, loader: "DataLoader[Any]", own: slice) -> None:
        self.loader = loader
        self.dataset = loader.dataset  # whose `set_epoch` is called as well
        self._own = own
        self.first_batch: int | None = None
        """A digest of the first of all batches, once it was read; None also after a resume."""

    def set_epoch(self, epoch: int) -> None:
        """Call `set_epoch` of the DataLoader's samplers."""
        batches: Any = self.loader.batch_sampler
        if batches is None:
            batches = self.loader.sampler
        for sampler in samplers_in(batches):
            if callable(method := getattr(sampler, "set_epoch", None)):
                method(epoch)

    def __iter__(self) -> Iterator[Any]:
        return islice(self._all_batches(), self._own.start, self._own.stop, self._own.step)

    def _all_batches(self) -> Iterator[Any]:
        for number, batch in enumerate(self.loader):
            if number == 0 and self.first_batch is None:
                self.first_batch = digest_of_value([*tensors_in(batch)])
            yield batch

    def as_loader(self) -> "DataLoader[Any]":
        """A DataLoader that yields these batches unchanged."""
        return DataLoader(self, batch_size=None, collate_fn=identity_collate)

    def reader(self, reader: World) -> World:
        """The world for reading these batches: ranks that divide them among themselves draw equal random numbers."""
        return reader if isinstance(self.dataset, IterableDataset) else replace(reader, rank=0)

    def check_order(self, role: str) -> None:
        """Raise `DataError` if a random sampler determines the order of the samples, which is then unknown."""
        sampler = self.loader.sampler
        if isinstance(sampler, RandomSampler | SubsetRandomSampler | WeightedRandomSampler):
            raise DataError(
                f"{role} is a {type(self.loader).__name__} that iterates in its own way over a random sampler, so it "
                "is unknown which prediction belongs to which sample",
                "create it without shuffle=True or a random sampler",
            )

    def check_ranks(self, world: World, role: str) -> None:
        """Raise `DataError` if the DataLoader yields other batches on other ranks, because they cannot be divided.

        A collective, once each rank has read its first batch.
        """
        if isinstance(self.dataset, IterableDataset):
            return  # which divides its samples itself
        if len({first for (first,) in gathered(world, [self.first_batch or 0])}) > 1:
            raise DataError(
                f"{role} is a {type(self.loader).__name__}, which yields different batches on different ranks, so the "
                "Trainer cannot divide them",
                "yield the same batches on every rank, and the Trainer gives each rank its own; or yield this rank's "
                "batches from an IterableDataset, and pass DataLoader(dataset, batch_size=None)",
            )


class StatefulLoaderBatches(LoaderBatches):
    """The batches of a DataLoader that has a state of its own, from which it continues after a resume."""

    _resumed = False

    def state_dict(self) -> Any:
        """The state of the DataLoader after this rank's last batch."""
        return self.loader.state_dict()  # type: ignore[attr-defined]

    def load_state_dict(self, state: Any) -> None:
        """Continue after this rank's last batch."""
        self.loader.load_state_dict(state)  # type: ignore[attr-defined]
        self._resumed = True

    def __iter__(self) -> Iterator[Any]:
        if not self._resumed:
            return super().__iter__()
        self._resumed = False
        return islice(self.loader, self._own.step - 1, None, self._own.step)


def name_of_stream(dataset: object) -> str:
    """The name of the class that the user has written: that of a stream, or of a DataLoader that yields batches."""
    return type(dataset.loader if isinstance(dataset, LoaderBatches) else dataset).__name__


def _has_state(loader: Any) -> bool:
    """Whether a DataLoader has a state. That of Accelerate has the methods even if the DataLoader inside lacks them."""
    if not callable(getattr(loader, "load_state_dict", None)):
        return False
    with suppress(AttributeError):
        loader.state_dict()
        return True
    return False


def loader_batches(loader: "DataLoader[Any]", rank: int, ranks: int, *, in_order: bool, role: str) -> LoaderBatches:
    """This rank's batches of a DataLoader that iterates in its own way.

    `in_order`: whether the ranks take consecutive batches, so that the batches of all ranks in turn are in the
    DataLoader's order; otherwise they take turns, as the steps of training need it. A stream divides itself.
    Raises `DataError` if the number of batches has to be known and is not.
    """
    kind = StatefulLoaderBatches if _has_state(loader) else LoaderBatches
    if ranks == 1 or isinstance(loader.dataset, IterableDataset):
        return kind(loader, slice(0, None, 1))
    if not in_order:
        return kind(loader, slice(rank, None, ranks))
    try:
        share = split(len(loader), ranks, rank)
    except TypeError:
        raise DataError(
            f"{role} is a {type(loader).__name__} without a length, so its batches cannot be divided among "
            f"{ranks} ranks in order",
            "add a __len__ that returns the number of batches",
        ) from None
    last = rank == ranks - 1  # which reads to the end, however many batches there are
    return LoaderBatches(loader, slice(share.start, None if last else share.stop, 1))
