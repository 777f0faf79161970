"""One run at a time writes into a folder of checkpoints: a lock that the kernel releases when its holder ends.

    <dir>/.lock       flock; it says who holds it, or held it last: host, process, job, since when

A second run would resume from the weights of the first one, or remove its checkpoints. `flock` conflicts within one
process, too, and works over NFS, where Linux makes a POSIX lock of the whole file of it. On a file system without locks
nothing is protected.
"""

import errno
import fcntl
import json
import os
import socket
import time
import uuid
import weakref
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ddp_kit.errors import CheckpointError

NAME = ".lock"
_OTHER_RUN_SECONDS = 5.0  # for a run that is about to exit
_SAME_JOB_SECONDS = 30.0  # for the attempt before: an NFS server takes some time to notice that its host is gone
_LOOK_SECONDS = 0.1
_LONGEST = 4096  # bytes of a lock file
_HELD_BY_ANOTHER = (errno.EWOULDBLOCK, errno.EACCES)
_open: set[int] = set()


class FolderLock:
    """The lock of one run on `folder`, which exists; `job`: its id, empty without a launcher."""

    def __init__(self, folder: Path, job: str) -> None:
        self._folder = folder
        self._job = job
        self._run = uuid.uuid4().hex
        self._descriptor: int | None = None
        self._seen: Any = None  # the last run known to have written
        self._finish: Callable[[], Any] = lambda: None

    def acquire(self, *, resuming: bool) -> None:
        """Lock the folder. `resuming`: the run resumes from its checkpoints, whichever run wrote them.

        Raises `CheckpointError`: another run holds it, or has written to it since this one resumed.
        """
        with suppress(OSError):  # the file system has no locks
            self._descriptor = os.open(
                self._folder / NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666
            )
        if self._descriptor is None:
            return
        _open.add(self._descriptor)
        self._finish = weakref.finalize(self, _unlock, self._descriptor, os.getpid())
        try:
            self._wait()
            last = self._said().get("wrote")
            if last not in (None, self._run, self._seen) and not resuming:
                raise CheckpointError(
                    f"another run has written checkpoints to {self._folder} since this one started: {self._holder()}",
                    "create a new Trainer, which resumes from them, or use a separate checkpoint.dir for each run",
                )
            self._seen = last
            self._sign(last)
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Release the lock."""
        self._finish()
        self._descriptor = None

    def note_save(self) -> None:
        """Record that this run wrote the newest checkpoint."""
        if self._seen != self._run:
            self._seen = self._run
            self._sign(self._run)

    def _wait(self) -> None:
        began = time.monotonic()
        while not self._taken():
            holder = self._said()
            if holder.get("pid") == os.getpid() and holder.get("host") == socket.gethostname():
                raise CheckpointError(
                    f"another Trainer of this process writes checkpoints to {self._folder}",
                    "use a separate checkpoint.dir for each Trainer, or finish one before starting the next",
                )
            same_job = bool(self._job) and holder.get("job") == self._job
            if time.monotonic() - began > (_SAME_JOB_SECONDS if same_job else _OTHER_RUN_SECONDS):
                raise CheckpointError(
                    f"another run writes checkpoints to {self._folder}: {self._holder()}",
                    "wait until it ends, end it, or use a separate checkpoint.dir for each run",
                )
            time.sleep(_LOOK_SECONDS)

    def _taken(self) -> bool:
        assert self._descriptor is not None
        try:
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            return error.errno not in _HELD_BY_ANOTHER  # the file system has no locks
        return True

    def _sign(self, wrote: Any) -> None:
        if self._descriptor is None:
            return
        since = datetime.now(UTC).isoformat(timespec="seconds")
        said = {"host": socket.gethostname(), "pid": os.getpid(), "job": self._job, "since": since, "wrote": wrote}
        with suppress(OSError):  # a full disk: the lock itself holds
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, json.dumps(said).encode(), 0)

    def _said(self) -> dict[str, Any]:
        """What the lock says of who holds it or held it last."""
        with suppress(OSError, ValueError, RecursionError):
            descriptor = os.open(self._folder / NAME, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                said = json.loads(os.read(descriptor, _LONGEST))
            finally:
                os.close(descriptor)
            if isinstance(said, dict):
                return said
        return {}

    def _holder(self) -> str:
        said = self._said()
        job = f"job {said['job']!r}, " if said.get("job") else ""
        return f"{job}process {said.get('pid')!r} on {said.get('host')!r}, since {said.get('since')!r}"


def _unlock(descriptor: int, owner: int) -> None:
    if os.getpid() == owner:  # in a forked child it is closed, and the number may be another file's
        _open.discard(descriptor)
        with suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # forked children may hold the file open
        os.close(descriptor)


def _close_in_child() -> None:
    """A forked DataLoader worker that outlives its trainer would keep the lock."""
    while _open:
        with suppress(OSError):
            os.close(_open.pop())


os.register_at_fork(after_in_child=_close_in_child)
