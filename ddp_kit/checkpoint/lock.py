"""A lock that lets only one run at a time write to a checkpoint folder. The kernel releases it when the process ends.

    <dir>/.lock       locked with flock; contains the current or last holder: host, process, job, and start time

Without the lock, a second run would resume from the checkpoints of the first, or remove them. `flock` also
excludes a second Trainer in the same process, and works over NFS, where Linux maps it to a POSIX lock on the whole
file. A file system without locks gives no protection.
"""

import fcntl
import json
import os
import socket
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from ddp_kit.checkpoint.writer import RUN_LOCK, try_lock
from ddp_kit.distributed.world import World, gathered_bytes, largest
from ddp_kit.errors import CheckpointError
from ddp_kit.storage.remote import in_words
from ddp_kit.storage.urls import Location

OTHER_RUN_SECONDS = 5.0  # how long to wait for another run, which may be about to exit
SAME_JOB_SECONDS = 30.0  # how long to wait for this job's previous attempt: NFS is slow to notice that a host is gone
_POLL_SECONDS = 0.1
_LONGEST = 4096  # the maximum size of a lock file, in bytes
_open: set[int] = set()  # the descriptors of this process's lock files


class RunLock(Protocol):
    """A lock that lets only one run write to a place."""

    def acquire(self, *, resuming: bool) -> None:
        """Take the lock.

        `resuming`: whether the run will resume from the checkpoints there, even if another run wrote them.
        Raises `CheckpointError` if another run holds the lock, or, unless `resuming`, if another run has written there
        since this run last held it.
        """

    def release(self) -> None:
        """Release the lock."""

    @property
    def job_wrote(self) -> bool:
        """Whether this job, now or before a restart, wrote the newest checkpoint. Call it while the lock is held."""

    def note_save(self) -> None:
        """Record that this run writes the newest checkpoint. May raise `CheckpointError`."""


class FolderLock:
    """A run's lock on `folder`, which must exist; see `RunLock`.

    `job`: the job's id; empty without a launcher. `run`: `job`, a slash, and a text that no other run has.
    """

    def __init__(self, folder: Path, job: str, run: str) -> None:
        self._folder = folder
        self._job = job
        self._run = run
        self._descriptor: int | None = None
        self._seen: Any = None  # the last run that is known to have written to the folder
        self._finish: Callable[[], Any] = lambda: None

    def acquire(self, *, resuming: bool) -> None:
        with suppress(OSError):  # the file system has no locks
            self._descriptor = os.open(
                self._folder / RUN_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666
            )
        if self._descriptor is None:
            return
        _close_in_forked_children()
        _open.add(self._descriptor)
        self._finish = weakref.finalize(self, _unlock, self._descriptor, os.getpid())
        try:
            self._wait()
            last = self._read_holder().get("wrote")
            if last not in (None, self._run, self._seen) and not resuming:
                raise overwritten_error(self._folder, self._read_holder())
            self._seen = last
            self._write_holder(last)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        self._finish()
        self._descriptor = None

    @property
    def job_wrote(self) -> bool:
        return bool(self._job) and str(self._seen).startswith(f"{self._job}/")

    def note_save(self) -> None:
        if self._seen != self._run:
            self._seen = self._run
            self._write_holder(self._run)

    def _wait(self) -> None:
        began = time.monotonic()
        assert self._descriptor is not None
        while try_lock(self._descriptor, fcntl.LOCK_EX) is False:  # None: the file system has no locks
            holder = self._read_holder()
            if holder.get("pid") == os.getpid() and holder.get("host") == socket.gethostname():
                raise other_trainer_error(self._folder)
            same_job = bool(self._job) and holder.get("job") == self._job
            seconds = SAME_JOB_SECONDS if same_job else OTHER_RUN_SECONDS
            if time.monotonic() - began > seconds:
                raise other_run_error(self._folder, holder)
            time.sleep(_POLL_SECONDS)

    def _write_holder(self, wrote: Any) -> None:
        """Record this process in the lock file. `wrote`: the run that wrote to the folder last."""
        if self._descriptor is None:
            return
        since = datetime.now(UTC).isoformat(timespec="seconds")
        holder = {"host": socket.gethostname(), "pid": os.getpid(), "job": self._job, "since": since, "wrote": wrote}
        with suppress(OSError):  # for example a full disk; the lock works without its content
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, json.dumps(holder).encode(), 0)

    def _read_holder(self) -> dict[str, Any]:
        """The content of the lock file, which describes the current or last holder; empty if it cannot be read."""
        with suppress(OSError, ValueError, RecursionError):
            descriptor = os.open(self._folder / RUN_LOCK, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                holder = json.loads(os.read(descriptor, _LONGEST))
            finally:
                os.close(descriptor)
            if isinstance(holder, dict):
                return holder
        return {}


def other_run_error(place: Location, holder: Mapping[str, Any]) -> CheckpointError:
    """The error if another run holds the lock. `holder`: the content of the lock."""
    return CheckpointError(
        f"another run is writing checkpoints to {place}: {in_words(holder)}",
        "wait until that run ends, stop it, or use a separate checkpoint.dir for each run",
    )


def other_trainer_error(place: Location) -> CheckpointError:
    """The error if another Trainer in this process holds the lock."""
    return CheckpointError(
        f"another Trainer in this process is writing checkpoints to {place}",
        "use a separate checkpoint.dir for each Trainer, or finish one before starting the next",
    )


def overwritten_error(place: Location, holder: Mapping[str, Any]) -> CheckpointError:
    """The error if another run has written there since this one started. `holder`: the content of the lock."""
    return CheckpointError(
        f"another run has written checkpoints to {place} since this run started: {in_words(holder)}",
        "create a new Trainer, which resumes from these checkpoints, or use a separate checkpoint.dir for each run",
    )


def _unlock(descriptor: int, owner: int) -> None:
    if os.getpid() == owner:  # a forked child has closed the descriptor, and may have reused its number
        _open.discard(descriptor)
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # closing is not enough if forked children hold the file open
        os.close(descriptor)


@cache
def _close_in_forked_children() -> None:
    """Let children that are forked from now on close the lock files.

    A DataLoader worker that outlives training would otherwise keep the lock.
    """

    def close() -> None:
        while _open:
            with suppress(OSError):
                os.close(_open.pop())

    os.register_at_fork(after_in_child=close)


# --- Use by all ranks -------------------------------------------------------------------------------------------------


class FolderUse:
    """Exclusive use of a checkpoint folder. One rank per folder locks it; if that fails, all ranks raise an error."""

    def __init__(self, world: World, lock: RunLock | None, *, used: bool) -> None:
        """`lock`: None on ranks that do not lock the folder. `used`: whether there is a folder."""
        self._world = world
        self._used = used
        self._lock = lock
        self._depth = 0

    @contextmanager
    def exclusive(self, *, resuming: bool = False) -> Iterator[None]:
        """Context manager that keeps other runs from writing to the folder. Entering the outermost one is a collective.

        `resuming`: whether the run resumes from the folder's checkpoints, even if another run wrote them.
        Raises `CheckpointError` if the folder cannot be locked; see `FolderLock.acquire`.
        """
        if self._depth == 0 and self._used:
            self._acquire(resuming)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0:
                self.unlock()

    def unlock(self) -> None:
        """Unlock the folder for other runs; also before the context ends."""
        if self._lock is not None:
            self._lock.release()

    @property
    def job_wrote(self) -> bool:
        """Whether this job wrote the newest checkpoint; False on ranks that do not lock the folder."""
        return self._lock is not None and self._lock.job_wrote

    def note_save(self) -> None:
        """Record that the newest checkpoint is now from this run."""
        assert self._lock is not None, "only the first writer of a checkpoint calls this"
        self._lock.note_save()

    def _acquire(self, resuming: bool) -> None:
        try:
            with raised_on_all_ranks(self._world):
                if self._lock is not None:
                    self._lock.acquire(resuming=resuming)
        except CheckpointError:
            self.unlock()
            raise


@contextmanager
def raised_on_all_ranks(world: World) -> Iterator[None]:
    """Context manager that raises a `CheckpointError` of any rank on all ranks. Leaving it is a collective."""
    own_error: list[Any] = []
    try:
        yield
    except CheckpointError as error:
        own_error = [error.message, error.hint, error.transient]
    if largest(world, [len(own_error)]) == [0]:
        return
    errors = [json.loads(text) for text in gathered_bytes(json.dumps(own_error).encode(), world)]
    for source_rank, error_of_rank in enumerate(errors):
        if error_of_rank:
            message, hint, transient = error_of_rank
            problem = CheckpointError(message, hint, transient=transient)
            problem.reported_elsewhere = world.rank != source_rank
            raise problem
