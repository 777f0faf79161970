"""Moves batches to the device, overlapped with computation; batches may be any nested containers."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from copy import copy
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ddp_kit.loader.worker_errors import checked_batches


def _nothing() -> None:
    pass


def on_device(
    loader: Iterable[Any],
    device: torch.device,
    dtype: torch.dtype | None,
    ahead: int,
    transform: Callable[[Any], Any] | None = None,
    fetched: Callable[[], None] = _nothing,
    moved: Callable[[], None] = _nothing,
) -> Iterator[Any]:
    """Yield the loader's batches on `device`, with floating-point tensors converted to `dtype` if it is given.

    On a GPU, the dense tensors in host memory of the next `ahead` batches are copied on a side stream, overlapped with
    computation. Everything else in a batch is moved on the computation's stream when the batch is yielded.
    `fetched` is called when the loader has returned a batch, `moved` when it is on the device. `transform`: applied to
    each batch after its copy, on the same stream.
    """
    if device.type != "cuda" or ahead == 0:
        move = partial(_moved, device=device, dtype=dtype)
        stays = device.type == "cpu" and dtype is None
        for batch in checked_batches(loader):
            fetched()
            arrived = batch if stays and _is_plain(batch) else _each(move, batch)
            arrived = arrived if transform is None else transform(arrived)
            moved()
            yield arrived
        return
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    waiting: deque[tuple[Any, torch.cuda.Event]] = deque()
    for batch in checked_batches(loader):
        with torch.cuda.stream(stream):
            copied = _ahead(batch, device, dtype)
            waiting.append((copied if transform is None else transform(copied), stream.record_event()))
        if len(waiting) > ahead:
            fetched()
            arrived = _arrived(*waiting.popleft(), device, dtype)
            moved()
            yield arrived
    while waiting:
        fetched()
        arrived = _arrived(*waiting.popleft(), device, dtype)
        moved()
        yield arrived


def _is_plain(batch: Any) -> bool:
    """Whether a batch is a plain list or tuple of CPU tensors."""
    return type(batch) in (list, tuple) and all(type(leaf) is Tensor and leaf.is_cpu for leaf in batch)


def _ahead(batch: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    """Copy the dense tensors in host memory on the side stream, and leave everything else.

    The computation's stream may still be writing tensors that are already on a GPU. Allocations of objects with a
    `to` method of their own are unknown, and torch cannot record streams of sparse and nested tensors.
    """
    return _each(lambda leaf: _moved(leaf, device, dtype) if _is_dense_on_host(leaf) else leaf, batch)


def _is_dense_on_host(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_cpu and leaf.layout is torch.strided and not leaf.is_nested


def _moved(leaf: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    if isinstance(leaf, Tensor):
        # Asynchronous only from pinned memory; from pageable memory torch copies synchronously.
        there = leaf.to(device, non_blocking=True)
        # Converted on the device: in one call, torch would convert on the host first, into pageable memory.
        return there.to(dtype) if dtype is not None and there.is_floating_point() else there
    return leaf.to(device) if hasattr(leaf, "to") and not isinstance(leaf, type) else leaf


def _arrived(batch: Any, event: torch.cuda.Event, device: torch.device, dtype: torch.dtype | None) -> Any:
    """The batch for the computation's stream, which waits for the copy; the memory is not reused before it is done."""
    current = torch.cuda.current_stream(device)
    current.wait_event(event)

    def finish(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.device == device and leaf.layout is torch.strided and not leaf.is_nested:
            leaf.record_stream(current)
        return _moved(leaf, device, dtype)

    return _each(finish, batch)


def _each(function: Callable[[Any], Any], batch: Any) -> Any:
    """Apply `function` to each leaf of nested containers. Objects with a `to` method are leaves.

    User-defined mappings and dataclasses are copied and filled, so their constructors do not run again.
    """
    if isinstance(batch, Tensor | str | bytes) or hasattr(batch, "to"):
        return function(batch)
    if type(batch) is list or type(batch) is tuple:  # nearly all batches
        return type(batch)([_each(function, value) for value in batch])
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
