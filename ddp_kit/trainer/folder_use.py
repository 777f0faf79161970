"""Exclusive use of a checkpoint folder by one run, agreed on by all ranks."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ddp_kit.checkpoint.lock import FolderLock
from ddp_kit.errors import CheckpointError
from ddp_kit.trainer.exchange import gathered_bytes
from ddp_kit.world import World


class FolderUse:
    """Locks the folder on one rank per folder; if a rank cannot lock it, all ranks raise the error."""

    def __init__(self, world: World, folder: Path | None, lock: FolderLock | None) -> None:
        self._world = world
        self._folder = folder
        self._lock = lock  # None on ranks that do not lock the folder
        self._depth = 0

    @contextmanager
    def exclusive(self, *, resuming: bool = False) -> Iterator[None]:
        """A context in which no other run writes to the folder. Entering the outermost one is a collective.

        `resuming`: the run resumes from the folder's checkpoints, no matter which run wrote them.
        Raises `CheckpointError`.
        """
        if self._depth == 0 and self._folder is not None:
            self._acquire(resuming)
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if self._depth == 0 and self._lock is not None:
                self._lock.release()

    def end(self) -> None:
        """Unlock the folder for other runs, within the context."""
        if self._lock is not None:
            self._lock.release()

    def note_save(self) -> None:
        """Record that the newest checkpoint is now from this run."""
        assert self._lock is not None, "only the first writer of a checkpoint calls this"
        self._lock.note_save()

    def _acquire(self, resuming: bool) -> None:
        found: CheckpointError | None = None
        try:
            if self._lock is not None:
                self._lock.acquire(resuming=resuming)
        except CheckpointError as error:
            found = error
        said = gathered_bytes(b"" if found is None else f"{found.message}\n{found.hint}".encode(), self._world)
        if any(said):
            if self._lock is not None:
                self._lock.release()
            speaker = next(rank for rank, text in enumerate(said) if text)
            problem = CheckpointError(*said[speaker].decode().rsplit("\n", 1))
            problem.reported_elsewhere = self._world.rank != speaker
            raise problem
