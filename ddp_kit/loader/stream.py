"""Batches from an IterableDataset: each rank has a stream of its own, which the dataset divides.

DataLoader workers take turns: batch j of a rank comes from process j % W, whose i-th batch is therefore number i*W + w.
Once the streams of some processes have ended, the turns are the others'.

A dataset with `state_dict` and `load_state_dict` is asked for its state after each batch, in the process that reads it.
"""

import copy
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from itertools import count, islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, default_collate, get_worker_info

from ddp_kit.config import DataConfig
from ddp_kit.errors import DataError
from ddp_kit.loader.build import loader_options
from ddp_kit.loader.collate import Uncollated, as_it_is, data_error, put_together
from ddp_kit.loader.fetch import OwnRandomStates, ShowsOwnDataset
from ddp_kit.loader.shared_memory import sendable
from ddp_kit.loader.worker_errors import watched
from ddp_kit.world import RandomStates, World, mixed_seed, set_random_states

_PASSED_ON = 0
"""The number of samples of a turn in which a worker yields nothing: after a resume another worker may be first."""


@dataclass(frozen=True)
class Mark:
    """The position of a process that reads a stream, after one of its batches."""

    reader: int
    """The index of the DataLoader worker; 0 without workers."""
    number: int
    """The index within the epoch of the next batch to read."""
    random: RandomStates
    dataset: Any
    """The dataset's `state_dict`."""


class Stream:
    """Iterating gives `(samples, batch)` for one epoch: how many samples a batch has, and the batch."""

    def __init__(self, loader: "DataLoader[Any]", epoch: Tensor) -> None:
        self._loader = loader
        self._epoch = epoch
        self.marks = deque[Mark]()
        """The marks of the batches given so far, if the dataset has state; the reader removes them."""

    def set_position(self, epoch: int, marks: Sequence[Mark] = ()) -> None:
        """Start the next iteration in this epoch, after the batches of these marks, which are in order.

        Calls `set_epoch` of a dataset that has it, in DataLoader workers too.
        """
        self._epoch.fill_(epoch)
        self.marks.clear()
        batches: Any = self._loader.dataset
        batches.begin_at = (epoch, {mark.reader: mark for mark in marks}, marks[-1].reader + 1) if marks else None

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        for samples, batch, mark in watched(self._loader):
            if samples == _PASSED_ON:
                continue
            if type(batch) is Uncollated:
                raise data_error(batch, None)
            if mark is not None:
                self.marks.append(mark)
            yield _count(batch) if samples is None else samples, batch


def build_stream(
    dataset: "IterableDataset[Any]",
    sizes: Sequence[int],
    config: DataConfig,
    world: World,
    seed: int,
    template: "DataLoader[Any] | None" = None,
    *,
    marked: bool = False,
) -> Stream:
    """A loader whose batch number j, counted over an epoch, has `sizes[j % len(sizes)]` samples; the last ones fewer.

    What the user's own DataLoader (`template`) chose is kept. Where its batch_size is None the dataset yields whole
    batches, and `sizes` is not used. `marked`: a dataset that has a state gives a `Mark` with each batch.
    Raises `DataError` for `data.seed_samples`, and later for a batch of unknown size.
    """
    if config.seed_samples:
        raise DataError(
            f"data.seed_samples is set, but the samples of a {type(dataset).__name__} have no number to be seeded by",
            "leave it out and seed within the dataset's __iter__; or give a dataset with __getitem__ and __len__",
        )
    options = loader_options(config, world, seed, template)
    options["worker_init_fn"] = ShowsOwnDataset(options.get("worker_init_fn"))
    whole = template is not None and template.batch_size is None
    collate = put_together if template is None or template.collate_fn is default_collate else template.collate_fn
    epoch = torch.zeros((), dtype=torch.int64)
    if options["num_workers"]:
        epoch.share_memory_()  # type: ignore[no-untyped-call]
    batches = _Batches(
        dataset,
        None if whole else tuple(sizes),
        sendable(collate, options["num_workers"]),
        drop_last=template is not None and template.drop_last,
        epoch=epoch,
        seed=mixed_seed(seed, world.rank),
        marked=marked,
    )
    return Stream(DataLoader(batches, batch_size=None, collate_fn=as_it_is, **options), epoch)


class _Batches(IterableDataset[tuple[int | None, Any, Mark | None]]):
    """Groups samples into batches in the process that reads them. `sizes` None: the dataset yields batches already."""

    def __init__(
        self,
        dataset: "IterableDataset[Any]",
        sizes: tuple[int, ...] | None,
        collate: Callable[[Any], Any],
        *,
        drop_last: bool,
        epoch: Tensor,
        seed: int,
        marked: bool,
    ) -> None:
        self._seed = seed
        self.dataset = dataset
        has_state = all(callable(getattr(dataset, name, None)) for name in ("state_dict", "load_state_dict"))
        self._marked = marked and has_state
        self.begin_at: tuple[int, dict[int, Mark], int] | None = None
        """For an epoch that is resumed: the position of each reader, and whose turn it is."""
        self._sizes = sizes
        self._collate = collate
        self._drop_last = drop_last
        self._epoch = epoch

    def __iter__(self) -> Iterator[tuple[int | None, Any, Mark | None]]:
        epoch, info = int(self._epoch), get_worker_info()
        reader, turns = (0, 1) if info is None else (info.id, info.num_workers)
        mark = None
        if self.begin_at is not None and self.begin_at[0] == epoch:
            _, marks, turn = self.begin_at
            mark = marks.get(reader)
            if reader < turn % turns:
                yield _PASSED_ON, None, None
        own = OwnRandomStates(mixed_seed(self._seed, epoch, reader))  # so a stream that is read again draws the same
        dataset: Any = self.dataset
        with own:
            if callable(set_epoch := getattr(dataset, "set_epoch", None)):
                set_epoch(epoch)
            if mark is not None:
                dataset.load_state_dict(mark.dataset)
            stream = iter(dataset)
            if mark is not None:
                set_random_states(mark.random)
        for number in count(reader if mark is None else mark.number, turns):
            size = 1 if self._sizes is None else self._sizes[number % len(self._sizes)]
            with own:
                samples = list(islice(stream, size))
                if not samples or (self._drop_last and len(samples) < size):
                    return
                batch = self._collate(samples[0] if self._sizes is None else samples)
                state = copy.deepcopy(dataset.state_dict()) if self._marked else None
            mark = Mark(reader, number + turns, own.states, state) if self._marked else None
            yield None if self._sizes is None else len(samples), batch, mark


def _count(batch: Any) -> int:
    """The number of samples of a batch that the dataset made: the length of its first tensor."""
    tensor = next(_tensors(batch), None)
    if tensor is None or tensor.dim() == 0:
        found = "holds no tensor" if tensor is None else "begins with a tensor without dimensions"
        raise DataError(
            f"the DataLoader has batch_size=None, so the dataset yields whole batches, but one {found}: "
            f"how many samples it has is not known",
            "let the first tensor of a batch have the samples as its first dimension, or set a batch_size",
        )
    return len(tensor)


def _tensors(batch: Any) -> Iterator[Tensor]:
    if isinstance(batch, Tensor):
        yield batch
    elif isinstance(batch, Mapping):
        for value in batch.values():
            yield from _tensors(value)
    elif isinstance(batch, list | tuple):
        for value in batch:
            yield from _tensors(value)
    elif is_dataclass(batch) and not isinstance(batch, type):
        for field in fields(batch):
            yield from _tensors(getattr(batch, field.name, None))
