"""Sends batches from DataLoader workers without shared memory, for containers with too little of it."""

import pickle
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from ddp_kit.loader.collate import checked_collate
from ddp_kit.log import logger

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  # where torch's DataLoader workers put their batches
_LEAST_SHARED_MEMORY = 128 << 20  # Docker's default is 64 MiB


def sendable(collate: Callable[[Any], Any], workers: int) -> Callable[[Any], Any]:
    """The collate function, wrapped to send batches without shared memory if there is too little of it."""
    return _by_value(collate) if workers and _little_shared_memory() else collate


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
    """A batch that a DataLoader worker sends as bytes; `finish` is applied to it in the receiving process.

    torch's sharing strategy `file_system` would not help, because it uses /dev/shm as well.
    """

    content: Any
    finish: Callable[[Any], Any] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuilt, (pickle.dumps(self.content), self.finish)


def _rebuilt(content: bytes, finish: Callable[[Any], Any] | None) -> Any:
    received = pickle.loads(content)  # noqa: S301  # from this process's own child, through a pipe
    return finish(received) if finish is not None else received


def _by_value(collate: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Wrap a collate function. torch's uses shared memory in DataLoader workers, so it runs in the receiver."""
    return partial(_ByValue, finish=collate) if collate is checked_collate else partial(_send, collate)


def _send(collate: Callable[[Any], Any], samples: Any) -> _ByValue:
    return _ByValue(collate(samples))
