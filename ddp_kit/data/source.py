"""Checks of the data that the user passes, and the batching options of the user's own DataLoader."""

from collections.abc import Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, cast

import torch.utils.data
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, RandomSampler, SequentialSampler
from torch.utils.data.distributed import DistributedSampler

from ddp_kit.config.settings import DataConfig
from ddp_kit.data.loader_batches import iterates_itself
from ddp_kit.data.sampler import samplers_in
from ddp_kit.distributed.world import mixed_seed, random_states_kept, seed_generators
from ddp_kit.errors import ConfigError, DataError
from ddp_kit.structures import entries
from ddp_kit.texts import kind_of

Data = Dataset[Any] | DataLoader[Any] | Sequence[Any]

_WANTED = "pass a torch Dataset or IterableDataset, or a DataLoader over one"
_MAX_KEYS = 4  # keys in a message
_MAX_NESTING = 5  # the largest depth of nested datasets


def open_data(data: object, role: str) -> "tuple[Any, DataLoader[Any] | None]":
    """Return (dataset, the user's own DataLoader), with None in place of the DataLoader if `data` is a dataset.

    `role`: such as "train_data", for messages. Raises `DataError` for data that cannot be divided among ranks.
    """
    dataset, loader = dataset_and_loader(data)
    if loader is not None and not loader.in_order and loader.num_workers > 1:
        raise DataError(
            f"{role} is a DataLoader with in_order=False, whose {loader.num_workers} workers may return batches in any "
            "order: a batch would be weighted by the size of another batch, and a resumed run would repeat some "
            "batches and skip others",
            "leave out in_order=False; if some samples load slowly, a higher prefetch_factor keeps other workers busy",
        )
    if isinstance(dataset, IterableDataset):
        _check_stream(dataset, role)
        return dataset, loader
    if problem := _no_dataset(dataset):
        raise DataError(f"{role} is {problem[0]}", problem[1])
    if not isinstance(dataset, Sized) or not hasattr(dataset, "__getitem__"):
        raise DataError(f"{role} is {kind_of(dataset)}, which has no __getitem__ or no __len__", _WANTED)
    if len(dataset) == 0:
        raise DataError(
            f"{role} is empty: {type(dataset).__name__} has 0 samples",
            "check the path or the filter that the dataset was created with",
        )
    if loader is not None:
        _check_loader(loader, role)
    return dataset, loader


def dataset_and_loader(data: object) -> "tuple[Any, DataLoader[Any] | None]":
    """(dataset, the user's own DataLoader) of data; None in place of the DataLoader if `data` is a dataset."""
    return (data.dataset, data) if isinstance(data, DataLoader) else (data, None)


class DatasetEpoch:
    """Calls `set_epoch` of a dataset and of the datasets inside it, such as the dataset of a Subset, once per epoch.

    Persistent DataLoader workers use a copy of this object.
    """

    def __init__(self, dataset: object, seed: int) -> None:
        self._dataset = dataset
        self._seed = seed
        self._epoch: int | None = None

    def set(self, epoch: int) -> None:
        """Call `set_epoch` if `epoch` is new, after seeding the generators equally on every rank and in every run."""
        if epoch != self._epoch:
            self._epoch = epoch
            with random_states_kept():
                seed_generators(mixed_seed(self._seed, epoch))
                set_epoch(self._dataset, epoch)


def set_epoch(dataset: Any, epoch: int, nesting: int = 0) -> None:
    """Call `set_epoch` of a dataset and of the datasets inside it, if they have this method."""
    if nesting < _MAX_NESTING:
        several = entries(getattr(dataset, "datasets", None))  # of a ConcatDataset, StackDataset or ChainDataset
        for _, part in [*(several or ()), ("dataset", getattr(dataset, "dataset", None))]:  # the latter of a Subset
            set_epoch(part, epoch, nesting + 1)
    if callable(method := getattr(dataset, "set_epoch", None)):
        method(epoch)


def _no_dataset(data: Any) -> tuple[str, str] | None:
    """Return (description, what to pass instead) for data that is not a sequence of samples; None for other data."""
    kind = kind_of(data)
    if isinstance(data, type):
        return kind, f"pass an instance: {data.__name__}(...)"
    if isinstance(data, str | bytes | Path):
        return f"{kind}, {str(data)!r}", "pass a dataset that reads this data: an object with __getitem__ and __len__"
    if isinstance(data, Iterator):
        return (
            f"{kind}, which can be read only once",
            "pass the object that it iterates over, without iter(...), or an IterableDataset",
        )
    if hasattr(data, "iloc"):
        return f"{kind}, which is indexed by column", "pass TensorDataset(torch.tensor(data.to_numpy())), or a Dataset"
    if isinstance(data, Mapping) and 0 not in data:
        names = [repr(name) for name in islice(data, _MAX_KEYS)]
        return f"{kind} with the keys {', '.join(names)}", (
            "pass a dataset whose samples have the indices 0, 1, ...: one of the values, or TensorDataset(*values)"
        )
    arrays = type(data) is tuple and len(data) > 1 and all(hasattr(array, "shape") and array.shape for array in data)
    if arrays and len({array.shape[0] for array in data}) == 1:
        return f"a tuple of {len(data)} tensors", "pass torch.utils.data.TensorDataset(*tensors)"
    return None


def _check_stream(dataset: "IterableDataset[Any]", role: str) -> None:
    pipes = getattr(torch.utils.data, "IterDataPipe", ())  # deprecated in torch
    if isinstance(dataset, pipes):
        raise DataError(
            f"{role} is a DataPipe ({type(dataset).__name__}), which only torch's DataLoader can divide among ranks",
            "pass an IterableDataset that divides its samples by rank and DataLoader worker, or a dataset with "
            "__getitem__",
        )
    if any(isinstance(stage, DataLoader) for stage in getattr(dataset, "pipeline", ())):
        raise DataError(
            f"{role} is a {type(dataset).__name__} around a DataLoader, which yields whole batches",
            "pass the dataset itself; or, if the dataset makes the batches, DataLoader(dataset.batched(16), "
            "batch_size=None)",
        )


def _check_loader(loader: "DataLoader[Any]", role: str) -> None:
    """Raise `DataError` if the user's DataLoader does not yield all samples on every rank."""
    batches: Any = loader.batch_sampler
    own = iterates_itself(loader)
    if batches is None and own:
        batches = loader.sampler
    if batches is None:
        raise DataError(
            f"{role} is a DataLoader with batch_size=None over {type(loader.dataset).__name__}: "
            "each item of the dataset would be a whole batch",
            "return one sample from __getitem__ and set a batch_size, or yield the batches from an IterableDataset",
        )
    dataset: Any = loader.dataset
    for sampler in samplers_in(batches):
        # The Trainer can replace torch's own DistributedSampler over the whole dataset.
        plain = type(sampler) is DistributedSampler and type(batches) is BatchSampler and not own
        if hasattr(sampler, "num_replicas") and not (plain and len(sampler.dataset) == len(dataset)):
            raise DataError(
                f"{role} is a DataLoader with a {type(sampler).__name__}, which yields only this rank's samples",
                "leave out this sampler, or use one over all samples: the Trainer divides the samples among the ranks",
            )


@dataclass(frozen=True)
class Batching:
    """How samples become batches: by the options of the user's own DataLoader, or by the configuration."""

    size: int | None = None
    """Samples per batch; None if the user's own code makes the batches, or if only the configuration determines it."""
    shuffle: bool = False
    drop_last: bool = False
    sampler: Iterable[Any] | None = None
    """The user's own sampler over all samples."""
    batches: Iterable[Any] | None = None
    """The user's own batch sampler."""
    divided: bool = False
    """Whether each batch of `batches` is a global batch, which is divided among the ranks."""

    @property
    def own(self) -> Iterable[Any] | None:
        """The user's own sampler or batch sampler."""
        return self.sampler if self.batches is None else self.batches


def batching(loader: "DataLoader[Any] | None") -> Batching:
    """The batching options of a DataLoader; the default ones without a DataLoader."""
    if loader is None:
        return Batching()
    if isinstance(loader.dataset, IterableDataset) or iterates_itself(loader):
        return Batching(loader.batch_size, shuffle=False, drop_last=loader.drop_last)
    batches: Any = loader.batch_sampler
    if type(batches) is not BatchSampler:
        return Batching(batches=batches)
    size = batches.batch_size
    drop_last = batches.drop_last
    sampler = batches.sampler
    if isinstance(sampler, DistributedSampler):  # torch's own: `open_data` rejects others
        return Batching(size, sampler.shuffle, drop_last or sampler.drop_last)
    dataset: Any = loader.dataset
    known = type(sampler) in (SequentialSampler, RandomSampler) and not getattr(sampler, "replacement", False)
    if known and len(cast(Sized, sampler)) == len(dataset):  # made by DataLoader(shuffle=...): each sample once
        return Batching(size, isinstance(sampler, RandomSampler), drop_last)
    return Batching(size, drop_last=drop_last, sampler=sampler)


def train_batching(dataset: object, loader: "DataLoader[Any] | None", config: DataConfig) -> Batching:
    """The batching options of training data: those of the DataLoader, or of the configuration.

    Raises `ConfigError` if the data has no indices or a sampler of its own, `DataError` for a DistributedSampler.
    """
    sampler = config.sampler
    batches = config.batch_sampler
    own = sampler if batches is None else batches
    if own is None:
        return Batching(shuffle=config.shuffle) if loader is None else batching(loader)
    name = "data.sampler" if batches is None else "data.batch_sampler"
    if isinstance(dataset, IterableDataset):
        raise ConfigError(
            f"{name} is set, but train_data is a {type(dataset).__name__}, whose samples have no index",
            f"leave out {name}, and choose the samples in __iter__; or use a dataset with __getitem__ and __len__",
        )
    if loader is not None:
        raise ConfigError(
            f"{name} is set, but train_data is a DataLoader, which has a sampler itself",
            f"pass the dataset itself, with settings such as num_workers and collate_fn in data={{...}}; or leave out "
            f"{name}",
        )
    for part in samplers_in(own):
        if hasattr(part, "num_replicas"):
            raise DataError(
                f"{name} contains a {type(part).__name__}, which yields only this rank's samples",
                "leave out this sampler, or use one over all samples: the Trainer divides the samples among the ranks",
            )
    return Batching(sampler=sampler, batches=batches, divided=batches is not None)


def parts_with_state(dataset: object, options: Batching) -> list[str]:
    """The names of the classes of the dataset and its samplers that have `state_dict` and `load_state_dict`."""
    parts = [dataset]
    if options.own is not None:
        parts += samplers_in(options.own)
    names = ("state_dict", "load_state_dict")
    return [type(part).__name__ for part in parts if all(callable(getattr(part, name, None)) for name in names)]


def check_batch_size(options: Batching, micro_batch: int, asked: bool = False) -> None:
    """Raise `DataError` if the user's DataLoader and the configuration have different batch sizes.

    `asked`: whether the configuration sets global_batch_size or micro_batch_size.
    """
    if options.size is None and asked and options.sampler is None and not options.divided:
        maker = "the batch sampler"
        if options.batches is None:
            maker = "the DataLoader has batch_size=None, so the dataset"
        raise DataError(
            f"{maker} decides the batch size, but the configuration sets one too",
            "leave out global_batch_size and micro_batch_size: each batch is one micro-batch of one rank, and "
            "accumulation_steps is the number of micro-batches per rank and optimizer step",
        )
    if options.size is not None and options.size != micro_batch:
        raise DataError(
            f"the DataLoader has batch_size={options.size}, but the configuration makes micro-batches of "
            f"{micro_batch} samples",
            f"set micro_batch_size={options.size} in the TrainerConfig (samples per rank and pass, so the global batch "
            f"grows with the number of ranks), or pass the dataset itself instead of a DataLoader",
        )
