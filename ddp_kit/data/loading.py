"""Loaders for the batches of this rank, chosen by the kind of data: see `build_loader`."""

import os
import pickle
import shutil
import sys
import tempfile
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate, get_worker_info

from ddp_kit.config.settings import DataConfig
from ddp_kit.data.collate import Collate, identity_collate, stop_iteration_error
from ddp_kit.data.source import DatasetEpoch
from ddp_kit.distributed.world import World, mixed_seed, random_states_kept, seed_generators
from ddp_kit.env import LEAST_SHARED_MEMORY, SHARED_MEMORY
from ddp_kit.errors import ConfigError
from ddp_kit.log import logger
from ddp_kit.texts import some

# --- Fetching samples -------------------------------------------------------------------------------------------------


class Batches(Protocol):
    """Iterates over the batches of an epoch, each as a list of sample keys."""

    seed: int

    @property
    def epoch(self) -> int:
        """The epoch of the next iteration."""

    def __iter__(self) -> Iterator[list[Any]]: ...


class TensorBatches(Dataset[Any]):
    """The batches of a TensorDataset, or of a Subset of one, each read at once.

    A batch is what `default_collate` returns: a list of tensors that share no memory with the dataset.
    """

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset
        self._subsets, self._tensors = unwrapped(dataset)

    def __getitems__(self, keys: list[int]) -> list[Tensor]:
        indices = keys
        try:
            for subset in self._subsets:
                chosen = subset.indices
                indices = [chosen[index] for index in indices]
            # Five times as fast as torch.tensor(indices).
            index = torch.frombuffer(array("q", indices), dtype=torch.int64)
            return [tensor.index_select(0, index) for tensor in self._tensors.tensors]
        except (IndexError, OverflowError, RuntimeError, TypeError, ValueError):
            # Negative or invalid indices: fetch each sample, which gives torch's result or error.
            return default_collate(fetch_samples(self.dataset, keys))  # type: ignore[no-any-return]


class TensorLoader:
    """A loader that fetches batches in this process, faster than a DataLoader. `pinned`: whether to pin the batches."""

    def __init__(self, data: TensorBatches, batches: Iterable[list[int]], pinned: bool) -> None:
        self._data = data
        self._batches = batches
        self._pinned = pinned

    def __iter__(self) -> Iterator[list[Tensor]]:
        for keys in self._batches:  # not map, which would end if the indices of a Subset raised StopIteration
            batch = self._data.__getitems__(keys)
            yield [tensor.pin_memory() for tensor in batch] if self._pinned else batch


class SampleBatches(Dataset[Any]):
    """The batches of a dataset: fetches the samples of a batch, and collates them.

    `seeding`: whether to set the random states before each sample, from (seed, epoch, key) alone; before each batch,
    from (seed, epoch, keys) alone; or not at all. A resumed run then draws the same random numbers, no matter how far
    ahead batches are fetched. With seeding, the keys must come from `WithEpoch`, and the random states of the training
    process are restored after each batch. `keyed`: whether to return `Keyed` batches. `dataset_epoch`: an object that
    calls the dataset's `set_epoch` before the first sample of an epoch; None: do not call it.
    """

    def __init__(
        self,
        dataset: Any,
        collate: Callable[..., Any],
        seeding: Literal["sample", "batch"] | None,
        seed: int,
        dataset_epoch: DatasetEpoch | None,
        *,
        keyed: bool,
    ) -> None:
        self.dataset = dataset
        self._collate = collate
        self._seeding = seeding
        self._seed = seed
        self._dataset_epoch = dataset_epoch
        self._keyed = keyed

    def __getitems__(self, keys: list[Any]) -> Any:
        if self._seeding is None:
            return self._collate(fetch_samples(self.dataset, keys), len(keys))
        epoch = keys[0][0]
        if self._dataset_epoch is not None:
            self._dataset_epoch.set(epoch)
        with random_states_kept() if get_worker_info() is None else nullcontext():
            if self._seeding == "batch":
                sample_keys = [key for _, key in keys]
                seed_generators(mixed_seed(self._seed, epoch, *sample_keys))
                return self._collate(fetch_samples(self.dataset, sample_keys), len(keys))
            samples = []
            fetched = []
            for key in keys:
                seed_generators(mixed_seed(self._seed, *key))
                for sample in fetch_samples(self.dataset, [key[1]]):
                    samples.append(sample)
                    fetched.append(key)
            return self._collate(samples, len(keys), fetched if self._keyed else None)


def fetch_samples(dataset: Any, keys: list[Any]) -> list[Any]:
    """Fetch samples as torch's DataLoader does; an error gets a note that names the sample.

    The user's `__getitems__` may return fewer samples than there are keys, or an object that is no list.
    """
    subsets, inner = unwrapped(dataset)
    several = callable(getattr(inner, "__getitems__", None))
    samples: list[Any] = []
    try:
        if several:
            return dataset.__getitems__(keys)  # type: ignore[no-any-return]
        for key in keys:
            samples.append(dataset[key])  # after an error, `samples` holds the samples read before
    except Exception as error:
        if several:
            method = "__getitems__"
            note = f"while reading samples {some([*map(str, keys)])} of {type(dataset).__name__}"
        else:
            method = "__getitem__"
            note = f"while reading {_sample_name(keys[len(samples)], subsets, inner)}"
        if isinstance(error, StopIteration):
            raise stop_iteration_error(f"{method} of {type(inner).__name__}", note) from error
        error.add_note(note)
        raise
    return samples


def _sample_name(key: Any, subsets: list[Any], inner: Any) -> str:
    """A description of a sample by its index; for a Subset, also by its index in the underlying dataset."""
    if not subsets:
        return f"sample {key} of {type(inner).__name__}"
    where = f"sample {key} of a Subset"
    with suppress(Exception):  # such as a key that is out of range
        for subset in subsets:
            key = subset.indices[key]
        where += f", which is sample {int(key)} of {type(inner).__name__}"
    return where


def can_read_batches_at_once(dataset: Dataset[Any]) -> bool:
    """Whether a dataset is a TensorDataset of dense CPU tensors, or a Subset of one, as `TensorBatches` requires."""
    _, inner = unwrapped(dataset)
    return type(inner) is TensorDataset and all(
        type(tensor) is Tensor and tensor.layout == torch.strided and tensor.device.type == "cpu"
        for tensor in inner.tensors
    )


def unwrapped(dataset: Any) -> tuple[list[Any], Any]:
    """The nested Subsets of a dataset, outermost first, and the underlying dataset."""
    subsets = []
    while type(dataset) is Subset:
        subsets.append(dataset)
        dataset = dataset.dataset
    return subsets, dataset


class WithEpoch:
    """Adds the epoch to each key of a batch, because persistent DataLoader workers cannot know it otherwise."""

    def __init__(self, batches: Batches) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[list[tuple[int, Any]]]:
        epoch = self.batches.epoch
        return ([(epoch, key) for key in keys] for keys in self.batches)


def expose_user_dataset(then: Callable[[int], None] | None, number: int) -> None:
    """Make `get_worker_info().dataset` the user's own dataset instead of a wrapper, in a DataLoader worker.

    `then`: the user's own worker_init_fn, which is called afterwards.
    """
    info: Any = get_worker_info()
    # The info forbids assignment. Fetching is not affected, because the worker has a reference to the wrapper.
    object.__setattr__(info, "dataset", info.dataset.dataset)
    if then is not None:
        then(number)


# --- Transfer through pipes -------------------------------------------------------------------------------------------
# Where torch's own way cannot work: it needs shared memory, and Unix sockets in the folder for temporary files.


_SOCKET_PATH_BYTES = 108 if sys.platform == "linux" else 104  # the size of sun_path, with a final zero byte


def sends_by_value(workers: int) -> bool:
    """Whether DataLoader workers send batches through pipes: with too little shared memory, or a long TMPDIR."""
    return workers > 0 and (_little_shared_memory() or _long_temporary_folder())


@cache
def _long_temporary_folder() -> bool:
    """Whether a socket of multiprocessing in the folder for temporary files would have too long a path; warns once.

    A DataLoader worker that cannot create this socket sends no batch, and raises no error: the run would wait forever.
    """
    folder = tempfile.gettempdir()
    too_long = len(os.fsencode(folder)) + len("/pymp-12345678/listener-12345678") >= _SOCKET_PATH_BYTES
    if too_long:
        logger.warning(
            "the folder for temporary files, {}, has too long a path for the sockets of DataLoader workers: they send "
            "batches through pipes instead, which is slower; set TMPDIR to a folder with a path of at most {} bytes",
            folder,
            _SOCKET_PATH_BYTES - len("/pymp-12345678/listener-12345678") - 1,
        )
    return too_long


@cache
def _little_shared_memory() -> bool:
    """Whether there is too little shared memory for DataLoader workers; logs a warning once."""
    try:
        free = shutil.disk_usage(SHARED_MEMORY).free
    except OSError:  # not Linux
        return False
    if free < LEAST_SHARED_MEMORY:
        logger.warning(
            "{} has only {:.0f} MiB free: DataLoader workers send batches through pipes instead, which is slower; "
            "start the container with --shm-size=8g or --ipc=host",
            SHARED_MEMORY,
            free / 2**20,
        )
    return free < LEAST_SHARED_MEMORY


@dataclass(frozen=True)
class ByValue:
    """A batch that a DataLoader worker sends as bytes, because torch's own way does not work here.

    `collate`: a function that the receiving process calls with `content`, which then are arguments; None: `content` is
    the batch. torch's sharing strategy `file_system` would not help, because it uses /dev/shm as well.
    """

    content: Any
    collate: Collate | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (pickle.dumps(self.content), self.collate)


def _received(content: bytes, collate: Collate | None) -> Any:
    received = pickle.loads(content)  # noqa: S301  # from this process's own child, through a pipe
    return received if collate is None else collate(*received)


def collate_by_value(collate: Collate, samples: Any, requested: int, keys: Sequence[Any] | None = None) -> ByValue:
    """Collate samples in a DataLoader worker. torch's default would use shared memory: the receiver then collates."""
    if collate.function is None:
        return ByValue((samples, requested, keys), collate)
    return ByValue(collate(samples, requested, keys))


# --- DataLoader -------------------------------------------------------------------------------------------------------


def build_loader(
    dataset: Dataset[Any],
    batches: Iterable[list[Any]],
    config: DataConfig,
    world: World,
    seed: int,
    template: "DataLoader[Any] | None" = None,
    *,
    keyed: bool = False,
    dataset_epoch: DatasetEpoch | None = None,
) -> Iterable[Any]:
    """Create a loader that yields one batch of `dataset` for each list of keys in `batches`.

    data                                           loader
    tensors in memory, without DataLoader workers  TensorLoader, which indexes the tensors in this process
    tensors in memory, with DataLoader workers     DataLoader over TensorBatches
    any other dataset with indices                 DataLoader over SampleBatches
    a stream                                       DataLoader over StreamBatches: see `build_stream`

    `template`: the user's own DataLoader, whose options are used. `seed`: the seed of the DataLoader workers. If
    `batches` has a seed and an epoch (see `Batches`), random states are set from these instead: before each sample if
    `config.seed_samples` is set; otherwise before each batch that is fetched by a worker or prefetched. `keyed`:
    whether to yield `Keyed` batches, which requires `config.seed_samples`. `dataset_epoch`: an object
    that calls the dataset's `set_epoch` in persistent workers.
    """
    options = loader_options(config, world, seed, template)
    workers = options["num_workers"]
    pinned = options["pin_memory"]
    options["worker_init_fn"] = partial(expose_user_dataset, options.get("worker_init_fn"))
    uses_default = chosen_collate(config, template).function is None
    collate, send = collate_and_send(config, template, workers)
    if uses_default and can_read_batches_at_once(dataset) and not keyed:  # this draws no random numbers
        data = TensorBatches(dataset)
        if not workers and (not pinned or world.device.type == "cuda"):
            return TensorLoader(data, batches, pinned)
        return DataLoader(data, batch_sampler=batches, collate_fn=send, **options)
    # Whether this process fetches batches, and draws their random numbers, before the step that uses them.
    ahead = world.device.type == "cuda" and config.prefetch_batches > 0
    seeding: Literal["sample", "batch"] | None = None
    if config.seed_samples:
        seeding = "sample"
    elif (workers or ahead) and hasattr(batches, "epoch"):  # a plain list of batches has no epoch
        seeding = "batch"
    loaded = partial(SampleBatches, dataset, collate, seeding, dataset_epoch=dataset_epoch, keyed=keyed)
    if seeding is None:
        return DataLoader(loaded(0), batch_sampler=batches, collate_fn=identity_collate, **options)
    seeded = cast(Batches, batches)
    return DataLoader(loaded(seeded.seed), batch_sampler=WithEpoch(seeded), collate_fn=identity_collate, **options)


def collate_and_send(
    config: DataConfig, template: "DataLoader[Any] | None", workers: int
) -> tuple[Callable[..., Any], Callable[[Any], Any]]:
    """The function that collates samples, and the one that is applied to other values before a worker sends them."""
    collate = chosen_collate(config, template)
    if sends_by_value(workers):
        return partial(collate_by_value, collate), ByValue
    return collate, identity_collate


def chosen_collate(config: DataConfig, template: "DataLoader[Any] | None") -> Collate:
    """The user's collate function, or torch's default with better errors. Raises `ConfigError` if the user set two."""
    function = config.collate_fn
    if template is not None and template.collate_fn is not default_collate:
        if function is not None:
            raise ConfigError("both the DataLoader and data.collate_fn set a collate function", "leave one of them out")
        function = template.collate_fn
    return Collate(function)


def loader_options(
    config: DataConfig, world: World, seed: int, template: "DataLoader[Any] | None" = None
) -> dict[str, Any]:
    """Keyword arguments for a DataLoader, without sampler and collate_fn; taken from `template` if it is given."""
    pinned = config.pin_memory
    if pinned == "auto":
        pinned = world.device.type == "cuda"
    # Seeds the DataLoader workers differently on every rank, without drawing from the global generator.
    generator = torch.Generator().manual_seed(mixed_seed(seed, world.rank))
    if template is not None:
        workers = template.num_workers
    elif config.num_workers != "auto":
        workers = config.num_workers
    else:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        workers = min(8, max(0, cores // world.local_world_size - 1))
    options = {
        "num_workers": workers,
        "pin_memory": pinned,
        "timeout": (workers > 0) * (config.timeout or 0),
        "generator": generator,
    }
    if template is None:
        return options
    return {
        "num_workers": workers,
        "pin_memory": pinned or template.pin_memory,
        "timeout": template.timeout or options["timeout"],
        "worker_init_fn": template.worker_init_fn,
        "multiprocessing_context": template.multiprocessing_context,
        "generator": template.generator or generator,
        "prefetch_factor": template.prefetch_factor,
        "persistent_workers": template.persistent_workers,
    }
