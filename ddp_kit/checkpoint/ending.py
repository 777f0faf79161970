"""The program that saves the newest copies in memory to `checkpoint.dir` when a job has ended badly.

Does not import torch.

The launcher's server runs it before it removes the folder of the copies.
"""

import json
import mmap
import os
import sys
import uuid
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from enum import Enum, auto
from io import FileIO
from pathlib import Path

from ddp_kit.checkpoint.format import StoredCheckpoint, newest_whole
from ddp_kit.checkpoint.writer import RUN_LOCK, Region, WriteTask, lock_within, write
from ddp_kit.env import attempt_id, job_id
from ddp_kit.errors import CheckpointError
from ddp_kit.storage.urls import is_url
from ddp_kit.texts import resuming_command

_TARGET = "target.json"
_LOCK_SECONDS = 5.0  # for the workers of other nodes, which may still be ending
_LAST_ATTEMPT = 1 << 30  # the lock is taken at once from each attempt of the same job


@dataclass(frozen=True)
class Target:
    """The place where the newest copy in a folder is saved."""

    folder: str
    """The folder of the run's checkpoints on disk, or its URL in object storage."""
    keep_last: int
    auto: bool
    """Whether the same command resumes from it."""
    alone: bool
    """Whether this node is the only one, or the only one with this folder."""
    job: str = field(default_factory=lambda: job_id() if attempt_id() else "")
    """The job, if it has a unique id: its ranks may have held the lock in object storage."""

    def note(self, copies: Path) -> None:
        """Write this to the folder of the copies, unless it is there: the disk may be full by now. Raises `OSError`."""
        file = copies / _TARGET
        content = json.dumps(asdict(self))
        with suppress(OSError):
            if file.read_text() == content:
                return
        new = file.with_suffix(".new")
        new.write_text(content)
        new.replace(file)


@dataclass(frozen=True)
class StoredRegion(Region):
    """A file to write, whose content is that of another file."""

    source: str = ""

    def content_in(self, memory: memoryview) -> memoryview:
        """The content of the file."""
        if not self.bytes:
            return memory[:0]
        with FileIO(self.source) as file:
            return memoryview(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ))


def target_of(copies: Path) -> Target:
    """The target of the copies in a folder. Raises `OSError` and `ValueError`."""
    return Target(**json.loads((copies / _TARGET).read_text()))


def save(copies: Path) -> str:
    """Save the newest copy in a folder to its target, and return a message; empty if there is nothing to save.

    Nothing is saved if the target has this step or a later one, or if another run uses it.
    """
    copy = newest_whole(copies, hashes=True).checkpoint
    if copy is None:
        return ""
    target = target_of(copies)
    save_to = _save_in_store if is_url(target.folder) else _save_on_disk
    try:
        outcome = save_to(copy, target)
    except CheckpointError as error:
        return f"the state after step {copy.step} could not be saved: {error.message}"
    if outcome is _Outcome.OTHER_RUN and target.alone:
        return f"the state after step {copy.step} was not saved: another run uses {target.folder}"
    if outcome is not _Outcome.SAVED:
        return ""
    return (
        f"the state after step {copy.step} was saved to {target.folder}; {resuming_command(auto=target.auto)} "
        "continues there"
    )


class _Outcome(Enum):
    SAVED = auto()
    NOT_NEEDED = auto()
    OTHER_RUN = auto()
    """Another run uses the target, or on another node, the same program of this job."""


def _save_on_disk(copy: StoredCheckpoint, target: Target) -> _Outcome:
    """Save a copy on disk. Raises `CheckpointError`."""
    folder = Path(target.folder)
    with ExitStack() as stack:
        with suppress(OSError):  # without a lock if the file system has none
            lock = FileIO(
                os.open(folder / RUN_LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666), "r+"
            )
            stack.enter_context(lock)
            if not lock_within(lock, _LOCK_SECONDS):
                return _Outcome.OTHER_RUN
        saved = newest_whole(folder).checkpoint
        if saved is not None and saved.step >= copy.step:
            return _Outcome.NOT_NEEDED
        write(_task(copy, target), memoryview(b""))
    return _Outcome.SAVED


def _save_in_store(copy: StoredCheckpoint, target: Target) -> _Outcome:
    """Save a copy in object storage. Raises `CheckpointError`."""
    from ddp_kit.storage import listing, saving  # imports a client, which starts threads
    from ddp_kit.storage.lease import Answer, Lease
    from ddp_kit.storage.remote import holder_of
    from ddp_kit.storage.store import Store

    store = Store(target.folder)
    lease = Lease(Store(target.folder, patient=False))
    run = f"{target.job}/{uuid.uuid4().hex}"
    answer, _ = lease.take(holder_of(run, target.job, _LAST_ATTEMPT))
    if answer is not Answer.TAKEN:  # no need to wait: this job has held the lock until it ended
        return _Outcome.OTHER_RUN
    try:
        saved = listing.newest_whole(listing.Listing(store)).checkpoint
        if saved is not None and saved.step >= copy.step:
            return _Outcome.NOT_NEEDED
        saving.write(_task(copy, target, run), memoryview(b""))
    finally:
        lease.release()
    return _Outcome.SAVED


def _task(copy: StoredCheckpoint, target: Target, holder: str = "") -> WriteTask:
    manifest = copy.manifest
    assert manifest is not None, "complete"
    files = tuple(StoredRegion(file.name, 0, file.bytes, str(copy.file(file.name))) for file in manifest.files)
    return WriteTask(target.folder, copy.step, False, target.keep_last, manifest.versions, files, holder=holder)


def main(root: str) -> None:
    """Save the newest copy in each folder in `root`. There is one for each Trainer.

    If two Trainers have saved in one folder, nothing is saved: the same command would resume the wrong one from it.
    """
    by_target: dict[str, list[Path]] = {}
    for copies in sorted(path for path in Path(root).iterdir() if path.is_dir()):
        with suppress(OSError, ValueError):  # no target could be noted, so there are no copies
            by_target.setdefault(target_of(copies).folder, []).append(copies)
    for copies, *others in by_target.values():
        message = "" if others else save(copies)
        if message:
            sys.stderr.write(f"ddpkit: {message}\n")
