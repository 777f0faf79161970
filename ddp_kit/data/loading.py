"""DataLoaders for the batches of this rank, and the dataset wrappers that they use."""

import os
import pickle
import shutil
import sys
import tempfile
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol, cast

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, default_collate, get_worker_info

from ddp_kit.config.settings import DataConfig
from ddp_kit.data.collate import (
    CollateKeyed,
    FewerSamples,
    OwnCollate,
    checked_collate,
    identity_collate,
    stop_iteration_error,
)
from ddp_kit.data.source import DatasetEpoch
from ddp_kit.distributed.world import (
    RandomStates,
    World,
    mixed_seed,
    random_states,
    random_states_kept,
    seed_generators,
    set_random_states,
)
from ddp_kit.errors import ConfigError, some
from ddp_kit.log import logger

# --- Fetching samples -------------------------------------------------------------------------------------------------


class Batches(Protocol):
    """Iterates over the batches of an epoch, each as a list of sample keys."""

    seed: int

    @property
    def epoch(self) -> int:
        """The epoch of the next iteration."""

    def __iter__(self) -> Iterator[list[Any]]: ...


class WholeBatches(Dataset[Any]):
    """A TensorDataset, or a Subset of one, that returns a whole batch at once.

    The result is the same as that of `default_collate`: a list of tensors that share no memory with the dataset.
    """

    def __init__(self, dataset: Dataset[Any]) -> None:
        self.dataset = dataset
        self._subsets, self._tensors = _unwrapped(dataset)

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


class Samples(Dataset[Any]):
    """A wrapper around a dataset. If reading a sample raises an error, a note on the error names the sample."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __getitems__(self, keys: list[Any]) -> list[Any]:
        return fetch_samples(self.dataset, keys)


def fetch_samples(dataset: Any, keys: list[Any]) -> list[Any]:
    """Fetch samples as torch's DataLoader does; an error gets a note that names the sample."""
    subsets, inner = _unwrapped(dataset)
    method = "__getitems__" if callable(getattr(inner, "__getitems__", None)) else "__getitem__"
    samples: list[Any] = []
    try:
        if method == "__getitems__":
            found = dataset.__getitems__(keys)
            return FewerSamples(found, len(keys)) if type(found) is list and len(found) < len(keys) else found
        for key in keys:
            samples.append(dataset[key])  # after an error, `samples` holds the samples read before
    except Exception as error:
        note = f"while reading samples {some([*map(str, keys)])} of {type(dataset).__name__}"
        if method == "__getitem__":
            note = f"while reading {_sample(keys[len(samples)], subsets, inner)}"
        if isinstance(error, StopIteration):
            raise stop_iteration_error(f"{method} of {type(inner).__name__}", note) from error
        error.add_note(note)
        raise
    return samples


def _sample(key: Any, subsets: list[Any], inner: Any) -> str:
    """A description of a sample by its index; for a Subset, also by its index in the underlying dataset."""
    where = f"sample {key} of {type(inner).__name__}" if not subsets else f"sample {key} of a Subset"
    with suppress(Exception):  # such as a key that is out of range
        for subset in subsets:
            key = subset.indices[key]
        where += f", which is sample {int(key)} of {type(inner).__name__}" if subsets else ""
    return where


def can_fetch_whole_batches(dataset: Dataset[Any]) -> bool:
    """Whether a dataset is a TensorDataset of dense CPU tensors, or a Subset of one, as `WholeBatches` requires."""
    _, inner = _unwrapped(dataset)
    return type(inner) is TensorDataset and all(map(_is_dense_on_cpu, inner.tensors))


def _unwrapped(dataset: Any) -> tuple[list[Any], Any]:
    """The nested Subsets of a dataset, outermost first, and the underlying dataset."""
    subsets = []
    while type(dataset) is Subset:
        subsets.append(dataset)
        dataset = dataset.dataset
    return subsets, dataset


def _is_dense_on_cpu(tensor: Tensor) -> bool:
    return type(tensor) is Tensor and tensor.layout == torch.strided and tensor.device.type == "cpu"


class WholeBatchLoader:
    """A loader that fetches batches in this process, faster than a DataLoader. `pinned`: whether to pin the batches."""

    def __init__(self, data: WholeBatches, batches: Iterable[list[int]], pinned: bool) -> None:
        self._data = data
        self._batches = batches
        self._fetch: Callable[[list[int]], list[Tensor]] = self._pinned if pinned else data.__getitems__

    def __iter__(self) -> Iterator[list[Tensor]]:
        for keys in self._batches:  # not map, which would end if the indices of a Subset raised StopIteration
            yield self._fetch(keys)

    def _pinned(self, keys: list[int]) -> list[Tensor]:
        return [tensor.pin_memory() for tensor in self._data.__getitems__(keys)]


class SeededSamples(Dataset[Any]):
    """Wraps a dataset, and sets the random states from (seed, epoch, key) alone before each sample is read.

    The keys must come from `WithEpoch`. In the training process, random states are restored afterwards. `keyed`:
    whether to return (key, sample) pairs. `dataset_epoch`: an object that calls the dataset's `set_epoch` before the
    first sample of an epoch; None: do not call it.
    """

    def __init__(
        self, dataset: Any, seed: int, dataset_epoch: DatasetEpoch | None = None, *, keyed: bool = False
    ) -> None:
        self.dataset = dataset
        self._seed = seed
        self._dataset_epoch = dataset_epoch
        self._keyed = keyed

    def __getitems__(self, keys: list[tuple[int, Any]]) -> list[Any]:
        if self._dataset_epoch is not None:
            self._dataset_epoch.set(keys[0][0])
        with random_states_kept() if get_worker_info() is None else nullcontext():
            samples = [(key, sample) for key in keys for sample in self._fetched(*key)]
        found = samples if self._keyed else [sample for _, sample in samples]
        return found if len(found) == len(keys) else FewerSamples(found, len(keys))

    def _fetched(self, epoch: int, key: Any) -> list[Any]:
        seed_generators(mixed_seed(self._seed, epoch, key))
        return fetch_samples(self.dataset, [key])


class SeededBatches(Dataset[Any]):
    """Wraps a dataset, and sets the random states from (seed, epoch, keys) alone before each batch is read.

    A resumed run therefore draws the same random numbers, no matter how far ahead it fetches batches. The keys must
    come from `WithEpoch`. The random states are not restored, because collate_fn may draw random numbers afterwards:
    use this wrapper only in DataLoader workers or in an `IsolatedLoader`. `dataset_epoch`: as for `SeededSamples`.
    """

    def __init__(self, dataset: Any, seed: int, dataset_epoch: DatasetEpoch | None = None) -> None:
        self.dataset = dataset
        self._seed = seed
        self._dataset_epoch = dataset_epoch

    def __getitems__(self, keys: list[tuple[int, Any]]) -> list[Any]:
        if self._dataset_epoch is not None:
            self._dataset_epoch.set(keys[0][0])
        own = [key for _, key in keys]
        seed_generators(mixed_seed(self._seed, keys[0][0], *own))
        return fetch_samples(self.dataset, own)


class IsolatedLoader:
    """Wraps a loader without workers, and restores the random states of the training process after each batch."""

    def __init__(self, loader: "DataLoader[Any]") -> None:
        self._loader = loader
        self.batch_sampler = loader.batch_sampler  # `checked_batches` reads it to name samples in errors

    def __iter__(self) -> Iterator[Any]:
        batches = iter(self._loader)
        while True:
            with random_states_kept():
                try:
                    batch = next(batches)
                except StopIteration:
                    return
            yield batch


class IsolatedRandomStates:
    """Context manager with its own random states, separate from the random states of training.

    Each use continues from the states at the end of the previous use; the first use starts from `seed`. In a DataLoader
    worker, nothing is restored on exit, because no training code runs there.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._in_worker = get_worker_info() is not None
        self._states: RandomStates | None = None

    def __enter__(self) -> None:
        if not self._in_worker:
            self._outside = random_states()
        if self._states is None:
            seed_generators(self._seed)
        elif not self._in_worker:
            set_random_states(self._states)

    def __exit__(self, *_: object) -> None:
        self._states = random_states()
        if not self._in_worker:
            set_random_states(self._outside)

    @property
    def states(self) -> RandomStates:
        """The random states at the end of the last use."""
        assert self._states is not None
        return self._states


class WithEpoch:
    """Adds the epoch to each key of a batch, because persistent DataLoader workers cannot know it otherwise."""

    def __init__(self, batches: Batches) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[list[tuple[int, Any]]]:
        epoch = self.batches.epoch
        return ([(epoch, key) for key in keys] for keys in self.batches)


class ExposeUserDataset:
    """A `worker_init_fn` for wrapped datasets: makes `get_worker_info().dataset` the user's own dataset.

    `then`: the user's own worker_init_fn, which is called afterwards.
    """

    def __init__(self, then: Callable[[int], None] | None) -> None:
        self._then = then

    def __call__(self, number: int) -> None:
        info: Any = get_worker_info()
        # The info forbids assignment. Fetching is not affected, because the worker has a reference to the wrapper.
        object.__setattr__(info, "dataset", info.dataset.dataset)
        if self._then is not None:
            self._then(number)


# --- Transfer through pipes -------------------------------------------------------------------------------------------
# Where torch's own way cannot work: it needs shared memory, and Unix sockets in the folder for temporary files.


_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  # where torch's DataLoader workers put their batches
_LEAST_SHARED_MEMORY = 128 << 20  # Docker's default is 64 MiB
_SOCKET_PATH_BYTES = 108 if sys.platform == "linux" else 104  # the size of sun_path, with a final zero byte


def sendable(collate: Callable[[Any], Any], workers: int) -> Callable[[Any], Any]:
    """Return `collate`. With too little shared memory, or a long TMPDIR, workers then send batches through pipes."""
    return _by_value(collate) if workers and (_little_shared_memory() or _long_temporary_folder()) else collate


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
        free = shutil.disk_usage(_SHARED_MEMORY).free
    except OSError:  # not Linux
        return False
    if free < _LEAST_SHARED_MEMORY:
        logger.warning(
            "{} has only {:.0f} MiB free: DataLoader workers send batches through pipes instead, which is slower; "
            "start the container with --shm-size=8g or --ipc=host",
            _SHARED_MEMORY,
            free / 2**20,
        )
    return free < _LEAST_SHARED_MEMORY


@dataclass(frozen=True)
class _ByValue:
    """A batch that a DataLoader worker sends as bytes, because torch's own way does not work here.

    `finish`: a function that the receiving process applies to the batch. torch's sharing strategy `file_system` would
    not help, because it uses /dev/shm as well.
    """

    content: Any
    finish: Callable[[Any], Any] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (pickle.dumps(self.content), self.finish)


def _rebuilt(content: bytes, finish: Callable[[Any], Any] | None) -> Any:
    received = pickle.loads(content)  # noqa: S301  # from this process's own child, through a pipe
    return finish(received) if finish is not None else received


def _by_value(collate: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wrap a collate function so that workers send batches as bytes.

    With torch's default collate function, workers send the samples, and the receiving process collates them.
    """
    return partial(_ByValue, finish=collate) if collate is checked_collate else partial(_send, collate)


def _send(collate: Callable[[Any], Any], samples: Any) -> _ByValue:
    return _ByValue(collate(samples))


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

    `template`: the user's own DataLoader, whose options are used. `seed`: the seed of the DataLoader workers. If
    `batches` has a seed and an epoch (see `Batches`), random states are set from these instead: before each sample if
    `config.seed_samples` is set; otherwise before each batch that is fetched by a worker or prefetched. `keyed`:
    whether to yield `Keyed` batches, which requires `config.seed_samples`. `dataset_epoch`: an object
    that calls the dataset's `set_epoch` in persistent workers.
    """
    options = loader_options(config, world, seed, template)
    workers, pinned = options["num_workers"], options["pin_memory"]
    collate = chosen_collate(config, template)
    own = dataset
    # Whether this process fetches batches, and draws their random numbers, before the step that uses them.
    ahead = world.device.type == "cuda" and config.prefetch_batches > 0
    # Fetching whole batches draws no random numbers.
    if collate is checked_collate and can_fetch_whole_batches(dataset) and not keyed:
        whole = WholeBatches(dataset)
        if not workers and (not pinned or world.device.type == "cuda"):
            return WholeBatchLoader(whole, batches, pinned)
        dataset, collate = whole, identity_collate
    elif config.seed_samples:
        seeded = cast(Batches, batches)
        dataset, batches = SeededSamples(dataset, seeded.seed, dataset_epoch, keyed=keyed), WithEpoch(seeded)
        collate = CollateKeyed(collate) if keyed else collate
    elif (workers or ahead) and hasattr(batches, "epoch"):  # a plain list of batches has no epoch
        seeded = cast(Batches, batches)
        dataset, batches = SeededBatches(dataset, seeded.seed, dataset_epoch), WithEpoch(seeded)
    else:
        dataset = Samples(dataset)
    if dataset is not own:
        options["worker_init_fn"] = ExposeUserDataset(options.get("worker_init_fn"))
    loader = DataLoader(dataset, batch_sampler=batches, collate_fn=sendable(collate, workers), **options)
    return IsolatedLoader(loader) if type(dataset) is SeededBatches and not workers else loader


def chosen_collate(config: DataConfig, template: "DataLoader[Any] | None") -> Callable[[Any], Any]:
    """The user's collate function, or torch's default with better errors. Raises `ConfigError` if the user set two."""
    given = config.collate_fn
    if template is not None and template.collate_fn is not default_collate:
        if given is not None:
            raise ConfigError("both the DataLoader and data.collate_fn set a collate function", "leave one of them out")
        given = template.collate_fn
    return checked_collate if given is None else OwnCollate(given)


def loader_options(
    config: DataConfig, world: World, seed: int, template: "DataLoader[Any] | None" = None
) -> dict[str, Any]:
    """Keyword arguments for a DataLoader, without sampler and collate_fn; taken from `template` if it is given."""
    pinned = world.device.type == "cuda" if config.pin_memory == "auto" else config.pin_memory
    # Seeds the DataLoader workers differently on every rank, without drawing from the global generator.
    generator = torch.Generator().manual_seed(mixed_seed(seed, world.rank))
    workers = _workers(config, world) if template is None else template.num_workers
    timeout = config.timeout or 0 if workers else 0
    if template is None:
        return {
            "num_workers": workers,
            "pin_memory": pinned,
            "timeout": timeout,
            "generator": generator,
        }
    return {
        "num_workers": workers,
        "pin_memory": pinned or template.pin_memory,
        "timeout": template.timeout or timeout,
        "worker_init_fn": template.worker_init_fn,
        "multiprocessing_context": template.multiprocessing_context,
        "generator": template.generator or generator,
        "prefetch_factor": template.prefetch_factor,
        "persistent_workers": template.persistent_workers,
    }


def _workers(config: DataConfig, world: World) -> int:
    if config.num_workers != "auto":
        return config.num_workers
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(8, max(0, cores // world.local_world_size - 1))
