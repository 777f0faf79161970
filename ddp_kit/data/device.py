"""Moves batches to the device, overlapped with computation. A batch may be any nested container."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from functools import cache, partial
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from ddp_kit.data.collate import checked_batches
from ddp_kit.structures import each_leaf, each_value


def _nothing(*_: object) -> None:
    pass


def on_device(
    loader: Iterable[Any],
    device: torch.device,
    dtype: torch.dtype | None,
    ahead: int,
    transform: Callable[[Any], Any] | None = None,
    fetched: Callable[[], None] = _nothing,
    moved: Callable[[], None] = _nothing,
    *,
    check_first: Callable[[Any], None] = _nothing,
) -> Iterator[Any]:
    """Yield the loader's batches on `device`.

    On a GPU, the dense host tensors of the next `ahead` batches are copied on a side stream, overlapped with
    computation. Everything else in a batch is moved on the current stream when the batch is yielded.
    `dtype`: the dtype to which floating-point tensors are converted; None: do not convert. `transform`: a function
    that is applied to each batch after the copy, on the same stream. `fetched`: a function that is called when the
    loader has returned a batch. `moved`: a function that is called when the batch is on the device. `check_first`: a
    function that is called with the first batch before the batch is moved.
    Raises `DataError` if a DataLoader worker fails or samples cannot be collated.
    """
    batches = checked_batches(loader)
    for first in batches:
        check_first(first)
        batches = chain([first], batches)
        break
    if device.type != "cuda" or ahead == 0:
        move = partial(_moved, device=device, dtype=dtype)
        stays = device.type == "cpu" and dtype is None
        for batch in batches:
            fetched()
            plain = type(batch) in (list, tuple) and all(type(leaf) is Tensor and leaf.is_cpu for leaf in batch)
            if not (stays and plain):
                batch = each_leaf(move, batch)
            if transform is not None:
                batch = transform(batch)
            moved()
            yield batch
        return
    stream = _copy_stream(device)
    waiting: deque[tuple[Any, torch.cuda.Event]] = deque()
    for batch in batches:
        if transform is not None:
            each_leaf(partial(_hand_over, stream=stream), batch)
        with torch.cuda.stream(stream):
            copied = _ahead(batch, device, dtype)
            if transform is not None:
                copied = transform(copied)
            waiting.append((copied, stream.record_event()))
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


@cache
def _copy_stream(device: torch.device) -> torch.cuda.Stream:
    """The side stream of a device, on which batches are copied: the allocator keeps separate memory for each stream."""
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _ahead(batch: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    """Copy the dense host tensors of a batch on the side stream, and leave everything else as it is.

    Other leaves are not safe on the side stream: the current stream may still be writing to tensors that are already on
    a GPU, and `record_stream` cannot be called for sparse tensors, nested tensors, or tensors inside objects with a
    `to` method.
    """

    def move_dense(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.is_cpu and leaf.layout is torch.strided and not leaf.is_nested:
            return _moved(leaf, device, dtype)
        return leaf

    return each_leaf(move_dense, batch)


def _moved(leaf: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    if isinstance(leaf, Tensor):
        # The copy is asynchronous only from pinned memory.
        copied = leaf.to(device, non_blocking=True)
        # Convert in a second call, on the device: in one call torch would convert on the host, into pageable memory.
        return _converted(copied, dtype)
    if not hasattr(leaf, "to") or isinstance(leaf, type):
        return leaf
    moved = leaf.to(device)
    if dtype is None:
        return moved
    return each_value(partial(_converted, dtype=dtype), moved)  # not by its own `to`, which would convert integers too


def _converted(leaf: Any, dtype: torch.dtype | None) -> Any:
    if dtype is None or not isinstance(leaf, Tensor) or not leaf.is_floating_point():
        return leaf
    return leaf.to(dtype)


def _hand_over(leaf: Any, stream: torch.cuda.Stream) -> Any:
    """Let the side stream read a tensor that is on a GPU already, to which the current stream may still be writing."""
    if isinstance(leaf, Tensor) and leaf.is_cuda:
        stream.wait_stream(torch.cuda.current_stream(leaf.device))
        if leaf.layout is torch.strided and not leaf.is_nested:
            leaf.record_stream(stream)
    return leaf


def _arrived(batch: Any, event: torch.cuda.Event, device: torch.device, dtype: torch.dtype | None) -> Any:
    """Make the current stream wait for the copy, and return the batch.

    `record_stream` keeps the memory from being reused while the current stream uses it.
    """
    current = torch.cuda.current_stream(device)
    current.wait_event(event)

    def finish(leaf: Any) -> Any:
        if isinstance(leaf, Tensor) and leaf.device == device and leaf.layout is torch.strided and not leaf.is_nested:
            leaf.record_stream(current)
        return _moved(leaf, device, dtype)

    return each_leaf(finish, batch)
