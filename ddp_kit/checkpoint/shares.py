"""One checkpoint written by several processes, each of which writes its share into the same unfinished folder.

    writer 1, 2, ...      lock .writer-N; write the files of its share; rename its record to .writer-N.json
    writer 0              write its own share; wait for the records of all other writers; complete the checkpoint

They communicate only through the folder: they may be on different nodes, and may outlive their job. If a writer holds
no lock and has left no record, it has died or was never started, and the checkpoint is abandoned.
"""

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from ddp_kit.checkpoint.files import Job, write_files, write_text
from ddp_kit.checkpoint.system import System
from ddp_kit.errors import CheckpointError
from ddp_kit.manifest import INDEX, FileRecord, open_file, part_of
from ddp_kit.tensor_files import tensor_table

_POLL_SECONDS = 0.01
_START_SECONDS = 20.0  # how long a writer may take to start, after writer 0 has written its own share
_ABANDONED_SECONDS = 1.0  # the same if the job is gone, because a writer may just be starting
_STALL_SECONDS = 120.0  # how long no file may grow, if there are no locks or a writer is stopped
_LONGEST_RECORD = 1 << 20


def write_share(job: Job, memory: memoryview, unfinished: Path, system: System) -> None:
    """Write the share of a writer other than 0. Errors are recorded in the folder, and reported by writer 0.

    `unfinished`: the unfinished folder of the checkpoint.
    """
    lock = os.open(unfinished / _name(job.writer), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        with suppress(OSError):  # the file system has no locks
            fcntl.flock(lock, fcntl.LOCK_EX)  # blocking, because writer 0 holds the lock for a moment when it polls
        record: dict[str, object] = {"tensors": job.tensors}
        try:
            record["files"] = [asdict(file) for file in write_files(job.files, memory, unfinished, system)]
        except OSError as error:
            for file in job.files:  # make room for the record on a full disk
                (unfinished / file.name).unlink(missing_ok=True)
            record["errno"] = error.errno
        unnamed = unfinished / f"{_name(job.writer)}.new"
        write_text(unnamed, json.dumps(record), system)
        system.rename(unnamed, unfinished / f"{_name(job.writer)}.json")
    except FileNotFoundError:
        if unfinished.is_dir():
            raise
        # Writer 0 has abandoned the checkpoint, and reports why.
    finally:
        os.close(lock)


def collect(job: Job, unfinished: Path, system: System, abandoned: Callable[[], bool]) -> list[FileRecord]:
    """Wait for the other writers' shares, and return their files. Called by writer 0.

    `unfinished`: the checkpoint's folder. `abandoned()`: whether the process that started this one is gone.
    Raises `CheckpointError`, and `OSError` with the error number of another writer.
    """
    files: list[FileRecord] = []
    waiting = dict.fromkeys(range(1, job.writers))
    size, since = -1, time.monotonic()
    while waiting:
        there = _names(unfinished)
        writing = {each: each in there and _is_locked(unfinished / each) for each in map(_name, waiting)}
        there = _names(unfinished)  # again: a writer leaves its record before it releases its lock
        for writer in [*waiting]:
            if f"{_name(writer)}.json" in there:
                files += _checked(_record(unfinished / f"{_name(writer)}.json"), job, writer)
                del waiting[writer]
            elif writing[_name(writer)] is False and time.monotonic() - since > _allowed(abandoned):
                raise _missing(job, writer, "has ended, or did not begin")
        if waiting:
            now = _size(unfinished)
            if now != size:
                size, since = now, time.monotonic()
            elif time.monotonic() - since > _STALL_SECONDS:
                raise _missing(job, min(waiting), f"has written nothing for {_STALL_SECONDS:g} s")
            time.sleep(_POLL_SECONDS)
    for path in [*_entries(unfinished)]:
        if path.name.startswith(_name("")):
            path.unlink()
    return files + _indexes(unfinished, files, system)


def _indexes(unfinished: Path, others: Iterable[FileRecord], system: System) -> list[FileRecord]:
    """Write an index of tensor -> file for each part that has several files, in Hugging Face's format."""
    indexes = []
    for part in sorted({part for file in others if (part := part_of(file.name)) is not None}):
        tables = {path.name: tensor_table(path) for path in _entries(unfinished) if part_of(path.name) == part}
        total = sum(tensor.bytes for table in tables.values() for tensor in table.values())
        names = {
            name: file for file, table in sorted(tables.items()) for name, each in table.items() if not each.is_piece
        }
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": names}, indent=2)
        indexes.append(write_text(unfinished / f"{part}{INDEX}", text, system))
    return indexes


def _name(writer: int | str) -> str:
    return f".writer-{writer}"


def _entries(unfinished: Path) -> list[Path]:
    return sorted(unfinished.iterdir())


def _allowed(abandoned: Callable[[], bool]) -> float:
    """Seconds that a writer may take to start."""
    return _ABANDONED_SECONDS if abandoned() else _START_SECONDS


def _names(unfinished: Path) -> set[str]:
    """The names in the folder. Listed, not tested one by one, because NFS caches negative lookups for a minute."""
    return {path.name for path in _entries(unfinished)}


def _size(unfinished: Path) -> int:
    total = 0
    for path in _entries(unfinished):
        with suppress(FileNotFoundError):  # a record has just been renamed
            total += path.stat().st_size
    return total


def _is_locked(path: Path) -> bool | None:
    """Whether a process holds the lock; None: the file system has no locks."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    else:
        return False
    finally:
        os.close(descriptor)


def _record(path: Path) -> dict[str, object]:
    with open_file(path) as file:
        return dict(json.loads(file.read(_LONGEST_RECORD)))


def _checked(record: dict[str, object], job: Job, writer: int) -> list[FileRecord]:
    if "errno" in record:
        number = int(str(record["errno"]))
        raise OSError(number, os.strerror(number))
    if record["tensors"] != job.tensors:
        raise CheckpointError(
            f"the checkpoint of step {job.step} was not saved: process {writer} of the {job.writers} that write it has "
            "tensors with other names, dtypes or shapes than process 0",
            "use the same model and optimizer on all ranks, and add the same state on all of them",
        )
    return [FileRecord(**file) for file in record["files"]]  # type: ignore[attr-defined]


def _missing(job: Job, writer: int, what: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint of step {job.step} was not saved: process {writer} of the {job.writers} that write it {what}",
        "see the output of that process; earlier checkpoints are unchanged",
        transient=True,
    )
