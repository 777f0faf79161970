"""Batches on the device: copies overlap with computation, whatever the batches are made of."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from copy import copy
from dataclasses import fields, is_dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ddp_kit.loader.worker_errors import watched


def _nothing() -> None:
    pass


def on_device(
    loader: Iterable[Any],
    device: torch.device,
    dtype: torch.dtype | None,
    ahead: int,
    fetched: Callable[[], None] = _nothing,
    moved: Callable[[], None] = _nothing,
) -> Iterator[Any]:
    """The loader's batches on `device`; floating-point tensors as `dtype` where it is given.

    On a GPU, `ahead` batches are copied on a side stream while the computation uses the ones before: their dense
    tensors in host memory. Whatever else a batch holds is moved when it is handed over, on the computation's stream.
    `fetched` is called when a batch has come from the loader, `moved` when it is handed over.
    """
    if device.type != "cuda" or ahead == 0:
        move = partial(_moved, device=device, dtype=dtype)
        stays = device.type == "cpu" and dtype is None
        for batch in watched(loader):
            fetched()
            arrived = batch if stays and _is_plain(batch) else _each(move, batch)
            moved()
            yield arrived
        return
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    waiting: deque[tuple[Any, torch.cuda.Event]] = deque()
    for batch in watched(loader):
        with torch.cuda.stream(stream):
            waiting.append((_ahead(batch, device, dtype), stream.record_event()))
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
    """Copy on the side stream what does not have to wait for the computation.

    Not tensors that are on a GPU already: the computation's stream may still be writing them. Nor objects that move
    themselves: what they allocate cannot be seen. Nor sparse and nested tensors: torch cannot record their streams.
    """
    return _each(lambda leaf: _moved(leaf, device, dtype) if _is_dense_on_host(leaf) else leaf, batch)


def _is_dense_on_host(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.is_cpu and leaf.layout is torch.strided and not leaf.is_nested


def _moved(leaf: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    if isinstance(leaf, Tensor):
        # non_blocking waits for nothing only from pinned memory; from other memory torch copies in order.
        there = leaf.to(device, non_blocking=True)
        # Converted there: in one call, torch would convert on the host first, into memory that is not pinned.
        return there.to(dtype) if dtype is not None and there.is_floating_point() else there
    return leaf.to(device) if hasattr(leaf, "to") and not isinstance(leaf, type) else leaf


def _arrived(batch: Any, event: torch.cuda.Event, device: torch.device, dtype: torch.dtype | None) -> Any:
    """Hand a batch to the computation: it waits for the copy, and the memory is not reused before it is done."""
    current = torch.cuda.current_stream(device)
    current.wait_event(event)

    def finish(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.device == device and leaf.layout is torch.strided and not leaf.is_nested:
            leaf.record_stream(current)
        return _moved(leaf, device, dtype)

    return _each(finish, batch)


def _each(function: Callable[[Any], Any], batch: Any) -> Any:
    """The same nesting of containers, with `function` applied to each leaf: what is none, or moves itself.

    Containers are copied and filled, not made anew: what their constructors do was done once already.
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
