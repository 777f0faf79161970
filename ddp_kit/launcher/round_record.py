"""The record of the round that a launcher is running, and how `ddpkit top` finds it.

The launcher keeps the file open while its workers run, and `ddpkit top` looks for it among the open files of the user's
processes. A killed launcher therefore leaves no stale entry.
"""

import json
import os
import socket
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from ddp_kit.env import ROUND_FILE
from ddp_kit.launcher.streams import open_log


@dataclass(frozen=True)
class WorkerRecord:
    """One worker of a round."""

    rank: int
    local_rank: int
    pid: int
    error_file: str
    """The path of its error file, next to which its heartbeat is; empty: none."""
    gpus: tuple[str, ...] = ()
    """UUIDs; empty: the script chooses."""


@dataclass(frozen=True)
class RoundRecord:
    """One round of a job on one node."""

    run_id: str
    script: str
    host: str
    node_rank: int
    nodes: int
    world_size: int
    restarts: int
    began: float
    """As `time.time`."""
    workers: tuple[WorkerRecord, ...]

    @classmethod
    def read(cls, text: str) -> Self:
        """Parse a record. Raises `ValueError`, `TypeError` or `KeyError` if `text` is not one."""
        found = json.loads(text)
        workers = tuple(WorkerRecord(**{**each, "gpus": tuple(each["gpus"])}) for each in found.pop("workers"))
        return cls(**found, workers=workers)


class RoundFile:
    """The file of a round: written and kept open until `close`, which removes it."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / ROUND_FILE
        self._descriptor: int | None = None

    def write(self, record: RoundRecord) -> None:
        """Write the record, if possible: on a full disk, `ddpkit top` does not show the job."""
        with suppress(OSError):
            self._descriptor = open_log(str(self._path))
            os.write(self._descriptor, json.dumps(asdict(record)).encode())

    def close(self) -> None:
        """Remove the file, so that the folder has the same files as with torchrun."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
        self._path.unlink(missing_ok=True)


def host() -> str:
    """The name of this machine."""
    return socket.gethostname()


def records() -> Iterator[tuple[int, RoundRecord]]:
    """Yield the rounds that this user's launchers are running on this machine, each with the launcher's process id."""
    for process in sorted(Path("/proc").glob("[0-9]*"), key=lambda each: int(each.name)):
        with suppress(OSError):  # it has ended, or belongs to another user
            if process.stat().st_uid == os.geteuid():
                yield from ((int(process.name), record) for record in _records_of(process))


def _records_of(process: Path) -> Iterator[RoundRecord]:
    for descriptor in os.scandir(process / "fd"):
        with suppress(OSError, ValueError, TypeError, KeyError):  # just closed, or not completely written yet
            if os.readlink(descriptor.path).endswith(f"/{ROUND_FILE}"):  # noqa: PTH115
                yield RoundRecord.read(Path(descriptor.path).read_text())
