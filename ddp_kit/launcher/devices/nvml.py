"""Query NVML; every query may fail."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pynvml


@contextmanager
def handles() -> Iterator[tuple[tuple[int, Any], ...]]:
    """Yield the number and handle of each GPU that responds; nothing if there is no driver."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield ()
        return
    try:
        found = (
            (index, query(pynvml.nvmlDeviceGetHandleByIndex, index))
            for index in range(query(pynvml.nvmlDeviceGetCount) or 0)
        )
        yield tuple((index, handle) for index, handle in found if handle is not None)
    finally:
        pynvml.nvmlShutdown()


def query(function: Callable[..., Any], *arguments: Any) -> Any:
    """NVML's answer; None: not supported, for example on GPUs that share the host's memory or hide their processes."""
    try:
        return function(*arguments)
    except (pynvml.NVMLError, pynvml.NVMLLibraryMismatchError):  # the second: the driver is too old for the query
        return None


def bits(words: Any) -> tuple[int, ...]:
    """The numbers of the bits set in a list of 64-bit words; empty without a list."""
    return tuple(64 * place + bit for place, word in enumerate(words or ()) for bit in range(64) if word >> bit & 1)
