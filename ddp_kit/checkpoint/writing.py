"""Writes a checkpoint from host memory to disk. Does not use torch, which the writer process does not import.

    create .writing-step-K-<token>       and remove what killed writers have left
    write and fsync each file            if there are several writers, each writes its share: see shares.py
    write and fsync the manifest
    fsync the folder, rename it to step-K, fsync its parent          from here on it is the newest checkpoint
    rename checkpoints that are not kept to .removed-..., then remove them

If the process is killed at any moment, either the old or the new checkpoint is complete; the next save removes the
folder with a leading dot that is left.
"""

import errno
import fcntl
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

from ddp_kit.checkpoint.files import Job, fsync_folder, write_files, write_text
from ddp_kit.checkpoint.shares import collect, write_share
from ddp_kit.checkpoint.system import System
from ddp_kit.errors import CheckpointError
from ddp_kit.manifest import (
    ASIDE,
    MANIFEST,
    REMOVED,
    WRITING,
    Found,
    Manifest,
    checkpoints,
    leftovers,
    name_of,
)

_POLL_SECONDS = 0.02
_LONG_AGO = 3600.0  # without locks, a folder that has not changed for this long has no writer
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_HELD_BY_ANOTHER = (errno.EWOULDBLOCK, errno.EACCES)


def write(job: Job, memory: memoryview, system: System | None = None, *, abandoned: Callable[[], bool] = bool) -> None:
    """Write a checkpoint durably, and remove checkpoints that are not kept; or write one writer's share of it.

    `memory`: contains the files. `abandoned()`: whether the process that requested the save is gone.
    Raises `CheckpointError`; earlier checkpoints are then unchanged.
    """
    system = system or System()
    folder = Path(job.folder)
    with _explained(job, folder, system):
        make_folder(folder, system)
        unfinished = folder / f"{WRITING}{name_of(job.step)}-{job.token or secrets.token_hex(4)}"
        if job.writer > 0:
            _make_unfinished(unfinished, system)
            write_share(job, memory, unfinished, system)
            return
        with _alone(folder) as alone:
            _make_unfinished(unfinished, system)
            try:
                _clear_leftovers(folder, unfinished, alone, system)
                _check_space(job, folder, system)
                records = write_files(job.files, memory, unfinished, system)
                records += collect(job, unfinished, system, abandoned)
                created = datetime.now(UTC).isoformat(timespec="seconds")
                manifest = Manifest(job.step, created, job.best, job.versions, tuple(records))
                write_text(unfinished / MANIFEST, manifest.text(), system)
                fsync_folder(unfinished, system)
                _put_in_place(unfinished, folder / name_of(job.step), system)
            except BaseException:
                with suppress(OSError):
                    system.remove(unfinished)
                raise
            fsync_folder(folder, system)
            _prune(job, folder, system)


def _make_unfinished(unfinished: Path, system: System) -> None:
    with suppress(FileExistsError):  # another writer has created it
        system.mkdir(unfinished)


def make_folder(folder: Path, system: System | None = None) -> None:
    """Create the folder of all checkpoints and its parents, durably. Raises `OSError`."""
    system = system or System()
    if not folder.is_dir():
        if not folder.parent.is_dir():
            make_folder(folder.parent, system)
        try:
            system.mkdir(folder)
        except FileExistsError:
            if not folder.is_dir():  # otherwise another process has created it
                raise
        fsync_folder(folder.parent, system)


def set_aside(folder: Path, after: int, system: System | None = None) -> tuple[Path, list[int]] | None:
    """Move the checkpoints of steps after `after` into a new folder next to them, durably.

    They belong to a branch that the run has left, and would be taken for newer than those of the current branch.
    Returns the new folder and the steps; None if there are none. Raises `CheckpointError`.
    """
    system = system or System()
    there = [found for found in checkpoints(folder) if found.step > after and _is_ours(found)]
    if not there:
        return None
    place = folder / f"{ASIDE}{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"
    try:
        system.mkdir(place)
        for found in there:
            system.rename(found.path, place / found.path.name)
        fsync_folder(place, system)
        fsync_folder(folder, system)
    except OSError as error:
        raise cannot_write(error, folder) from None
    return place, [found.step for found in there]


def cannot_write(error: OSError, folder: Path) -> CheckpointError:
    """The error for a folder that cannot be written to."""
    return CheckpointError(
        f"checkpoints cannot be written to {folder}: {error.strerror or error}",
        f"use a folder that this process may write to; `ddpkit doctor --dir {folder}` tests it",
    )


# Writing -------------------------------------------------------------------------------------------------------------


def _put_in_place(unfinished: Path, place: Path, system: System) -> None:
    if not place.exists():
        system.rename(unfinished, place)
        return
    # The run has gone back and saves a step again. Exchange the folders, so that one of them is always in place.
    try:
        system.exchange(unfinished, place)
        before = unfinished
    except OSError:
        before = _removed(place)
        system.rename(place, before)
        system.rename(unfinished, place)
    system.remove(before)


# Retention -----------------------------------------------------------------------------------------------------------


def _prune(job: Job, folder: Path, system: System) -> None:
    """Remove older checkpoints that are not kept. Those of later steps belong to another run, and are kept."""
    there = [found for found in checkpoints(folder) if found.step <= job.step]
    kept = _kept(there, job.keep_last)
    for found in there:
        if found.step not in kept and _is_ours(found):
            away = _removed(found.path)
            with suppress(FileNotFoundError):  # another writer removed it
                system.rename(found.path, away)
                system.remove(away)


def _kept(there: Iterable[Found], keep_last: int) -> set[int]:
    whole = [found for found in there if found.whole]
    best = [found.step for found in whole if found.manifest is not None and found.manifest.best]
    last = [found.step for found in whole[:keep_last]]
    damaged = [found.step for found in there if not found.whole and found.step >= min(last, default=0)]
    return {*last, *best[:1], *damaged}


def _is_ours(found: Found) -> bool:
    """Whether it is known to be a checkpoint of a format that this version knows, complete or damaged."""
    return found.manifest is not None


def _removed(path: Path) -> Path:
    return path.with_name(f"{REMOVED}{path.name}-{secrets.token_hex(4)}")


# Leftovers -----------------------------------------------------------------------------------------------------------


@contextmanager
def _alone(folder: Path) -> Iterator[bool | None]:
    """A context that tries to lock the folder. Yields whether no other process writes there; None: unknown."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            alone: bool | None = True
        except OSError as error:  # held by a living process: the kernel releases the locks of dead ones
            alone = False if error.errno in _HELD_BY_ANOTHER else None
        yield alone
    finally:
        os.close(descriptor)


def wait_for_writers(folder: Path, seconds: float) -> None:
    """Wait until no process writes a checkpoint into `folder`, at most `seconds`."""
    deadline = time.monotonic() + seconds
    descriptor = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
    try:
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return
            except OSError as error:  # without locks, other processes cannot be detected
                if error.errno not in _HELD_BY_ANOTHER or time.monotonic() > deadline:
                    return
            time.sleep(_POLL_SECONDS)
    finally:
        os.close(descriptor)


def _clear_leftovers(folder: Path, own: Path, alone: bool | None, system: System) -> None:
    now = own.stat().st_mtime  # by the clock of the file system, which may differ from this machine's
    for path in leftovers(folder):
        if path != own and (alone or (alone is None and now - _last_written(path) > _LONG_AGO)):
            with suppress(FileNotFoundError):
                system.remove(path)


def _last_written(path: Path) -> float:
    with suppress(OSError):
        return max(entry.stat().st_mtime for entry in (path, *path.iterdir()))
    return float("inf")


# Errors --------------------------------------------------------------------------------------------------------------


def _check_space(job: Job, folder: Path, system: System) -> None:
    needed, free = job.size, system.free(folder)
    if needed > free:
        raise _full(job, folder, free)


def _full(job: Job, folder: Path, free: int | None) -> CheckpointError:
    needed = job.total or job.size
    there = "" if free is None else f", {free:,} are free"
    return CheckpointError(
        f"there is no space for the checkpoint of step {job.step} in {folder}: {needed:,} bytes are needed{there}",
        "free some space, lower keep_last, or use a folder on another disk; earlier checkpoints are unchanged",
        transient=True,
    )


@contextmanager
def _explained(job: Job, folder: Path, system: System) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in _NO_SPACE:
            free = None
            with suppress(OSError):
                free = system.free(folder)
            raise _full(job, folder, free) from None
        raise cannot_write(error, folder) from None
