"""Checkpoints of a run: when to save, and which checkpoint to resume from."""

import time
import uuid
import weakref
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Protocol

import torch
from torch.optim import Optimizer

from ddp_kit.checkpoint.copies import Copies, open_copies
from ddp_kit.checkpoint.ending import Target
from ddp_kit.checkpoint.lock import FolderUse, RunLock, raised_on_all_ranks
from ddp_kit.checkpoint.model_state import size_of
from ddp_kit.checkpoint.nodes import as_on_rank_0
from ddp_kit.checkpoint.packing import Packed, pack
from ddp_kit.checkpoint.places import reading
from ddp_kit.checkpoint.reader import load, load_once
from ddp_kit.checkpoint.saver import Saver
from ddp_kit.checkpoint.series import Series, ranks_with_same_folder
from ddp_kit.checkpoint.state import (
    VERSIONS,
    BestPart,
    Progress,
    RandomPart,
    SavedPart,
    as_parts,
    exchanged,
    explained_load_errors,
    mismatch_error,
)
from ddp_kit.config.settings import TrainerConfig, absolute_location, as_yaml
from ddp_kit.distributed.world import World, broadcast_bytes, gathered_bytes, largest
from ddp_kit.env import is_restarted, job_id
from ddp_kit.errors import CheckpointError, FaultyRankError
from ddp_kit.heartbeat import highest_earlier_step
from ddp_kit.log import logger
from ddp_kit.parallel import Strategy
from ddp_kit.state_values import Piece
from ddp_kit.storage.urls import Location, check_client
from ddp_kit.texts import plural


def copy_waiter(saver: Saver) -> Callable[..., None]:
    """Return an optimizer step pre-hook that waits until `saver` has copied the state, because the step changes it."""
    reference = weakref.ref(saver)  # the hook must not keep a deleted Trainer's memory alive

    def before_optimizer_step(*_: Any) -> None:
        saver = reference()
        if saver is not None:
            saver.wait_for_copy()

    return before_optimizer_step


# --- Saving and resuming ----------------------------------------------------------------------------------------------


_WRITER_SECONDS = 30.0  # how long to wait for a save of the previous run, whose writer process may outlive it
_CONFIG = "trainer-config.yaml"

Lineage = dict[str, str | None]
"""A description of the run that a series of checkpoints belongs to; see `_lineage`."""


class LineagePart(SavedPart):
    """The run's lineage: the job that started the run, and the checkpoint that the run started from."""

    name = "lineage"
    required = False

    def __init__(self) -> None:
        self.lineage: Lineage = {}

    def state_dict(self, ranks: Sequence[Any]) -> Any:  # noqa: ARG002
        return self.lineage

    def load_state_dict(self, state: Any, path: Location) -> None:  # noqa: ARG002
        self.lineage = dict(state or {})


class LoopState(Protocol):
    """The part of a Trainer's state that determines whether a checkpoint can be saved now."""

    @property
    def may_save(self) -> bool:
        """Whether a requested save can be done now. In a loop, a callback or an evaluation, the save is postponed."""

    @property
    def is_in_callback(self) -> bool:
        """Whether callbacks or an evaluation are running; a checkpoint would contain only some of their changes."""


class Checkpoints:
    """Saves and resumes a run, as `config.checkpoint` says. Methods are collectives unless documented otherwise."""

    def __init__(
        self,
        world: World,
        config: TrainerConfig,
        strategy: Strategy,
        optimizer: Optimizer,
        saved_parts: Sequence[SavedPart],
        random: RandomPart,
        best: BestPart,
        progress: Progress,
        loop_state: LoopState,
        check_state: Callable[[int], None],
    ) -> None:
        """`saved_parts`: all parts of the run's state, in the order in which they are loaded.

        `random`, `best`: two of these parts, which are also used between saves. `check_state`: a function that raises
        an error if the state after the given step must not be saved; a collective.
        """
        self._world = world
        self._trainer_config = config
        self._strategy = strategy
        self._optimizer = optimizer
        self._progress = progress
        self._loop_state = loop_state
        self._check_state = check_state
        self._config = config.checkpoint
        self._disk: Series | None = None  # the checkpoints in `config.checkpoint.dir`
        self.copies: Copies | None = None
        """The copies of the state in memory."""
        self._saved_step = -1
        self.continues = False
        """Whether the run has resumed from the newest checkpoint in its folder, and so continues the run in it."""
        self.step_on_disk: int | None = None
        """The step of the newest checkpoint on disk, if the run has resumed from a copy in memory."""
        self._lineage = LineagePart()
        self._random = random
        self._best = best
        self._parts = {part.name: part for part in (*saved_parts, self._lineage)}
        # The next save moves checkpoints of later steps away; None: it moves none.
        self._set_aside_after: int | None = None
        self.saved_at = time.monotonic()
        """When the last save started, by `time.monotonic`; before the first save, when this run started."""
        self.save_seconds: float | None = None
        """Seconds that the last completed save took until it was on disk, accurate to one step; None before that."""
        self._save_began: float | None = None  # when the save in progress was started; None if there is none
        self._save_pending = False  # whether a save was started since all ranks last waited for one; equal on all ranks
        self.save_requested = False
        """Whether a save is requested for the end of this step, because the state is inconsistent until then."""
        self._memory_reserved = self._checked_storable = False  # whether memory was reserved, and the state was checked
        lock: RunLock | None = None
        folder = None if self._config.dir is None else absolute_location(self._config.dir)
        if isinstance(folder, str):
            check_client()
        if folder is not None:
            run = broadcast_bytes(uuid.uuid4().hex.encode(), world).decode()
            holder = f"{job_id()}/{run}"
            writers = ranks_with_same_folder(folder, run, world)
            if strategy.shards and len(writers) < world.world_size:
                raise CheckpointError(
                    f"checkpoint.dir = {str(folder)!r} is not the same folder on all nodes, but each rank writes its "
                    "own shards of a checkpoint",
                    "use a folder on a file system that all nodes share",
                )
            saver = Saver(
                folder,
                keep_last=self._config.keep_last,
                background=self._config.save != "blocking",
                writer=writers.index(world.rank),
                writers=len(writers),
                holder=holder,
            )
            self._disk = Series(world, folder, writers, run, saver)
            target = Target(
                str(folder),
                self._config.keep_last,
                auto=self._config.resume == "auto",
                alone=not self._disk.is_shared or world.world_size == world.local_world_size,
            )
            self.copies = open_copies(world, self._config.memory_seconds, target, run, shards=strategy.shards)
            lock = self._disk.place.lock(holder) if self._disk.is_first else None
            if self._config.save == "overlapped":
                optimizer.register_step_pre_hook(copy_waiter(saver))
        self._folder_use = FolderUse(world, lock, used=folder is not None)

    # --- Saving: a method for each occasion ---------------------------------------------------------------------------

    @property
    def is_saved(self) -> bool:
        """Whether this step has been saved."""
        return self._saved_step == self._progress.step

    @property
    def is_due(self) -> bool:
        """Whether to save at the end of this step, because of `every_steps` or a request."""
        every = self._config.every_steps
        return self.save_requested or (every is not None and self._progress.step % every == 0)

    @property
    def newest(self) -> Location | None:
        """The last checkpoint in the run's folder that this run has saved or loaded; None if it is not on disk."""
        if self._disk is None or self._saved_step < 0:
            return None
        found = self._disk.place.location(self._saved_step)
        return found if isinstance(found, str) or found.is_dir() else None

    @property
    def best(self) -> tuple[str, float] | None:
        """The name in `checkpoint.best_metric` and the best value of that metric so far; None without a value."""
        return self._best.value

    def after_step(self) -> None:
        """Save if a save is due after this step. Raises the error of an earlier background save that failed."""
        if self.is_due:
            self._save()
        elif self._disk is not None:
            if not self._memory_reserved:
                self._memory_reserved = True  # only after the first step, which allocates the optimizer state
                size = size_of(self._strategy, self._optimizer, trainable_only=self._config.trainable_only)
                self._disk.saver.reserve(size)
                if self.copies is not None:
                    self.copies.reserve(size, shards=self._strategy.shards)
            self._note_save_end(self._disk.saver.check())
        if self.copies is not None:
            self.copies.after_step()
        if not self._checked_storable and self._disk is not None:
            self._checked_storable = True  # check now that the state can be stored, not at the first save hours later
            own = self._rank_states()
            self._state(self._parts.values(), {name: [state] for name, state in own.items()})

    def copy(self, *, skip: bool) -> None:
        """Copy the state to memory, unless this step is saved on disk, or any rank says `skip`."""
        if self.copies is not None and not self.is_saved:
            self.copies.save(self._progress.step, self._begin_copy, self._is_replicated, skip=skip)

    def _begin_copy(self, series: Series) -> tuple[str, Callable[[], Packed]]:
        self._check_state(self._progress.step)
        self.restore_random()
        return self._begin_save(series)

    def after_interval(self) -> None:
        """Save because `every_seconds` have passed, unless this step has been saved."""
        if not self.is_saved:
            self._save()

    def after_evaluation(self, metrics: dict[str, float]) -> None:
        """Save after the best evaluation so far; in a loop, at the end of the step. `metrics`: equal on all ranks."""
        if self._best.improved(metrics) and self._disk is not None:
            self.save_requested = True
        if self._may_do_request:
            self._save()

    def after_repeated_evaluation(self) -> None:
        """Save this step again: its checkpoint was written when a stop had interrupted the evaluation."""
        if self._disk is not None:
            self._save()

    def on_request(self) -> None:
        """Save because the user calls `trainer.save()`: now, or in a callback or evaluation, at the end of the step."""
        if self._loop_state.is_in_callback and self._disk is not None:
            self.save_requested = True
        else:
            self._save()

    def at_end(self) -> None:
        """Save the final state, wait until it is on disk on all ranks, and release the writer process and its memory.

        Further steps and saves may follow. If the save failed on any rank, raises `CheckpointError` on all ranks.
        """
        if self._disk is not None and (self._may_do_request or not self.is_saved):
            self._save(wait=True)
        elif self._save_pending and self._disk is not None:
            with raised_on_all_ranks(self._world):
                self._disk.saver.wait()
            self._save_pending = False
        self.wait_for_saves()
        if self.copies is not None:
            self.copies.remove()  # the final state is on disk

    def at_stop(self) -> None:
        """Save the final state as `at_end` does, and unlock the folder. No step may follow, even inside a loop."""
        self.at_end()
        self._folder_use.unlock()

    def wait_for_copy(self) -> None:
        """Wait until the state of the last save is copied, because it is about to change outside of a step."""
        if self._disk is not None:
            self._disk.saver.wait_for_copy()

    def wait_for_saves(self) -> None:
        """Wait until this rank's saves are on disk, and release the writer process and its memory. Not a collective."""
        if self._disk is not None:
            self._disk.saver.wait()
            self._disk.saver.release()
            if self.copies is not None:
                self.copies.release()
            self._memory_reserved = False

    @contextmanager
    def in_loop(self) -> Iterator[None]:
        """Context manager for a loop of steps: locks the folder. The loop must call `after_step` after each step."""
        with self._folder_use.exclusive():
            if self._disk is not None and self._disk.is_first:
                try:  # for information only: it is not read on resume
                    self._disk.place.write(_CONFIG, as_yaml(self._trainer_config))
                except (OSError, CheckpointError) as error:
                    logger.warning("the configuration could not be written to {}: {}", self._disk.folder, error)
            try:
                yield
            except FaultyRankError:
                if self.copies is not None:
                    self.copies.remove()  # they may already have its wrong numbers
                raise

    @property
    def _may_do_request(self) -> bool:
        """Whether a save is requested, and no loop, callback or evaluation is running."""
        return self.save_requested and self._loop_state.may_save

    def _save(self, *, wait: bool = False) -> None:
        """Write a checkpoint of this step. Raises `CheckpointError`; in a loop, a transient one is logged as a warning.

        In a loop, the checkpoint is written in the background, unless `wait` is set. Outside of one, this waits until
        it is on disk on all ranks, because the script may end or read it next; all ranks raise the error of any rank.
        """
        disk = self._disk
        if disk is None:
            raise CheckpointError("checkpoint.dir is not set", 'set checkpoint={"dir": "run"} in the TrainerConfig')
        wait = wait or self._loop_state.may_save
        step = self._progress.step
        with self._folder_use.exclusive():
            self.saved_at = time.monotonic()
            self.save_requested = False
            self._check_state(step)
            self.restore_random()
            self._note_save_end(disk.saver.check(wait=True))  # on all ranks, before any rank starts the next save
            began = time.monotonic()
            token, state = self._begin_save(disk)
            self._save_pending = True
            with raised_on_all_ranks(self._world) if wait else nullcontext():
                if disk.is_first:
                    self._folder_use.note_save()
                    self._set_aside(disk)
                disk.saver.save(
                    step,
                    state(),
                    best=self._best.is_best,
                    token=token,
                    replicated=self._is_replicated,
                    overlap=self._config.save == "overlapped",
                )
                self._saved_step = step
                self._set_aside_after = None
                self._save_began = began
                if self.copies is not None:
                    self.copies.note_save()
                if wait:
                    disk.saver.wait()
            self._save_pending = not wait

    def _begin_save(self, series: Series) -> tuple[str, Callable[[], Packed]]:
        """Begin a checkpoint on all ranks. Returns the arguments of `Saver.save`: the token, and this rank's state.

        The state is returned as a function, whose errors are those of the save.
        """
        token = series.begin(self._progress.step)
        # Also a barrier: after it, the first writer's folder for the unfinished checkpoint exists.
        # With separate folders, each gets a whole checkpoint.
        rank_states = exchanged(self._rank_states(), self._parts, self._world, series.first_rank)
        parts = [part for part in self._parts.values() if series.is_first or part.packed_by_all_ranks]
        state = partial(self._state, parts, rank_states)
        if series.is_shared:
            return token, state
        packed = as_on_rank_0(state, self._is_replicated, self._world, first=series.is_first)
        return token, lambda: packed

    def _rank_states(self) -> dict[str, Any]:
        """The `rank_state` of every part on this rank, by the part's name."""
        return {name: part.rank_state() for name, part in self._parts.items()}

    def _note_save_end(self, ended: bool) -> None:
        """Measure the duration of the last save, if it has just ended."""
        if self._save_began is not None and ended:
            self.save_seconds = time.monotonic() - self._save_began
            self._save_began = None

    def _is_replicated(self, name: str, tensor: str) -> bool:
        part = self._parts[name]
        return part.packed_by_all_ranks and part.is_replicated(tensor)

    def _set_aside(self, disk: Series) -> None:
        """After a resume from an earlier step, move later checkpoints away, so that no restart resumes from them."""
        if self._set_aside_after is None:
            return
        moved = disk.place.set_aside(self._set_aside_after)
        if moved is not None:
            place, steps = moved
            logger.warning(
                "this run continues after step {}: the checkpoints of steps {} belong to another branch and were moved "
                "to {}; remove that folder if you no longer need them",
                max(self._set_aside_after, 0),
                ", ".join(map(str, sorted(steps))),
                place,
            )

    def _state(self, parts: Collection[SavedPart], rank_states: Mapping[str, Sequence[Any]]) -> Packed:
        """The state of `parts`, to be saved. `rank_states`: the argument of each part's `state_dict`, by its name."""
        state: dict[str, Any] = {VERSIONS: {part.name: part.version for part in parts}}
        # Replicated parts first: a tensor that several parts hold is stored with the first one, and every rank that
        # saves has the model, but not the callbacks.
        for part in sorted(parts, key=lambda part: not part.packed_by_all_ranks):
            state[part.name] = part.state_dict(rank_states[part.name])
        return pack(state)

    # --- Resuming -----------------------------------------------------------------------------------------------------

    def resume(self) -> None:
        """Resume from the checkpoint that `checkpoint.resume` selects, if any."""
        with self._folder_use.exclusive(resuming=True):
            wanted = self._config.resume
            path = None if wanted in (None, "auto") else absolute_location(str(wanted))
            # After a restart of the workers, resume from this job's newest checkpoint instead of repeating its steps.
            lineage = None if wanted == "auto" else _lineage(path)
            disk = self._disk
            if disk is not None and (wanted == "auto" or is_restarted()) and self._load_newest(disk, lineage):
                return
            if path is not None:
                self.load(path)
            else:
                self._begin_lineage(None, set_aside_after=-1)

    def load(self, path: Location) -> None:
        """Resume from this checkpoint. Raises `CheckpointError` if it is damaged or from a different run."""
        with self._folder_use.exclusive(resuming=True):
            self._load_parts(path, self._state_at(path, self._disk))
            own = None if self._disk is None else self._disk.place.location(self._progress.step)
            inside = own is not None and _resolved(path) == _resolved(own)
            self._begin_lineage(path, set_aside_after=self._progress.step if inside else -1)

    def _state_at(self, path: Location, series: Series | None, source: int | None = None) -> dict[str, Any]:
        """Read this rank's part of the state of a checkpoint. Raises `CheckpointError`. A collective.

        `series`: where the run saves its own checkpoints. `source`: as `CommonSteps.source`.

        Ranks of several nodes that need the same tensors get them from rank 0: thousands would else read the same files
        from one file system. The ranks of one node read for themselves, because the files are then in its memory.
        """
        world = self._world
        is_shared = series is not None and series.is_shared
        if source is None and is_shared and world.world_size > world.local_world_size and not self._strategy.shards:
            source = 0
        with reading(path, world) as files:
            if source is not None:
                return load_once(files, world, self._device_of, source)
            position = world.rank, world.world_size
            return load(files, device=self._device_of, wanted=self._piece_of, position=position)

    def _piece_of(self, part: str, tensor: str) -> Piece | None:
        return self._parts[part].piece_of(tensor) if part in self._parts else None

    def _device_of(self, part: str, tensor: str) -> torch.device:
        """The device to load a tensor to; needed because a model may be on several devices."""
        device = self._parts[part].device_of(tensor) if part in self._parts else None
        return device or self._world.device

    def _begin_lineage(self, path: Location | None, set_aside_after: int) -> None:
        """Start a lineage. The next save first moves away the checkpoints of steps after `set_aside_after`."""
        self._lineage.lineage = _lineage(path)
        self._set_aside_after = set_aside_after
        self.continues = False
        if self.copies is not None:
            self.copies.remove()

    def _load_parts(self, path: Location, state: dict[str, Any], *, in_memory: bool = False) -> None:
        """Load all parts, after checking that each matches this run. A collective, because some parts communicate.

        `in_memory`: whether `path` is a copy in memory; the step is then not saved on disk.
        """
        self.wait_for_copy()
        parts = [*self._parts.values()]
        with explained_load_errors(path):
            saved = as_parts(path, state, parts)
            for part in parts:
                if part.name in saved and (problem := part.check(saved[part.name])) is not None:
                    raise mismatch_error(path, problem)
        for part in parts:
            if part.name in saved:
                with nullcontext() if part.shows_own_errors else explained_load_errors(path):
                    part.load_state_dict(saved[part.name], path)
            else:
                part.load_nothing()
        step = self._progress.step
        self._saved_step = -1 if in_memory else step
        repeated = highest_earlier_step() - step if is_restarted() else 0
        cost = ""
        if repeated > 0:
            cost = f"; {plural(repeated, 'step is', 'steps are')} repeated"
        logger.info("resumed from {} after step {}{}", "the copy in memory" if in_memory else path, step, cost)

    def restore_random(self) -> bool:
        """Restore the checkpoint's random states, if any. Returns whether this run has resumed from a step."""
        return self._random.restore()

    def _load_newest(self, disk: Series, lineage: Lineage | None = None) -> bool:
        """Resume from the newest checkpoint that is complete on every node. Returns False if there is none.

        `lineage`: the lineage that the checkpoint must have; None: any lineage.
        Raises `CheckpointError` if there are complete checkpoints, but none can be loaded: the cause is then probably
        not damage, and starting from step 0 would set them all aside. Also if all checkpoints are damaged, unless this
        job began without them: starting from step 0 would silently repeat the run.
        """
        start_from_0 = "the warnings above say why; to start from step 0 instead, set checkpoint.resume=None"
        places: list[tuple[int, Series, int | None]] = []
        if self.copies is not None and is_restarted():
            copied = self.copies.common_steps()
            places = [(step, self.copies.series, copied.source) for step in copied.steps]
        saved = disk.listed(0.0 if places else _WRITER_SECONDS)
        common = disk.common_steps(saved)
        places += [(step, disk, common.source) for step in common.steps]
        if not places:
            common.check_difference(disk.folder)
            with raised_on_all_ranks(self._world):
                if saved and (lineage is None or self._folder_use.job_wrote):
                    raise CheckpointError(
                        f"none of the checkpoints in {disk.folder} can be read; the newest is {saved[0]}", start_from_0
                    )
        is_from_another = False  # whether the newest checkpoint on disk is
        for step, series, source in sorted(places, key=lambda place: -place[0]):
            path = series.place.location(step)
            state = None if series is disk and is_from_another else self._read(path, series, source)
            if state is None:
                continue
            if lineage is not None and state.get("lineage") != lineage:
                is_from_another = is_from_another or series is disk
                continue
            self.step_on_disk = None if series is disk else max(common.steps, default=0)
            self._load_parts(path, state, in_memory=series is not disk)
            self.continues = True
            return True
        if common.steps and not is_from_another:
            raise CheckpointError(
                f"none of the complete checkpoints in {disk.folder} can be loaded "
                f"(steps {', '.join(map(str, common.steps))})",
                start_from_0,
            )
        return False

    def _read(self, path: Location, series: Series, source: int | None) -> dict[str, Any] | None:
        """Read the state of a checkpoint; log a warning and return None if it is damaged on any rank. A collective.

        `source`: as for `_state_at`.
        """
        state = None
        problem = ""
        unreachable: CheckpointError | None = None
        try:
            state = self._state_at(path, series, source)
        except CheckpointError as error:
            problem = "" if error.reported_elsewhere else error.message
            unreachable = error if error.transient else None
        if largest(self._world, [len(problem)]) == [0]:
            return state
        with raised_on_all_ranks(self._world):
            if unreachable is not None:  # an older checkpoint would silently repeat steps
                raise unreachable
        problems = gathered_bytes(problem.encode(errors="backslashreplace"), self._world)
        bad = [rank for rank, text in enumerate(problems) if text]
        logger.warning(
            "checkpoint skipped because it cannot be loaded on rank {}: {}",
            ", ".join(map(str, bad)),
            problems[bad[0]].decode(),
        )
        return None


def _resolved(path: Location) -> str:
    """A text that is equal for two names of the same folder."""
    return path if isinstance(path, str) else str(path.resolve())


def _lineage(path: Location | None) -> Lineage:
    """The lineage of a run that this job starts from the checkpoint `path`, or from step 0 if `path` is None."""
    return {"from": None if path is None else _resolved(path), "job": job_id()}
