"""One checkpoint from several processes; each writes its share into the same unfinished folder.

    writer 1, 2, ...      lock .writer-N; write the files of its share; rename its record to .writer-N.json
    writer 0              write its own share; wait for the record of each other writer; then finish the checkpoint

Nothing but the folder connects them: they may be on several nodes, and the jobs that started them may be gone. A writer
without a lock and without a record has died or was never started, and the checkpoint comes to nothing.
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

_LOOK_SECONDS = 0.01
_START_SECONDS = 20.0  # for a writer to begin, once writer 0 has written its own share
_ABANDONED_SECONDS = 1.0  # the same where the job is gone: what it has asked for may be about to begin
_STALL_SECONDS = 120.0  # without locks, or with a writer that is stopped: for any file to grow
_LONGEST_RECORD = 1 << 20


def write_share(job: Job, memory: memoryview, half: Path, system: System) -> None:
    """Write the share of a writer other than 0. Writer 0 reports its errors if it can read them."""
    lock = os.open(half / _name(job.writer), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    try:
        with suppress(OSError):  # there are no locks here
            fcntl.flock(lock, fcntl.LOCK_EX)  # writer 0 holds it for a moment when it looks
        record: dict[str, object] = {"tensors": job.tensors}
        try:
            record["files"] = [asdict(file) for file in write_files(job.files, memory, half, system)]
        except OSError as error:
            for file in job.files:  # on a full disk, to make room for the record
                (half / file.name).unlink(missing_ok=True)
            record["errno"] = error.errno
        unnamed = half / f"{_name(job.writer)}.new"
        write_text(unnamed, json.dumps(record), system)
        system.rename(unnamed, half / f"{_name(job.writer)}.json")
    except FileNotFoundError:
        if half.is_dir():
            raise
        # writer 0 has given up, and says why
    finally:
        os.close(lock)


def collect(job: Job, half: Path, system: System, abandoned: Callable[[], bool]) -> list[FileRecord]:
    """Wait for the other writers' shares, and return their files. For writer 0.

    `abandoned`: whether the process that has started this one is gone. Raises `CheckpointError`, and `OSError` with
    the number of that of another writer.
    """
    files: list[FileRecord] = []
    waiting = dict.fromkeys(range(1, job.writers))
    size, since = -1, time.monotonic()
    while waiting:
        there = _names(half)
        writing = {each: each in there and _is_locked(half / each) for each in map(_name, waiting)}
        there = _names(half)  # once more: a record comes before its writer's lock goes
        for writer in [*waiting]:
            if f"{_name(writer)}.json" in there:
                files += _checked(_record(half / f"{_name(writer)}.json"), job, writer)
                del waiting[writer]
            elif writing[_name(writer)] is False and time.monotonic() - since > _allowed(abandoned):
                raise _missing(job, writer, "has ended, or did not begin")
        if waiting:
            now = _size(half)
            if now != size:
                size, since = now, time.monotonic()
            elif time.monotonic() - since > _STALL_SECONDS:
                raise _missing(job, min(waiting), f"has written nothing for {_STALL_SECONDS:g} s")
            time.sleep(_LOOK_SECONDS)
    for path in [*_entries(half)]:
        if path.name.startswith(_name("")):
            path.unlink()
    return files + _indexes(half, files, system)


def _indexes(half: Path, others: Iterable[FileRecord], system: System) -> list[FileRecord]:
    """For each part in several files: which of them has which tensor, as other programs look for it."""
    indexes = []
    for part in sorted({part for file in others if (part := part_of(file.name)) is not None}):
        tables = {path.name: tensor_table(path) for path in _entries(half) if part_of(path.name) == part}
        total = sum(tensor.bytes for table in tables.values() for tensor in table.values())
        names = {
            name: file for file, table in sorted(tables.items()) for name, each in table.items() if not each.is_piece
        }
        text = json.dumps({"metadata": {"total_size": total}, "weight_map": names}, indent=2)
        indexes.append(write_text(half / f"{part}{INDEX}", text, system))
    return indexes


def _name(writer: int | str) -> str:
    return f".writer-{writer}"


def _entries(half: Path) -> list[Path]:
    return sorted(half.iterdir())


def _allowed(abandoned: Callable[[], bool]) -> float:
    """Seconds for a writer to begin."""
    return _ABANDONED_SECONDS if abandoned() else _START_SECONDS


def _names(half: Path) -> set[str]:
    """List the folder instead of testing each name: NFS caches a negative lookup for a minute."""
    return {path.name for path in _entries(half)}


def _size(half: Path) -> int:
    total = 0
    for path in _entries(half):
        with suppress(FileNotFoundError):  # a record has just got its name
            total += path.stat().st_size
    return total


def _is_locked(path: Path) -> bool | None:
    """None: there are no locks here."""
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
        "earlier checkpoints are unchanged",
        transient=True,
    )
