"""Copies of the state in memory, about one a second, from which a restart resumes.

    launcher      makes a folder in /dev/shm for each node, and removes it when the job ends
    Requests      asks all ranks for a copy after the same step, once `Copies.is_due`
    Copies        writes it as a checkpoint is written on disk: a node's folder has the two newest, complete ones
    Checkpoints   resumes after a restart from the newest checkpoint in memory or on disk
    ending.py     saves the newest copy on disk if the job ends badly

The ranks of one node write the copies in its folder, so there are none of a state that is sharded over several nodes.
"""

import math
import os
import shutil
import sys
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from hashlib import blake2b
from pathlib import Path

import torch

from ddp_kit.checkpoint.ending import Target
from ddp_kit.checkpoint.format import checkpoints, leftovers
from ddp_kit.checkpoint.lock import raised_on_all_ranks
from ddp_kit.checkpoint.packing import Packed, Replicated
from ddp_kit.checkpoint.saver import Saver
from ddp_kit.checkpoint.series import CommonSteps, Series
from ddp_kit.checkpoint.writer import cannot_write
from ddp_kit.control_groups import available_memory, cpu_quota
from ddp_kit.distributed.world import World, largest
from ddp_kit.env import LEAST_SHARED_MEMORY, SHARED_MEMORY, memory_folder, shutdown_timeout
from ddp_kit.errors import CheckpointError
from ddp_kit.log import logger
from ddp_kit.texts import size_text

_LONGEST_SHARE = 0.005  # of the training time, that copies may take
_FIRST_COPIES = 2
_COPIES = 2  # in the folder while a copy is written, and after it
_IN_MEMORY = 3  # with the buffer from which it is written
_LONGEST_WAIT = 60.0  # seconds after repeated failures

BeginSave = Callable[[Series], tuple[str, Callable[[], Packed]]]
"""A function that begins a checkpoint, and returns its token and a function for its state. A collective."""


_opened = Counter[str]()
"""How many Trainers of this process have saved in each folder. After a restart, each gets its own copies again."""


class Copies:
    """The copies of a run's state. Methods are collectives unless documented otherwise."""

    def __init__(self, world: World, root: Path, target: Target, run: str, seconds: float) -> None:
        """`root`: the launcher's folder. `run`: a text that no other Trainer has. `seconds`: the least between copies.

        `target`: where the newest copy is saved if the job ends badly. Not a collective. Raises `CheckpointError`.
        """
        name = blake2b(os.fsencode(target.folder), digest_size=8).hexdigest()
        folder = root / f"{name}-{_opened[target.folder]}"
        _opened[target.folder] += 1
        ranks = [world.rank - world.local_rank + local_rank for local_rank in range(world.local_world_size)]
        saver = Saver(
            folder, keep_last=_COPIES - 1, makes_room=True, writer=world.local_rank, writers=world.local_world_size
        )
        self.series = Series(world, folder, ranks, run, saver)
        if self.series.is_first:
            try:
                target.note(folder)
            except OSError as error:  # for example, no space
                raise cannot_write(error, folder) from None
        self._folder = folder
        self._world = world
        self._seconds = seconds
        self._pace = Pace()
        cores = min(len(os.sched_getaffinity(0)), cpu_quota() or math.inf)
        is_on_cpu = world.device.type == "cpu"
        self._needs_training_cores = is_on_cpu and torch.get_num_threads() * world.local_world_size >= cores
        self._due_at = time.monotonic() + seconds
        self._began: float | None = None  # when the copy in progress was begun; None if there is none
        self._failures = 0  # in a row
        self._problem: CheckpointError | None = None  # why this rank can make no copies
        self._works = True  # equal on all ranks

    def is_due(self, now: float) -> bool:
        """Whether to request a copy. Not a collective; any thread may call it. `now`: by `time.monotonic`."""
        return self._works and self._began is None and now >= self._due_at

    def reserve(self, size: int, *, shards: bool) -> None:
        """Allocate memory for the copies, if there is enough; else, warn and make none.

        `size`: the bytes of this rank's state. `shards`: whether each rank has other values.
        """
        all_ranks = size * self._world.local_world_size if shards else size
        if self.series.is_first:
            self._problem = _too_little(self._folder, all_ranks)
        if self._goes_on():
            try:
                self.series.saver.reserve(all_ranks)
            except CheckpointError as error:
                self._note_failure(error)

    def save(self, step: int, begin: BeginSave, replicated: Replicated, *, skip: bool) -> None:
        """Make a copy. Errors are logged as warnings. `replicated`: as for `Saver.save`.

        `skip`: whether to make none this time; if true on any rank, no rank makes one.
        """
        self._note_end(wait=True)
        self._due_at = time.monotonic() + self._seconds
        if not self._goes_on(skip=skip):
            return
        if self._world.device.type != "cpu":
            torch.accelerator.synchronize(self._world.device)  # work in the queue is not a delay by the copy
        self._began = began = time.monotonic()
        try:
            token, state = begin(self.series)
            self.series.saver.save(step, state(), token=token, replicated=replicated)
        except CheckpointError as error:
            self._note_failure(error)
        self._pace.held(time.monotonic() - began)

    def after_step(self) -> None:
        """Note the end of a step. Not a collective."""
        self._note_end(wait=False)

    def note_save(self) -> None:
        """Note that the state is being saved on disk, which counts as a copy. Not a collective."""
        self._due_at = max(self._due_at, time.monotonic() + self._seconds)

    def release(self) -> None:
        """Wait for the copy in progress, and release the writer process and its memory. Not a collective."""
        self._note_end(wait=True)
        self.series.saver.release()

    def remove(self) -> None:
        """Remove all copies, because a restart must not resume from them. Not a collective."""
        self._note_end(wait=True)
        if self.series.is_first:
            with suppress(OSError, CheckpointError):
                copies = [found.path for found in checkpoints(self._folder)]
                for path in (*copies, *leftovers(self._folder)):
                    shutil.rmtree(path, ignore_errors=True)

    def common_steps(self) -> CommonSteps:
        """The steps of the copies."""
        return self.series.common_steps(self.series.listed(0.0))

    def _goes_on(self, *, skip: bool = False) -> bool:
        """Whether all ranks can make a copy now. If one can make none at all, it logs why, and all stop."""
        failed, skipped = largest(self._world, [self._problem is not None, skip]) if self._works else (0, 0)
        if failed:
            self._works = False
            try:
                with raised_on_all_ranks(self._world):
                    if self._problem is not None:
                        raise self._problem
            except CheckpointError as error:
                _warn_of(error)
        return self._works and not skipped

    def _note_end(self, *, wait: bool) -> None:
        """If the copy in progress has ended, choose when the next one is due. `wait`: whether to wait for its end."""
        if self._began is None:
            return
        try:
            if not self.series.saver.finished(wait=wait):
                return
        except CheckpointError as error:
            self._note_failure(error)
            return
        self._failures = 0
        if self._needs_training_cores:
            self._pace.written(self.series.saver.writer_seconds)
        self._due_at = self._began + max(self._seconds, self._pace.delay() / _LONGEST_SHARE)
        self._began = None

    def _note_failure(self, error: CheckpointError) -> None:
        error = error.with_traceback(None)  # traceback frames keep tensors alive
        self._began = None
        self._failures += 1
        self._due_at = time.monotonic() + min(self._seconds * 2**self._failures, max(self._seconds, _LONGEST_WAIT))
        if not error.transient:
            self._problem = error
        elif self._failures == 1:
            logger.warning("no copy of the state in memory could be made: {}; this is tried again", error.message)


def open_copies(world: World, seconds: float | None, target: Target, run: str, *, shards: bool) -> Copies | None:
    """The copies of a run that the launcher has started; None if there can be none. A collective.

    `seconds`: the setting `checkpoint.memory_seconds`. `target`, `run`: as for `Copies`. `shards`: whether ranks have
    different values.
    """
    if seconds is None or (shards and world.local_world_size < world.world_size):
        return None
    launched = shutdown_timeout() is not None and sys.platform == "linux"
    if largest(world, [not launched]) == [1]:
        return None
    root = memory_folder()
    try:
        with raised_on_all_ranks(world):
            if root is None:
                raise CheckpointError(
                    f"the launcher cannot write to {SHARED_MEMORY}", _MORE_SHARED_MEMORY.format("SIZE")
                )
            copies = Copies(world, root, target, run, seconds)
    except CheckpointError as error:
        _warn_of(error)
        return None
    return copies


_MORE_SHARED_MEMORY = (
    "give it more shared memory (in a container: `docker run --shm-size={}`), or set checkpoint.memory_seconds=None"
)


def _warn_of(error: CheckpointError) -> None:
    """Warn that no copies are made from here on, on the rank where the error was raised."""
    if not error.reported_elsewhere:
        hint = error.hint or ""
        logger.warning(
            "no copies of the state are kept in memory, so a failure repeats all steps since the last checkpoint: {}{}",
            error.message,
            hint and f"; {hint}",
        )


def _too_little(folder: Path, size: int) -> CheckpointError | None:
    """The error if there is too little memory for copies of `size` bytes. New copies replace those in `folder`."""
    held = 0
    with suppress(OSError):  # a writer of the attempt before is removing files
        held = sum(path.stat().st_size for path in folder.glob("*/*"))
    status = os.statvfs(folder)
    free = status.f_bavail * status.f_frsize + held
    total = status.f_blocks * status.f_frsize
    needed = _COPIES * size
    purpose = "twice the state"
    if total >= LEAST_SHARED_MEMORY:  # else, DataLoader workers put no batches into it
        needed += LEAST_SHARED_MEMORY
        purpose += f", and {size_text(LEAST_SHARED_MEMORY)} for DataLoader workers"
    if free < needed:
        enough = math.ceil((total - free + needed) / 0.9 / 2**20)
        return CheckpointError(
            f"{SHARED_MEMORY} has {size_text(free)} free, {size_text(needed)} are needed ({purpose})",
            _MORE_SHARED_MEMORY.format(f"{enough}m"),
        )
    available = available_memory() + held
    if available < _IN_MEMORY * size:
        return CheckpointError(
            f"{size_text(available)} of memory are available, {size_text(_IN_MEMORY * size)} are needed",
            "give the job more memory, or set checkpoint.memory_seconds=None",
        )
    return None


# --- How often --------------------------------------------------------------------------------------------------------


class Pace:
    """How much a copy delays training: the loop waits while the state is copied, and the writer may need its cores."""

    def __init__(self) -> None:
        self._held = 0.0
        self._copies = 0
        self._first = math.inf  # processor time of the writer when the counted copies began
        self._written = 0  # counted copies
        self._writer = 0.0  # processor time of the writer for a copy

    def held(self, seconds: float) -> None:
        """Note for how long the loop has waited for a copy. The first ones also allocate memory, and do not count."""
        self._copies += 1
        self._held = seconds if self._copies > _FIRST_COPIES else 0.0

    def written(self, processor_seconds: float) -> None:
        """Note that a copy was written by a writer that needs the cores of training, with its processor time so far."""
        if processor_seconds < self._first or self._copies <= _FIRST_COPIES:  # a new writer, or the first copies
            self._first = processor_seconds
            self._written = 0
            return
        self._written += 1
        self._writer = (processor_seconds - self._first) / self._written

    def delay(self) -> float:
        """Seconds by which one copy delays training."""
        return self._held + self._writer
