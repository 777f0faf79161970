"""From a dataset to batches on the device: DataLoader, pinned memory, copies beside the computation."""

import os
import pickle
import shutil
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sized
from copy import copy
from dataclasses import dataclass, fields, is_dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    default_collate,
)

from ddp_kit.config import DataConfig
from ddp_kit.errors import DataError
from ddp_kit.log import logger
from ddp_kit.world import World, mixed_seed

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  # where torch's loader processes put their batches
_LEAST_SHARED_MEMORY = 128 << 20  # docker gives 64 MiB

Data = Dataset[Any] | DataLoader[Any]


def open_data(data: object, role: str) -> "tuple[Any, DataLoader[Any] | None]":
    """The dataset, and the user's own DataLoader where that is what they gave.

    Raises `DataError` for what cannot be divided over ranks.
    """
    loader = data if isinstance(data, DataLoader) else None
    dataset = loader.dataset if loader is not None else data
    if isinstance(dataset, IterableDataset):
        raise DataError(
            f"{role} is an IterableDataset ({type(dataset).__name__}), which is not available in this version",
            "give a dataset with __getitem__ and __len__",
        )
    if not hasattr(dataset, "__getitem__") or not isinstance(dataset, Sized):
        raise DataError(
            f"{role} is a {type(dataset).__name__}, without __getitem__ or without __len__",
            "give a torch Dataset, or a DataLoader over one",
        )
    if len(dataset) == 0:
        raise DataError(f"{role} is empty: {type(dataset).__name__} has 0 samples", "check the path it was made from")
    if loader is not None:
        _check_loader(loader, role)
    return dataset, loader


def _check_loader(loader: "DataLoader[Any]", role: str) -> None:
    """Raise `DataError` where the Trainer could not divide the samples as the user's DataLoader would give them."""
    batches = loader.batch_sampler
    if type(batches) is not BatchSampler:
        made = "batch_size=None" if batches is None else f"a {type(batches).__name__}"
        raise DataError(
            f"{role} is a DataLoader with batches of its own making ({made})",
            "give it a batch_size instead: the Trainer makes the batches of all ranks",
        )
    sampler = batches.sampler
    plain = type(sampler) in (SequentialSampler, RandomSampler) and not getattr(sampler, "replacement", False)
    if not plain or len(cast(Sized, sampler)) != len(cast(Sized, loader.dataset)):
        raise DataError(
            f"{role} is a DataLoader with a sampler of its own ({type(sampler).__name__})",
            "leave the sampler out: the Trainer divides the samples over the ranks, in an order it can repeat",
        )


@dataclass(frozen=True)
class Batching:
    """What the user's own DataLoader says of its batches."""

    size: int
    shuffle: bool
    drop_last: bool


def batching(loader: "DataLoader[Any] | None") -> Batching | None:
    """None where there is no DataLoader of the user's own."""
    if loader is None:
        return None
    batches = loader.batch_sampler
    assert isinstance(batches, BatchSampler), "checked when it was opened"
    return Batching(batches.batch_size, isinstance(batches.sampler, RandomSampler), batches.drop_last)


def check_batch_size(own: Batching | None, micro_batch: int) -> None:
    """Raise `DataError` where the user's DataLoader and the configuration disagree."""
    if own is not None and own.size != micro_batch:
        raise DataError(
            f"the DataLoader has batch_size={own.size}, but the configuration makes micro-batches of "
            f"{micro_batch} samples",
            f"set micro_batch_size={own.size} in the TrainerConfig (the samples of one rank in one pass, so that the "
            f"global batch grows with the ranks); or give the dataset itself, and the configuration decides",
        )


def build_loader(
    dataset: Dataset[Any],
    batches: Sampler[list[int]],
    config: DataConfig,
    world: World,
    seed: int,
    template: "DataLoader[Any] | None" = None,
) -> "DataLoader[Any]":
    """A DataLoader over `batches`; what the user's own DataLoader (`template`) chose is kept."""
    pinned = world.device.type == "cuda" if config.pin_memory == "auto" else config.pin_memory
    generator = torch.Generator().manual_seed(mixed_seed(seed, world.rank))
    if template is None:
        workers = _workers(config, world)
        return DataLoader(
            dataset,
            batch_sampler=batches,
            num_workers=workers,
            collate_fn=_by_value(default_collate) if workers and _little_shared_memory() else None,
            pin_memory=pinned,
            timeout=config.timeout or 0 if workers else 0,
            persistent_workers=workers > 0,
            generator=generator,  # seeds the workers: differently on every rank, without touching the global state
        )
    return DataLoader(
        dataset,
        batch_sampler=batches,
        num_workers=template.num_workers,
        collate_fn=_by_value(template.collate_fn)
        if template.num_workers and _little_shared_memory()
        else template.collate_fn,
        pin_memory=pinned or template.pin_memory,
        timeout=template.timeout or (config.timeout or 0 if template.num_workers else 0),
        worker_init_fn=template.worker_init_fn,
        multiprocessing_context=template.multiprocessing_context,
        generator=template.generator or generator,
        prefetch_factor=template.prefetch_factor,
        persistent_workers=template.persistent_workers,
        in_order=template.in_order,
    )


@cache
def _little_shared_memory() -> bool:
    """Whether loader processes had better not use it; says so once."""
    try:
        free = shutil.disk_usage(_SHARED_MEMORY).free
    except OSError:  # not Linux
        return False
    if free < _LEAST_SHARED_MEMORY:
        logger.warning(
            "{} has {:.0f} MiB left: batches come from the loader processes through pipes instead, which is slower; "
            "start the container with --shm-size=8g or --ipc=host",
            _SHARED_MEMORY,
            free / 2**20,
        )
    return free < _LEAST_SHARED_MEMORY


@dataclass(frozen=True)
class _ByValue:
    """What a loader process sends without shared memory: bytes, and what `finish` makes of them on their arrival.

    torch's `file_system` sharing is no way out: it is in /dev/shm, too.
    """

    content: Any
    finish: Callable[[Any], Any] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _arrive, (pickle.dumps(self.content), self.finish)


def _arrive(content: bytes, finish: Callable[[Any], Any] | None) -> Any:
    arrived = pickle.loads(content)  # noqa: S301  # from this process's own child, by a pipe
    return finish(arrived) if finish is not None else arrived


def _by_value(collate: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """torch's own collate function takes shared memory in loader processes, so it is called on arrival."""
    return partial(_ByValue, finish=collate) if collate is default_collate else partial(_send, collate)


def _send(collate: Callable[[Any], Any], samples: Any) -> _ByValue:
    return _ByValue(collate(samples))


def on_device(loader: Iterable[Any], device: torch.device, dtype: torch.dtype | None, ahead: int) -> Iterator[Any]:
    """The loader's batches on `device`; floating-point tensors as `dtype` where it is given.

    On a GPU, `ahead` batches are copied on a side stream while the computation uses the ones before.
    """
    if device.type != "cuda" or ahead == 0:
        for batch in _watched(loader):
            yield _with_objects(_with_tensors(batch, device, dtype), device)
        return
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    waiting: deque[tuple[Any, torch.cuda.Event]] = deque()
    for batch in _watched(loader):
        with torch.cuda.stream(stream):
            moved = _with_tensors(batch, device, dtype)
            waiting.append((moved, stream.record_event()))
        if len(waiting) > ahead:
            yield _arrived(*waiting.popleft(), device)
    while waiting:
        yield _arrived(*waiting.popleft(), device)


def _watched(loader: Iterable[Any]) -> Iterator[Any]:
    """The loader's batches. Raises `DataError` where a loader process is at fault, and names it."""
    batches = iter(loader)
    while True:
        try:
            batch = next(batches)
        except StopIteration:
            return
        except RuntimeError as error:
            raise _named(error, batches) or error from None
        yield batch


def _named(error: RuntimeError, batches: Iterator[Any]) -> DataError | None:
    """torch names processes by their numbers alone, or not at all; None where no loader process is at fault."""
    workers, text = getattr(batches, "_workers", []), str(error)
    found = None
    if "timed out" in text:
        tasks, due = getattr(batches, "_task_info", {}), getattr(batches, "_rcvd_idx", None)
        late = tasks.get(due, (None,))[0]
        found = DataError(
            f"data: no batch has come in time from loader process {late}: {text}",
            "see what __getitem__ waits for, or raise data.timeout",
        )
    else:
        for number, worker in enumerate(workers):
            if not worker.is_alive() and worker.exitcode:
                how = f"signal {-worker.exitcode}" if worker.exitcode < 0 else f"exit code {worker.exitcode}"
                found = DataError(
                    f"data: loader process {number} (pid {worker.pid}) of {len(workers)} ended with {how}",
                    "signal 9 without anyone sending it means out of memory: fewer data.num_workers, smaller samples",
                )
    if found is not None:
        found.hold_back_seconds = 0.0  # it is this rank's alone
    return found


def _with_tensors(batch: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    def move(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        kind = dtype if dtype is not None and leaf.is_floating_point() else leaf.dtype
        # non_blocking waits for nothing only from pinned memory; from other memory torch copies in order
        return leaf.to(device, kind, non_blocking=True)

    return _each(move, batch)


def _with_objects(batch: Any, device: torch.device) -> Any:
    """Objects that know how to move themselves, on the stream that uses them: what they allocate we cannot see."""

    def move(leaf: Any) -> Any:
        moves_itself = hasattr(leaf, "to") and not isinstance(leaf, Tensor | type)
        return leaf.to(device) if moves_itself else leaf

    return _each(move, batch)


def _arrived(batch: Any, event: torch.cuda.Event, device: torch.device) -> Any:
    """Hand a batch to the computation: it waits for the copy, and the memory is not reused before it is done."""
    current = torch.cuda.current_stream(device)
    current.wait_event(event)

    def keep(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.is_cuda:
            leaf.record_stream(current)
        return leaf

    return _with_objects(_each(keep, batch), device)


def _each(function: Callable[[Any], Any], batch: Any) -> Any:
    """The same nesting of containers, with `function` applied to each leaf: what is none, or moves itself.

    Containers are copied and filled, not made anew: what their constructors do was done once already.
    """
    if isinstance(batch, Tensor | str | bytes) or hasattr(batch, "to"):
        return function(batch)
    if isinstance(batch, MutableMapping) and type(batch) is not dict:
        clone = copy(batch)
        for name, value in batch.items():
            clone[name] = _each(function, value)
        return clone
    if isinstance(batch, Mapping):
        return {name: _each(function, value) for name, value in batch.items()}
    if isinstance(batch, tuple) and hasattr(batch, "_make"):  # a named tuple
        return batch._make(_each(function, value) for value in batch)
    if isinstance(batch, list | tuple):
        return type(batch)(_each(function, value) for value in batch)
    if is_dataclass(batch) and not isinstance(batch, type):
        filled = copy(batch)
        for name in (field.name for field in fields(batch) if hasattr(batch, field.name)):
            object.__setattr__(filled, name, _each(function, getattr(batch, name)))  # frozen ones too
        return filled
    return function(batch)


def _workers(config: DataConfig, world: World) -> int:
    if config.num_workers != "auto":
        return config.num_workers
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min(8, max(0, cores // world.local_world_size - 1))
