"""Batches from DataLoader workers, where there is too little shared memory for torch's way."""

import pickle
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from ddp_kit.loader.collate import put_together
from ddp_kit.log import logger

_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  # where torch's DataLoader workers put their batches
_LEAST_SHARED_MEMORY = 128 << 20  # docker gives 64 MiB


def sendable(collate: Callable[[Any], Any], workers: int) -> Callable[[Any], Any]:
    """`collate`, made to send its batches from `workers` DataLoader workers in a way that has room for them."""
    return _by_value(collate) if workers and _little_shared_memory() else collate


@cache
def _little_shared_memory() -> bool:
    """Whether DataLoader workers had better not use it; says so once."""
    try:
        free = shutil.disk_usage(_SHARED_MEMORY).free
    except OSError:  # not Linux
        return False
    if free < _LEAST_SHARED_MEMORY:
        logger.warning(
            "{} has {:.0f} MiB left: batches come from the DataLoader workers through pipes instead, which is slower; "
            "start the container with --shm-size=8g or --ipc=host",
            _SHARED_MEMORY,
            free / 2**20,
        )
    return free < _LEAST_SHARED_MEMORY


@dataclass(frozen=True)
class _ByValue:
    """What a DataLoader worker sends without shared memory: bytes, and what `finish` makes of them on their arrival.

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
    """What collates as torch does takes shared memory in DataLoader workers, so it is called on arrival."""
    return partial(_ByValue, finish=collate) if collate is put_together else partial(_send, collate)


def _send(collate: Callable[[Any], Any], samples: Any) -> _ByValue:
    return _ByValue(collate(samples))
