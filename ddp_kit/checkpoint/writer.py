"""The program of the writer process: writes checkpoints from host memory to disk. Does not import torch or numpy.

`main` runs in the process that `saver.WriterProcess` starts. For `save="blocking"`, the rank itself calls `write`.
"""

import ctypes
import errno
import fcntl
import json
import math
import mmap
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from io import FileIO
from pathlib import Path
from threading import Thread
from typing import IO, Self

from ddp_kit.checkpoint.format import (
    ASIDE,
    MANIFEST,
    REMOVED,
    REPLACED,
    WRITING,
    FileRecord,
    Hasher,
    Manifest,
    StoredCheckpoint,
    checkpoints,
    leftovers,
    manifest_content,
    name_of,
    open_file,
)
from ddp_kit.child_program import serve
from ddp_kit.errors import CheckpointError, advice_for
from ddp_kit.storage.urls import is_url

# --- File operations --------------------------------------------------------------------------------------------------
# File operations are methods, so that a test can make any of them fail, or kill the process during one.


_CURRENT_FOLDER = -100  # AT_FDCWD
_EXCHANGE = 2  # RENAME_EXCHANGE


class System:
    """The file operations of a save. All of them may raise `OSError`."""

    def mkdir(self, path: Path) -> None:
        """Create a folder, which must not exist."""
        path.mkdir()

    def create(self, path: Path) -> int:
        """Create a file, which must not exist, and return its descriptor."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def write(self, file: int, content: memoryview) -> int:
        """Write at least a part of the content, and return the number of bytes written."""
        return os.write(file, content)

    def fsync(self, file: int) -> None:
        """Flush a file, or a folder's entries, to the disk."""
        os.fsync(file)

    def rename(self, old: Path, new: Path) -> None:
        """Rename a file or folder."""
        old.rename(new)

    def exchange(self, one: Path, other: Path) -> None:
        """Swap the names of two folders atomically. Raises `OSError` if the file system does not support this."""
        libc = ctypes.CDLL(None, use_errno=True)
        try:
            renameat2 = libc.renameat2
        except AttributeError:  # an old C library
            raise OSError("renameat2 is not available") from None
        if renameat2(_CURRENT_FOLDER, os.fsencode(one), _CURRENT_FOLDER, os.fsencode(other), _EXCHANGE) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def remove(self, path: Path) -> None:
        """Remove a folder and its content. Entries that cannot be removed are left for the next save to remove."""
        shutil.rmtree(path, ignore_errors=True)

    def free(self, folder: Path) -> int:
        """The number of bytes that can still be written to the folder's file system."""
        status = os.statvfs(folder)
        return status.f_bavail * status.f_frsize

    def free_inodes(self, folder: Path) -> int | None:
        """The number of files and folders that its file system can still hold; None if it has no fixed limit."""
        status = os.statvfs(folder)
        return status.f_favail if status.f_files else None


# --- Files ------------------------------------------------------------------------------------------------------------
# The content of a file is written and hashed concurrently.


_CHUNK = 64 << 20
_LARGE = 4 << 20  # smaller files are written through the page cache: bandwidth does not dominate their time
_BLOCK = 4096  # a multiple of the block size of any disk


@dataclass(frozen=True)
class Region:
    """A file to write, and the position of its content in memory."""

    name: str
    offset: int
    bytes: int

    def content_in(self, memory: memoryview) -> memoryview:
        """The content of the file."""
        return memory[self.offset : self.offset + self.bytes]


@dataclass(frozen=True)
class WriteTask:
    """The share of one checkpoint that one process writes."""

    folder: str
    """The folder of all checkpoints."""
    step: int
    best: bool
    keep_last: int
    versions: Mapping[str, str]
    files: tuple[Region, ...]
    token: str = ""
    """Part of the name of the checkpoint's temporary folder; equal on all writers."""
    writer: int = 0
    """The index of this writer. Writer 0 waits for the others and completes the checkpoint."""
    writers: int = 1
    """The number of writers."""
    total: int = 0
    """The total bytes that all writers write; 0 means that `size` is the total."""
    tensors: str = ""
    """A hash of the names, dtypes and shapes of the tensors that are divided among the writers."""
    makes_room: bool = False
    """Whether to remove other checkpoints before this one is written, which is then one more than `keep_last`."""
    overlapped: bool = False
    """Whether each rank starts its writer in its next step; a rank on another host may still wait for its batch."""
    holder: str = ""
    """In object storage: the run that must hold the lock when the checkpoint is completed; "": any."""
    lost: bool = False
    """In object storage: whether to tell writer 0 that the process with this share has ended, and write nothing."""

    @property
    def size(self) -> int:
        """Bytes that this writer writes."""
        return sum(file.bytes for file in self.files)

    def to_json(self) -> str:
        """The task as one line of JSON."""
        return json.dumps(vars(self), default=vars)

    @classmethod
    def from_json(cls, line: str | bytes) -> Self:
        """The inverse of `to_json`."""
        content = json.loads(line)
        return cls(**{**content, "files": tuple(Region(**file) for file in content["files"])})


def write_file(path: Path, content: memoryview | bytes, system: System) -> FileRecord:
    """Create a file and fsync it. Raises `OSError`."""
    content = memoryview(content)
    file = system.create(path)
    try:
        with hashing(content) as hasher:
            done = 0
            if len(content) >= _LARGE:
                done = _write_past_the_cache(file, content[: len(content) // _BLOCK * _BLOCK], system)
            while done < len(content):
                done += system.write(file, content[done : done + _CHUNK])
            system.fsync(file)
    finally:
        os.close(file)
    return FileRecord(path.name, len(content), str(hasher))


@contextmanager
def hashing(content: memoryview) -> Iterator[Hasher]:
    """Context manager that hashes content in a thread, while it is written or sent; both release the GIL."""
    hasher = Hasher()
    thread = Thread(target=hasher.update, args=(content,))
    thread.start()
    try:
        yield hasher
    finally:
        thread.join()


def _write_files(task: WriteTask, memory: memoryview, folder: Path, system: System) -> list[FileRecord]:
    """Write the files of a task into a folder. Raises `OSError`."""
    return [write_file(folder / file.name, file.content_in(memory), system) for file in task.files]


def _write_past_the_cache(file: int, content: memoryview, system: System) -> int:
    """Write with direct I/O, bypassing the page cache; returns how many bytes could be written that way.

    Through the page cache, 2 GB take five times as long until they are on disk, and slow training steps more.
    """
    flags = fcntl.fcntl(file, fcntl.F_GETFL)
    done = 0
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, flags | os.O_DIRECT)
        while done < len(content):
            done += system.write(file, content[done : done + _CHUNK])
            if done % _BLOCK:
                break
    except OSError as error:
        if error.errno != errno.EINVAL:  # EINVAL: the file system has no direct I/O, or another block size
            raise
    fcntl.fcntl(file, fcntl.F_SETFL, flags)
    return done


def fsync_folder(folder: Path, system: System) -> None:
    """Make the entries of a folder durable. Raises `OSError`."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        system.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # EINVAL: some network file systems cannot sync folders
            raise
    finally:
        os.close(descriptor)


# --- Several writers --------------------------------------------------------------------------------------------------
# Each process writes its share of one checkpoint into the same unfinished folder.
#
#     training, rank 0      creates the folder; the ranks then gather their states, so all of them know that it exists
#     writer 1, 2, ...      lock .writer-N; write the files of its share; rename its record to .writer-N.json, or
#                           after an error, the lock to .writer-N.errno-CODE
#     training, rank N      create .writer-N.gone if its writer has ended without an answer
#     writer 0              write its own share; wait for the records of all other writers; complete the checkpoint
#
# Writers communicate only through the folder, because they may be on different nodes, do not import torch, and finish
# a save even if their training process was killed; if the job ends, `ddpkit launch` waits a few seconds for them. A
# writer that holds no lock and has left no record has died or never started. Writer 0 then gives up and removes the
# folder. The others never create it: without it, they have nothing to do.


_FIRST_POLL_SECONDS = 0.01
_LONGEST_POLL_SECONDS = 1.0
_POLLS_PER_WAIT = 10  # writer 0 notices the last record at most a tenth later than it could
_START_SECONDS = 20.0  # how long a writer may take to start, after writer 0 has written its own share
_ABANDONED_SECONDS = 1.0  # the same if the training process is gone: a writer may still be starting
_STALL_SECONDS = 120.0  # how long no file may grow; detects dead writers on file systems without locks
_LONGEST_RECORD = 1 << 20
_ERROR = ".errno-"
_GONE = ".gone"


def unfinished_folder(folder: Path, step: int, token: str) -> Path:
    """The folder in which the checkpoint of a step is written. `token`: a text that is different for each save."""
    return folder / f"{WRITING}{name_of(step)}-{token}"


def write_share(task: WriteTask, memory: memoryview, unfinished: Path, system: System) -> None:
    """Write the share of a writer other than 0. Errors are recorded in the folder, and reported by writer 0.

    `unfinished`: the folder of the unfinished checkpoint.
    """
    name = f".writer-{task.writer}"
    try:
        lock = os.open(unfinished / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            with suppress(OSError):  # the file system has no locks
                fcntl.flock(lock, fcntl.LOCK_EX)  # blocking, because writer 0 holds the lock for a moment when it polls
            try:
                files = [*map(asdict, _write_files(task, memory, unfinished, system))]
                record = {"tensors": task.tensors, "files": files}
                write_file(unfinished / f"{name}.new", json.dumps(record).encode(), system)
                system.rename(unfinished / f"{name}.new", unfinished / f"{name}.json")
            except OSError as error:  # as a name, because a full disk has no space for content
                system.rename(unfinished / name, unfinished / f"{name}{_ERROR}{error.errno}")
        finally:
            os.close(lock)
    except FileNotFoundError:
        if unfinished.is_dir():
            raise
        # Writer 0 has given up, and reports why.


def note_gone(task: WriteTask) -> None:
    """Tell writer 0 that the process with a share of this task has ended. Called by its training process."""
    with suppress(OSError):  # the checkpoint is complete, or was given up
        (unfinished_folder(Path(task.folder), task.step, task.token) / f".writer-{task.writer}{_GONE}").touch()


def collect(task: WriteTask, unfinished: Path, abandoned: Callable[[], bool]) -> list[FileRecord]:
    """Wait for the shares of the other writers, and return the records of all their files. Called by writer 0.

    `unfinished`: the folder of the unfinished checkpoint. `abandoned`: a function that returns whether the training
    process has ended.
    Raises `CheckpointError`, and `OSError` with the error number that another writer has recorded.
    """
    records: list[FileRecord] = []
    waiting = {writer: f".writer-{writer}" for writer in range(1, task.writers)}
    growth = _Growth(unfinished)
    began = time.monotonic()
    while waiting:
        start_seconds = _STALL_SECONDS if task.overlapped else _START_SECONDS
        if abandoned():
            start_seconds = _ABANDONED_SECONDS
        # From listings: on NFS, a lookup by name may miss a new file for up to a minute.
        names = {path.name for path in unfinished.iterdir()}
        growth.look(names, complete={record.name for record in records})
        ended = set()
        if growth.still_seconds > start_seconds:
            ended = {writer for writer, name in waiting.items() if name not in names or _is_unlocked(unfinished / name)}
            names = {path.name for path in unfinished.iterdir()}  # again: a writer leaves its record before it unlocks
        for each in names:
            if each.startswith(".") and _ERROR in each:
                number = int(each.rpartition(_ERROR)[2])
                raise OSError(number, os.strerror(number))
        for writer, name in [*waiting.items()]:
            if f"{name}.json" in names:
                with open_file(unfinished / f"{name}.json") as file:
                    records += records_in(file.read(_LONGEST_RECORD), task, writer)
                del waiting[writer]
            elif f"{name}{_GONE}" in names:
                raise missing_writer(task, writer, "has ended")
            elif writer in ended:
                raise missing_writer(task, writer, "has ended or never started")
        if waiting and growth.still_seconds > _STALL_SECONDS:
            raise missing_writer(task, min(waiting), f"has written nothing for {_STALL_SECONDS:g} s")
        if waiting:
            waited = time.monotonic() - began
            time.sleep(min(max(waited / _POLLS_PER_WAIT, _FIRST_POLL_SECONDS), _LONGEST_POLL_SECONDS))
    for path in unfinished.glob(".writer-*"):
        path.unlink()
    return records


class _Growth:
    """For how long no file in a folder has appeared, disappeared or grown.

    While files grow, only one of them is looked at. Sizes are compared instead of times, because the clocks of nodes
    and file servers differ.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._names: Set[str] = set()
        self._sizes: dict[str, int] = {}
        self._growing = ""  # the file that was last seen to grow
        self._all_compared = -math.inf  # when
        self._changed = time.monotonic()  # when

    @property
    def still_seconds(self) -> float:
        """Seconds since a change was last seen."""
        return time.monotonic() - self._changed

    def look(self, names: Set[str], complete: Set[str]) -> None:
        """Look for a change since the last call. `names`: the files in the folder; `complete`: files that do not grow.

        The sizes of all files are compared at most once a second, and only if no other change was seen.
        """
        now = time.monotonic()
        changed = names != self._names or self._has_grown(self._growing)
        self._names = names
        if not changed and now - self._all_compared >= _LONGEST_POLL_SECONDS:
            self._all_compared = now
            others = (name for name in names - complete if not name.startswith("."))  # locks do not grow
            grown = [name for name in others if self._has_grown(name)]
            changed = bool(grown)
            self._growing = grown[0] if grown else ""
        if changed:
            self._changed = now

    def _has_grown(self, name: str) -> bool:
        """Whether a file has grown since the last call for it; False for a file that was removed, or no name."""
        if not name:
            return False
        with suppress(FileNotFoundError):
            before = self._sizes.get(name)
            self._sizes[name] = (self._folder / name).stat().st_size
            return self._sizes[name] != before
        return False


def _is_unlocked(path: Path) -> bool:
    """Whether no process holds a lock on the file; False if the file system has no locks."""
    with FileIO(os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW), "r+") as file:
        return try_lock(file, fcntl.LOCK_EX) is True


def records_in(content: bytes, task: WriteTask, writer: int) -> list[FileRecord]:
    """The records of the files of another writer's share. `content`: what this writer has left.

    Raises `CheckpointError` if it has other tensors than writer 0.
    """
    share = json.loads(content)
    if share["tensors"] != task.tensors:
        raise CheckpointError(
            f"the checkpoint of step {task.step} was not saved: writer {writer} (of {task.writers}, counted from 0) "
            "has tensors with different names, dtypes or shapes than writer 0",
            "use the same model and optimizer on all ranks, with the same state for each parameter",
        )
    return [FileRecord(**file) for file in share["files"]]


def missing_writer(task: WriteTask, writer: int, problem: str) -> CheckpointError:
    """The error for a checkpoint of which a share is missing."""
    return CheckpointError(
        f"the checkpoint of step {task.step} was not saved: writer {writer} (of {task.writers}, counted from 0) "
        f"{problem}",
        "see the output of the other ranks; earlier checkpoints are unchanged",
        transient=True,
    )


# --- A whole checkpoint -----------------------------------------------------------------------------------------------
#     create .writing-step-K-<token>       and remove the leftovers of killed writers
#     write and fsync each file            if there are several writers, each writes its share: see above
#     write and fsync the manifest
#     fsync the folder, rename it to step-K, fsync its parent          from here on it is the newest checkpoint
#     rename checkpoints that are not kept to .removed-..., then remove them
#
# If the process is killed at any moment, either the old or the new checkpoint is complete, and the next save removes
# the leftover folder, whose name begins with a dot.


_POLL_SECONDS = 0.02
_LONG_AGO = 3600.0  # without locks, a folder that has not changed for this long has no writer
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT)
_HELD_BY_ANOTHER = (errno.EWOULDBLOCK, errno.EACCES)


def write(
    task: WriteTask, memory: memoryview, system: System | None = None, *, abandoned: Callable[[], bool] = bool
) -> None:
    """Write a checkpoint durably, and remove the oldest checkpoints beyond `task.keep_last`.

    If several writers share a checkpoint, only writer 0 completes it and removes others; the rest write their share.
    `memory`: the content of the files. `abandoned`: a function that returns whether the process that requested the
    save has ended.
    Raises `CheckpointError` if the checkpoint cannot be written; earlier checkpoints are then unchanged.
    """
    system = system or System()
    folder = Path(task.folder)
    unfinished = unfinished_folder(folder, task.step, task.token or secrets.token_hex(4))
    with _explained(task, folder, system):
        if task.writer > 0:
            write_share(task, memory, unfinished, system)
            return
        make_folder(folder, system)
        with _alone(folder) as alone:
            try:
                with suppress(FileExistsError):  # several writers: the training process has created it
                    system.mkdir(unfinished)
                _clear_leftovers(folder, unfinished, alone, system)
                if task.makes_room:
                    _prune(task, folder, system)
                if task.size > system.free(folder):
                    raise _full(task, folder, system)
                records = _write_files(task, memory, unfinished, system)
                records += collect(task, unfinished, abandoned)
                created = datetime.now(UTC).isoformat(timespec="seconds")
                manifest = Manifest(task.step, created, task.best, task.versions, tuple(records))
                write_file(unfinished / MANIFEST, manifest_content(manifest), system)
                fsync_folder(unfinished, system)
                _put_in_place(unfinished, folder / name_of(task.step), system)
            except BaseException:
                removed = _removed(unfinished)
                with suppress(OSError):  # renamed first, so that the other writers can create no more files in it
                    system.rename(unfinished, removed)
                    unfinished = removed
                with suppress(OSError):
                    system.remove(unfinished)
                raise
            fsync_folder(folder, system)
            if not task.makes_room:
                _prune(task, folder, system)


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

    Called after the run has resumed from an earlier step, so that a restart does not resume from later checkpoints.
    Returns the new folder and the steps moved; None if there is nothing to move. Raises `CheckpointError`.
    """
    system = system or System()
    later = [checkpoint for checkpoint in checkpoints(folder) if checkpoint.step > after and is_ours(checkpoint)]
    if not later:
        return None
    place = folder / name_of_branch()
    try:
        system.mkdir(place)
        for checkpoint in later:
            system.rename(checkpoint.path, place / checkpoint.path.name)
        fsync_folder(place, system)
        fsync_folder(folder, system)
    except OSError as error:
        raise cannot_write(error, folder) from None
    return place, [checkpoint.step for checkpoint in later]


def name_of_branch() -> str:
    """A new name for the folder of an abandoned branch."""
    return f"{ASIDE}{datetime.now(UTC):%Y%m%d-%H%M%S}-{secrets.token_hex(2)}"


def cannot_write(error: OSError, folder: Path) -> CheckpointError:
    """The error for a folder that cannot be written to."""
    return CheckpointError(
        f"checkpoints cannot be written to {folder}: {error.strerror or error}",
        advice_for(
            error, f"use a folder that this process may write to; `ddpkit doctor --dir {folder}` tests whether it can"
        ),
    )


# --- Final rename -----------------------------------------------------------------------------------------------------


def _put_in_place(unfinished: Path, place: Path, system: System) -> None:
    if not place.exists():
        system.rename(unfinished, place)
        return
    # This step has a checkpoint already: it is saved again after an evaluation, or by a second `save()`. Exchange the
    # two folders, so that a complete checkpoint exists under this name at any time.
    try:
        system.exchange(unfinished, place)
        before = unfinished
    except OSError:  # some file systems, such as NFS, cannot
        replaced = place.with_name(f"{REPLACED}{place.name}-{secrets.token_hex(4)}")
        system.rename(place, replaced)  # `checkpoints` finds it under this name too
        system.rename(unfinished, place)
        before = _removed(place)
        system.rename(replaced, before)
    system.remove(before)


# --- Retention --------------------------------------------------------------------------------------------------------


def _prune(task: WriteTask, folder: Path, system: System) -> None:
    """Remove older checkpoints that exceed `keep_last`. Those of later steps belong to another run, and are kept."""
    saved = [checkpoint for checkpoint in checkpoints(folder) if checkpoint.step <= task.step]
    for checkpoint in not_kept(saved, task.keep_last):
        # A folder that was copied from object storage may also have files of a checkpoint that was set aside.
        is_copy = checkpoint.manifest is not None and checkpoint.manifest.folder != ""
        if not is_copy:
            removed = _removed(checkpoint.path)
            with suppress(FileNotFoundError):  # another writer removed it
                system.rename(checkpoint.path, removed)
                system.remove(removed)


def not_kept(saved: Sequence[StoredCheckpoint], keep_last: int) -> list[StoredCheckpoint]:
    """The checkpoints to remove. `saved`: newest first. `keep_last`: how many complete ones to keep; also the best.

    A damaged one that is newer than the oldest of these is kept too.
    """
    whole = [checkpoint for checkpoint in saved if checkpoint.whole]
    newest = whole[:keep_last]
    best = [checkpoint for checkpoint in whole if checkpoint.manifest is not None and checkpoint.manifest.best]
    kept = [*newest, *best[:1]]
    oldest = min((checkpoint.step for checkpoint in newest), default=0)
    return [
        checkpoint
        for checkpoint in saved
        if checkpoint not in kept and (checkpoint.whole or checkpoint.step < oldest) and is_ours(checkpoint)
    ]


def is_ours(checkpoint: StoredCheckpoint) -> bool:
    """Whether this is a checkpoint, complete or damaged, in a format that this version of ddpkit can read."""
    return checkpoint.manifest is not None


def _removed(path: Path) -> Path:
    return path.with_name(f"{REMOVED}{path.name}-{secrets.token_hex(4)}")


# --- Folder lock and leftovers ----------------------------------------------------------------------------------------


LOCK = ".writer-lock"
"""The file in the folder of all checkpoints that writer 0 locks: NFS has no locks on folders. It is never removed."""


@contextmanager
def _alone(folder: Path) -> Iterator[bool | None]:
    """Context manager that tries to lock the folder. Yields whether no other process writes there; None if unknown."""
    alone = None
    with ExitStack() as stack:
        with suppress(OSError):  # for example, the file belongs to another user
            descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
            alone = try_lock(stack.enter_context(FileIO(descriptor, "r+")), fcntl.LOCK_EX)
        yield alone


RUN_LOCK = ".lock"
"""The file in the folder of all checkpoints that a run locks; see lock.py."""


def wait_for_writers(folder: Path, seconds: float) -> None:
    """Wait, for at most `seconds`, until no process is writing a checkpoint into `folder`."""
    with suppress(OSError), open_file(folder / LOCK) as file:  # without the file, nobody has written there
        lock_within(file, seconds, fcntl.LOCK_SH)


def lock_within(file: IO[bytes], seconds: float, kind: int = fcntl.LOCK_EX) -> bool:
    """Lock a file; wait for at most `seconds` while another process holds the lock. Returns whether none holds it.

    Without locks, other processes cannot be detected.
    """
    deadline = time.monotonic() + seconds
    while try_lock(file, kind) is False:
        if time.monotonic() > deadline:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def try_lock(file: IO[bytes] | int, kind: int) -> bool | None:
    """Lock a file, if no other process holds the lock. Returns whether it did; None if the file system has no locks."""
    try:
        fcntl.flock(file, kind | fcntl.LOCK_NB)
    except OSError as error:  # held by a living process: the kernel releases the locks of dead ones
        return False if error.errno in _HELD_BY_ANOTHER else None
    return True


def _clear_leftovers(folder: Path, unfinished: Path, alone: bool | None, system: System) -> None:
    now = unfinished.stat().st_mtime  # by the clock of the file system, which may differ from this machine's
    for path in leftovers(folder):
        if path != unfinished and (alone or (alone is None and now - _last_written(path) > _LONG_AGO)):
            with suppress(FileNotFoundError):
                system.remove(path)


def _last_written(path: Path) -> float:
    with suppress(OSError):
        return max(entry.stat().st_mtime for entry in (path, *path.iterdir()))
    return float("inf")


# --- Errors -----------------------------------------------------------------------------------------------------------


def _full(task: WriteTask, folder: Path, system: System, code: int = errno.ENOSPC) -> CheckpointError:
    """The error for a disk without space or inodes, or a quota that is used up. `code`: the system's error number."""
    inodes_needed = len(task.files) * task.writers + 2  # the manifest and the folder
    free = inodes = None
    with suppress(OSError):
        free = system.free(folder)
        inodes = system.free_inodes(folder)
    needed = f"{task.total or task.size:,} bytes are needed"
    remedy = "free some space"
    if code == errno.EDQUOT:
        needed += ", and your disk quota is used up"
        remedy = "remove files that count towards the quota"
    elif inodes is not None and inodes < inodes_needed:
        needed = f"{inodes_needed:,} inodes (files and folders) are needed, {inodes:,} are free"
        remedy = f"remove files from this disk (`df -i {folder}` shows its inodes)"
    elif free is not None:
        needed += f", {free:,} are free"
    return CheckpointError(
        f"there is no space for the checkpoint of step {task.step} in {folder}: {needed}",
        f"{remedy}, lower keep_last, or use a folder on another disk; earlier checkpoints are unchanged",
        transient=True,
    )


@contextmanager
def _explained(task: WriteTask, folder: Path, system: System) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if error.errno in _NO_SPACE:
            raise _full(task, folder, system, error.errno) from None
        raise cannot_write(error, folder) from None


def write_anywhere(task: WriteTask, memory: memoryview, *, abandoned: Callable[[], bool] = bool) -> None:
    """Write a checkpoint on disk or in object storage. Arguments and errors: as for `write`."""
    if not is_url(task.folder):
        write(task, memory, abandoned=abandoned)
        return
    from ddp_kit.storage import saving  # imports a client, which starts threads

    if task.lost:
        saving.tell_lost(task)
    else:
        saving.write(task, memory, abandoned=abandoned)


# --- Writer process ---------------------------------------------------------------------------------------------------


def main(parent: int, line: int, memory: int) -> None:
    """Write the checkpoints that the training process requests.

    `parent`: the id of the training process. `line`, `memory`: file descriptors of the socket and the shared memory.
    """

    def handle(request: str) -> None:
        task = WriteTask.from_json(request)
        # Not closed, but unmapped when the last reference to it is gone: after an error, slices of it live as long as
        # the traceback, and closing it would raise a BufferError instead.
        content = memoryview(mmap.mmap(memory, 0, prot=mmap.PROT_READ))
        write_anywhere(task, content, abandoned=lambda: os.getppid() != parent)

    serve(parent, line, handle)
