"""Batches from an IterableDataset: each rank has a stream of its own, which the dataset divides.

Loader processes take turns: batch j of a rank comes from process j % W, whose i-th batch is therefore number i*W + w.
Once the streams of some processes have ended, the turns are the others'.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
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
from ddp_kit.loader.watched import watched
from ddp_kit.world import World, mixed_seed


class Stream:
    """Iterating gives `(samples, batch)` for one epoch: how many samples a batch has, and the batch."""

    def __init__(self, loader: "DataLoader[Any]", epoch: Tensor) -> None:
        self._loader = loader
        self._epoch = epoch

    def set_epoch(self, epoch: int) -> None:
        """Which epoch the next iteration is; a dataset that has `set_epoch` is told, in loader processes too."""
        self._epoch.fill_(epoch)

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        for samples, batch in watched(self._loader):
            if type(batch) is Uncollated:
                raise data_error(batch, None)
            yield _count(batch) if samples is None else samples, batch


def build_stream(
    dataset: "IterableDataset[Any]",
    sizes: Sequence[int],
    config: DataConfig,
    world: World,
    seed: int,
    template: "DataLoader[Any] | None" = None,
) -> Stream:
    """A loader whose batch number j, counted over an epoch, has `sizes[j % len(sizes)]` samples; the last ones fewer.

    What the user's own DataLoader (`template`) chose is kept. Where its batch_size is None the dataset yields whole
    batches, and `sizes` is not used. Raises `DataError` for `data.seed_samples`, and later for a batch of unknown size.
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
    )
    return Stream(DataLoader(batches, batch_size=None, collate_fn=as_it_is, **options), epoch)


class _Batches(IterableDataset[tuple[int | None, Any]]):
    """Groups what the user's dataset yields, in the process that reads it. `sizes` None: these are batches already."""

    def __init__(
        self,
        dataset: "IterableDataset[Any]",
        sizes: tuple[int, ...] | None,
        collate: Callable[[Any], Any],
        *,
        drop_last: bool,
        epoch: Tensor,
        seed: int,
    ) -> None:
        self._seed = seed
        self.dataset = dataset
        self._sizes = sizes
        self._collate = collate
        self._drop_last = drop_last
        self._epoch = epoch

    def __iter__(self) -> Iterator[tuple[int | None, Any]]:
        epoch, info = int(self._epoch), get_worker_info()
        first, turns = (0, 1) if info is None else (info.id, info.num_workers)
        own = OwnRandomStates(mixed_seed(self._seed, epoch, first))  # read once more, a stream draws the same
        with own:
            if callable(set_epoch := getattr(self.dataset, "set_epoch", None)):
                set_epoch(epoch)
            stream = iter(self.dataset)
        for number in count(first, turns):
            size = 1 if self._sizes is None else self._sizes[number % len(self._sizes)]
            with own:
                samples = list(islice(stream, size))
                if not samples or (self._drop_last and len(samples) < size):
                    return
                batch = self._collate(samples[0] if self._sizes is None else samples)
            yield None if self._sizes is None else len(samples), batch


def _count(batch: Any) -> int:
    """The samples of a batch that the dataset itself made: the length of its first tensor."""
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
