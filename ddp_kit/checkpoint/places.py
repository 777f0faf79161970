"""Where a run keeps its checkpoints: `Folder` on a disk, or `Bucket` in object storage."""

import os
import shutil
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from ddp_kit.checkpoint.format import StoredCheckpoint, checkpoints, name_of, path_of
from ddp_kit.checkpoint.lock import (
    OTHER_RUN_SECONDS,
    SAME_JOB_SECONDS,
    FolderLock,
    RunLock,
    other_run_error,
    other_trainer_error,
    overwritten_error,
)
from ddp_kit.checkpoint.writer import set_aside, wait_for_writers
from ddp_kit.distributed.world import World, broadcast_bytes, gathered, largest
from ddp_kit.env import attempt_id, job_id, predecessors
from ddp_kit.errors import CheckpointError
from ddp_kit.log import logger
from ddp_kit.storage.choosing import fits_in_memory, folder_on_node
from ddp_kit.storage.client import Service
from ddp_kit.storage.remote import RemoteCheckpoint, cannot_fetch, holder_of
from ddp_kit.storage.urls import Location, split


class Place(Protocol):
    """The operations of a run on the place of its checkpoints. Methods may raise `CheckpointError`."""

    def listed(self, wait_seconds: float) -> list[StoredCheckpoint]:
        """The checkpoints, newest first. `wait_seconds`: how long to wait for a process that still writes one."""

    def location(self, step: int) -> Location:
        """The location of the checkpoint of a step."""

    def set_aside(self, after: int) -> tuple[Location, list[int]] | None:
        """Move the checkpoints of steps after `after` away. Returns where, and the steps; None if there are none."""

    def lock(self, holder: str) -> RunLock:
        """The lock of the run `holder`."""

    def write(self, name: str, text: str) -> None:
        """Write a file that ddpkit does not read back. May also raise `OSError`."""


class Folder:
    """A folder on a disk."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def listed(self, wait_seconds: float) -> list[StoredCheckpoint]:
        wait_for_writers(self._path, wait_seconds)
        return [*checkpoints(self._path)]

    def location(self, step: int) -> Location:
        return path_of(self._path, step)

    def set_aside(self, after: int) -> tuple[Location, list[int]] | None:
        return set_aside(self._path, after)

    def lock(self, holder: str) -> RunLock:
        return FolderLock(self._path, job_id(), holder)

    def write(self, name: str, text: str) -> None:
        (self._path / name).write_text(text, encoding="utf-8")


class Bucket:
    """A URL in object storage, through a process that runs while the lock is held."""

    def __init__(self, url: str) -> None:
        self._service = Service(url)

    def listed(self, wait_seconds: float) -> list[StoredCheckpoint]:  # noqa: ARG002 - writers cannot be seen
        return [
            RemoteCheckpoint(Path(name_of(step)), step, None, problem, str(self.location(step)))
            for step, problem in self._service.call("newest")
        ]

    def location(self, step: int) -> Location:
        return f"{self._service.url}/{name_of(step)}"

    def set_aside(self, after: int) -> tuple[Location, list[int]] | None:
        moved = self._service.call("set_aside", after=after)
        return None if moved is None else (moved[0], moved[1])

    def lock(self, holder: str) -> RunLock:
        return BucketLock(self._service, job_id(), holder)

    def write(self, name: str, text: str) -> None:
        self._service.call("put", name=name, content=text)


def place_of(location: Location) -> Place:
    """The place of a folder or URL. Raises `ConfigError` if the client of object stores is not installed."""
    return Bucket(location) if isinstance(location, str) else Folder(location)


# --- The lock in object storage ---------------------------------------------------------------------------------------


_POLL_SECONDS = 1.0


class BucketLock:
    """A run's lock in object storage, which a process renews; see storage/lease.py. The same methods as `FolderLock`.

    If that process is killed, the run takes its lock again at the next save.
    """

    def __init__(self, service: Service, job: str, holder: str) -> None:
        self._service = service
        self._job = job
        self._run = holder
        self._seen: Any = None  # the last run that is known to have written
        self._warned = False

    def acquire(self, *, resuming: bool) -> None:
        holder = self._take()
        last = holder.get("wrote")
        if last not in (None, self._run, self._seen) and not resuming:
            self.release()
            raise overwritten_error(self._service.url, holder)
        self._seen = last

    def release(self) -> None:
        self._service.close()

    @property
    def job_wrote(self) -> bool:
        return bool(self._job) and str(self._seen).startswith(f"{self._job}/")

    def note_save(self) -> None:
        try:
            if not self._service.started:
                self.acquire(resuming=False)
            self._service.call("note_wrote", run=self._run)
            self._seen = self._run
        except CheckpointError as error:
            if not error.transient:
                raise
            # The writer still refuses to complete the checkpoint if another run has the lock.
            logger.warning("{}; training continues, and the next save tries again", error.message)

    def _take(self) -> dict[str, Any]:
        """Take the lock, and return its content before. Raises `CheckpointError` if another run holds it."""
        own = holder_of(self._run, self._job if attempt_id() else "", predecessors())
        began = time.monotonic()
        waits = False
        while True:
            answer, holder, warnings = self._service.call("take", own=own)
            if answer == "taken":
                break
            if holder.get("pid") == os.getpid() and holder.get("boot") == own["boot"]:
                raise other_trainer_error(self._service.url)
            waited = time.monotonic() - began
            same_job = bool(own["job"]) and holder.get("job") == own["job"]
            if answer == "alive" and waited > (SAME_JOB_SECONDS if same_job else OTHER_RUN_SECONDS):
                raise other_run_error(self._service.url, holder)
            if not waits and waited > OTHER_RUN_SECONDS:
                waits = True
                logger.info("waiting for the lock of {}: at most two minutes if its run has ended", self._service.url)
            time.sleep(_POLL_SECONDS)
        for warning in warnings if not self._warned else ():
            logger.warning("{}", warning)
        self._warned = True
        return dict(holder)


# --- Reading ----------------------------------------------------------------------------------------------------------


class Fetched:
    """A checkpoint in object storage, of which a rank's process fetches what the rank reads."""

    def __init__(self, service: Service, place: str, folder: Path, *, owned: bool) -> None:
        """`folder`: of this node, for its files. `owned`: whether the process removes it at the latest when it ends."""
        self._service = service
        self._place = place
        self._folder = folder
        self._owned = owned

    def examine(self) -> StoredCheckpoint:
        """The checkpoint, without a look at the sizes of its files. Raises `CheckpointError`."""
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise cannot_fetch(error, self._folder) from None
        return self._service.checkpoint(self._place, self._folder, owned=self._owned)


@contextmanager
def reading(location: Location, world: World) -> Iterator[Path | Fetched]:
    """Context manager for reading a checkpoint on all ranks: a folder, or one whose files are fetched. A collective.

    Fetched files are in a folder of each node, in memory if they fit, until all ranks have left the context.
    """
    if isinstance(location, Path):
        yield location
        return
    url, place = split(location)
    if not place:
        raise CheckpointError(
            f"{location} is not a checkpoint",
            f"pass one, such as {url}/{name_of(12)}; `ddpkit checkpoints {url}` lists them",
        )
    service = Service(url)
    run = broadcast_bytes(uuid.uuid4().hex.encode(), world).decode()
    size = 0
    problem: CheckpointError | None = None
    if world.is_main:
        try:
            size = service.call("size", place=place)
        except CheckpointError as error:
            problem = error
    (size,) = largest(world, [size])
    fits = gathered(world, [fits_in_memory(size)])[world.rank - world.local_rank][0]
    folder = folder_on_node(in_memory=bool(fits)) / f"ddpkit-fetched-{run}"
    try:
        if problem is not None:
            raise problem
        yield Fetched(service, place, folder, owned=world.local_rank == 0)
    finally:
        gathered(world, [0])  # a barrier: the other ranks of this node have read its files
        service.close()
        if world.local_rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
