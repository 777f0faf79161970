"""Asking NVML, which may have no answer."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pynvml


@contextmanager
def handles() -> Iterator[tuple[tuple[int, Any], ...]]:
    """Number and handle of each GPU that answers; none where there is no driver."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield ()
        return
    try:
        found = ((index, asked(pynvml.nvmlDeviceGetHandleByIndex, index)) for index in range(_count()))
        yield tuple((index, handle) for index, handle in found if handle is not None)
    finally:
        pynvml.nvmlShutdown()


def asked(question: Callable[..., Any], *arguments: Any) -> Any:
    """NVML's answer, or None where it does not tell: some GPUs share the host's memory, some hide their processes."""
    try:
        return question(*arguments)
    except (pynvml.NVMLError, pynvml.NVMLLibraryMismatchError):  # the second: a driver too old for the question
        return None


def bits(words: Any) -> tuple[int, ...]:
    """Which bits are set in a list of 64-bit words; none where there is no list."""
    return tuple(64 * place + bit for place, word in enumerate(words or ()) for bit in range(64) if word >> bit & 1)


def _count() -> int:
    return asked(pynvml.nvmlDeviceGetCount) or 0
