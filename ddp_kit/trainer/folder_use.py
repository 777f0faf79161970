"""A run's exclusive use of its checkpoint folder, agreed on by all ranks."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ddp_kit.checkpoint.lock import FolderLock
from ddp_kit.errors import CheckpointError
from ddp_kit.trainer.exchange import every_text
from ddp_kit.world import World


class FolderUse:
    """Locks the folder on the ranks that write to it; if one of them cannot, all ranks raise."""

    def __init__(self, world: World, folder: Path | None, lock: FolderLock | None) -> None:
        self._world = world
        self._folder = folder
        self._lock = lock  # None on ranks that do not write
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
        """Unlock the folder for other runs, although this run's loop has not been left."""
        if self._lock is not None:
            self._lock.release()

    def note_save(self) -> None:
        """Note that the newest checkpoint is now from this run."""
        assert self._lock is not None, "only a rank that writes saves"
        self._lock.note_save()

    def _acquire(self, resuming: bool) -> None:
        found: CheckpointError | None = None
        try:
            if self._lock is not None:
                self._lock.acquire(resuming=resuming)
        except CheckpointError as error:
            found = error
        said = every_text(b"" if found is None else f"{found.message}\n{found.hint}".encode(), self._world)
        if any(said):
            if self._lock is not None:
                self._lock.release()
            speaker = next(rank for rank, text in enumerate(said) if text)
            problem = CheckpointError(*said[speaker].decode().rsplit("\n", 1))
            problem.reported_elsewhere = self._world.rank != speaker
            raise problem
