"""A run's checkpoints: when to write one, and which one to resume from."""

import json
import secrets
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain, takewhile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddp_kit.callbacks import Callback
from ddp_kit.checkpoint.loading import load, newer
from ddp_kit.checkpoint.lock import FolderLock
from ddp_kit.checkpoint.packing import pack
from ddp_kit.checkpoint.writing import set_aside, wait_for_writers
from ddp_kit.config import absolute
from ddp_kit.env import attempt
from ddp_kit.errors import CheckpointError
from ddp_kit.log import logger
from ddp_kit.manifest import checkpoints, name_of
from ddp_kit.pieces import Piece
from ddp_kit.trainer.exchange import every_text, gathered
from ddp_kit.trainer.fitting import fitting, of_another_run
from ddp_kit.trainer.folder_use import FolderUse
from ddp_kit.trainer.log_points import LogPoints
from ddp_kit.trainer.parts import Parts
from ddp_kit.trainer.position import Position
from ddp_kit.trainer.retrying_saver import RetryingSaver, finishes_copy
from ddp_kit.trainer.run_state import RunState
from ddp_kit.trainer.saved_parts import (
    VERSIONS,
    BestPart,
    CallbacksPart,
    ConfigPart,
    ModelPart,
    OptimizerPart,
    PrecisionPart,
    ProgressPart,
    RandomPart,
    SavedPart,
    SchedulerPart,
    StrategyPart,
    StreamPart,
    as_parts,
)
from ddp_kit.trainer.step import OptimizerStep

_COMPARED = 32  # newest checkpoints in which nodes with separate folders look for one that all of them have

_WRITER_SECONDS = 30.0  # to wait for a save of the previous run: its writer process outlives it
_CONFIG = "trainer-config.yaml"  # of a name that is hardly a file of the user's own
_MARK = ".mark-"  # a file that shows whether two nodes see the same folder

Lineage = dict[str, str | None]
"""Identifies the run that a series of checkpoints belongs to: see `_lineage`."""


class LineagePart(SavedPart):
    """The job that started the run, and the checkpoint that it started from."""

    name = "lineage"
    required = False

    def __init__(self) -> None:
        self.lineage: Lineage = {}

    def state_dict(self, ranks: Sequence[Any]) -> Any:  # noqa: ARG002
        return self.lineage

    def load_state_dict(self, state: Any, path: Path) -> None:  # noqa: ARG002
        self.lineage = dict(state or {})


class Checkpoints:
    """Saves and resumes a run, as `config.checkpoint` says. Methods are collectives unless they say otherwise."""

    def __init__(
        self,
        parts: Parts,
        position: Position,
        optimizer_step: OptimizerStep,
        callbacks: Sequence[Callback],
        log_points: LogPoints,
        run_state: RunState,
    ) -> None:
        self._parts = parts
        self._position = position
        self._log_points = log_points
        self._run_state = run_state
        self._config = parts.config.checkpoint
        self._folder = None if self._config.dir is None else absolute(self._config.dir)
        self._saver: RetryingSaver | None = None
        self._saved_step = -1
        self._lineage = LineagePart()
        self._random = RandomPart(parts, position)
        self._best = BestPart(self._config, position)
        self._saved: list[SavedPart] = [
            CallbacksPart(parts, callbacks),  # first: where a callback refuses its state, nothing else is loaded
            ModelPart(parts),
            OptimizerPart(parts),
            SchedulerPart(parts.scheduler),
            PrecisionPart(parts, optimizer_step),
            ProgressPart(position),
            StreamPart(parts, position),
            self._random,
            self._best,
            self._lineage,
            ConfigPart(parts.config),
            StrategyPart(parts.strategy, position),
        ]
        self._kept: int | None = None  # the next save sets checkpoints of later steps aside; None: none
        self.saved_at = time.monotonic()
        """When the latest save started; before the first one, when this run started."""
        self.wanted = False
        """Whether to save once the step is done: the state is inconsistent until then."""
        self._reserved = self._storable = False
        self._writers: list[int] = []  # the ranks that write each checkpoint with this one, itself included
        lock: FolderLock | None = None
        if self._folder is not None:
            self._writers = self._together(self._folder)
            if parts.strategy.shards and len(self._writers) < parts.world.world_size:
                raise CheckpointError(
                    f"checkpoint.dir = {str(self._folder)!r} is not the same folder on all nodes, but each rank writes "
                    "its own shards of a checkpoint",
                    "use a folder on a file system that all nodes share",
                )
            writer = self._writers.index(parts.world.rank)
            self._saver = RetryingSaver(
                self._folder,
                keep_last=self._config.keep_last,
                background=self._config.background,
                writer=writer,
                writers=len(self._writers),
            )
            lock = FolderLock(self._folder, attempt()[0]) if writer == 0 else None
            if self._config.overlap:
                parts.optimizer.register_step_pre_hook(finishes_copy(self._saver))
        self._use = FolderUse(parts.world, self._folder, lock)

    # --- saving -------------------------------------------------------------------------------------------------

    def after_step(self) -> None:
        """Save if due or requested. Raises the error of an earlier background save."""
        if self.is_due:
            self.save()
        elif self._saver is not None:
            if not self._reserved:
                self._reserved = True  # after the first step, when the optimizer has its state
                self._saver.reserve(_size(self._parts))
            self._saver.check()
        if not self._storable and self._folder is not None:
            self._storable = True  # check after the first step that the state can be saved, not hours later
            pack(self._state(self._saved, [[part.rank_state() for part in self._saved]]))

    @property
    def is_saved(self) -> bool:
        """Whether this step is saved."""
        return self._saved_step == self._position.step

    @property
    def is_due(self) -> bool:
        """Whether this step is to be saved once it is done."""
        every = self._config.every_steps
        return self.wanted or (every is not None and self._position.step % every == 0)

    def save_once(self) -> None:
        """Save unless this step is saved already."""
        if not self.is_saved:
            self.save()

    def save_again(self) -> None:
        """Save this step even if it is saved already: its evaluation came after that save."""
        if self._folder is not None:
            self.save()

    def finish(self) -> None:
        """Save the final state, wait until it is on disk, and release the writer."""
        self.save_wanted()
        if self._folder is not None:
            self.save_once()
        self.settle()

    def settle(self) -> None:
        """Wait until pending saves are on disk, and release the writer. Not a collective."""
        if self._saver is not None:
            self._saver.settle()
            self._saver.release()
            self._reserved = False

    def end(self) -> None:
        """Save the final state and unlock the folder, although the loop has not been left; no step follows."""
        self.finish()
        self._use.end()

    def after_evaluation(self, metrics: dict[str, float]) -> None:
        """Save if this evaluation is the best so far; all ranks have the same metrics."""
        if self._best.improved(metrics):
            self.wanted = self.wanted or self._folder is not None
        self.save_wanted()

    def save_wanted(self) -> None:
        """Save if requested, unless a loop, callback or evaluation is running."""
        if self.wanted and self._run_state.may_save:
            self.save()

    def save_or_postpone(self) -> None:
        """Save now; in a callback or an evaluation, once the step is done."""
        if self._run_state.half_done and self._folder is not None:
            self.wanted = True
        else:
            self.save()

    @contextmanager
    def in_loop(self) -> Iterator[None]:
        """The context in which steps are done; `after_step` follows each."""
        with self._use.exclusive(), self._run_state.in_loop():
            self._write_config()
            yield

    def _write_config(self) -> None:
        """Write the configuration next to the checkpoints, for people; a resume does not read it."""
        if self._folder is None or self._writers[0] != self._parts.world.rank:
            return
        try:
            self._parts.config.save(self._folder / _CONFIG)
        except OSError as error:
            logger.warning("the configuration could not be written to {}: {}", self._folder / _CONFIG, error)

    def save(self) -> None:
        """Write a checkpoint of this step. Raises `CheckpointError`; transient errors are logged as warnings."""
        if self._folder is None:
            raise CheckpointError("checkpoint.dir is not set", 'set checkpoint={"dir": "run"} in the TrainerConfig')
        with self._use.exclusive():
            self._save(self._folder)

    def _save(self, folder: Path) -> None:
        self.saved_at, self.wanted = time.monotonic(), False
        step = self._position.step
        self._log_points.refuse_non_finite()
        weights = [each for each in self._parts.strategy.local_parameters() if each.is_floating_point()]
        self._log_points.refuse_weights(step, weights)
        self.restore_random()
        assert self._saver is not None, "there is a folder"
        self._saver.check(wait=True)  # on all ranks, before any of them starts the next save
        own = [secrets.token_hex(4), *(part.rank_state() for part in self._saved)]
        everyone = [json.loads(text) for text in every_text(json.dumps(own).encode(), self._parts.world)]
        first = self._writers[0]
        parts = [part for part in self._saved if part.replicated]
        if first == self._parts.world.rank:
            self._use.note_save()
            self._set_aside(folder)
            parts = self._saved
        self._saver.save(
            step,
            self._state(parts, [states for _, *states in everyone]),
            best=self._best.is_best,
            token=everyone[first][0],
            replicated=self._is_replicated,
            overlap=self._config.overlap,
        )
        self._saved_step, self._kept = step, None

    def _is_replicated(self, name: str, tensor: str) -> bool:
        part = next((part for part in self._saved if part.name == name), None)
        return part is not None and part.replicated and part.is_replicated(tensor)

    def _set_aside(self, folder: Path) -> None:
        """After resuming from an earlier step, move later checkpoints away: they would be taken for the newest."""
        if self._kept is None:
            return
        moved = set_aside(folder, self._kept)
        if moved is not None:
            place, steps = moved
            logger.warning(
                "this run continues after step {}: the checkpoints of steps {} are of another branch and were moved to "
                "{}; remove that folder when you do not need them",
                max(self._kept, 0),
                ", ".join(map(str, sorted(steps))),
                place,
            )

    def _state(self, parts: Sequence[SavedPart], everyone: Sequence[Sequence[Any]]) -> dict[str, Any]:
        """The state of `parts`. `everyone`: for each rank, the `rank_state` of each part of the run."""
        state: dict[str, Any] = {VERSIONS: {part.name: part.version for part in parts}}
        for number, part in enumerate(self._saved):
            if part in parts:
                state[part.name] = part.state_dict([own[number] for own in everyone])
        return state

    def _together(self, folder: Path) -> list[int]:
        """The ranks that see the same folder as this one: those that see rank 0's folder, else those of this node."""
        world = self._parts.world
        names = every_text(uuid.uuid4().hex.encode() if world.rank == 0 else b"", world)
        mark = folder / f"{_MARK}{names[0].decode()}"
        if world.rank == 0:
            for old in folder.glob(f"{_MARK}*"):  # left behind by a run that was killed here
                old.unlink(missing_ok=True)
            _make_mark(mark)
        gathered(world, [0])  # a barrier: the mark exists
        first = 0 if mark.exists() else world.rank - world.local_rank
        firsts = [row[0] for row in gathered(world, [first])]  # also a barrier: all ranks have looked
        if world.rank == 0:
            mark.unlink(missing_ok=True)
        return [rank for rank, other in enumerate(firsts) if other == first]

    # --- resuming -----------------------------------------------------------------------------------------------

    def resume(self) -> None:
        """Resume from the checkpoint that the configuration names, if any."""
        with self._use.exclusive(resuming=True):
            self._resume()

    def _resume(self) -> None:
        wanted, folder = self._config.resume, self._folder
        if folder is not None and wanted == "auto" and self._load_newest(folder):
            return
        path = None if wanted in (None, "auto") else absolute(str(wanted))
        job, restarts = attempt()
        lineage = _lineage(path, job)
        # After a worker restart, resume from this job's own newest checkpoint instead of repeating its steps.
        if folder is not None and wanted != "auto" and restarts and self._load_newest(folder, lineage):
            return
        if path is not None:
            self.load(path)
        else:
            self._begin_lineage(lineage, kept=-1)

    def load(self, path: Path) -> None:
        """Resume from this checkpoint. Raises `CheckpointError` if it is damaged or from a different run."""
        with self._use.exclusive(resuming=True):
            self._load(path)

    def _load(self, path: Path) -> None:
        self._take_up(path, load(path, device=self._device_of, wanted=self._piece_of))
        folder = self._folder
        inside = folder is not None and path.resolve().parent == folder.resolve()
        self._begin_lineage(_lineage(path, attempt()[0]), kept=self._position.step if inside else -1)

    def _piece_of(self, part: str, tensor: str) -> Piece | None:
        return next((each.piece_of(tensor) for each in self._saved if each.name == part), None)

    def _device_of(self, part: str, tensor: str) -> torch.device:
        """The device to load a tensor to; a model may be on several devices."""
        found = next((each.device_of(tensor) for each in self._saved if each.name == part), None)
        return self._parts.world.device if found is None else found

    def _begin_lineage(self, lineage: Lineage, kept: int) -> None:
        """Start a lineage; the next save first sets checkpoints of later steps than `kept` aside."""
        self._lineage.lineage, self._kept = lineage, kept

    def _take_up(self, path: Path, state: dict[str, Any]) -> None:
        """Load all parts, after checking that each of them fits. A collective: the strategy's part reduces once."""
        if self._saver is not None:
            self._saver.finish_copy()
        with fitting(path):
            saved = as_parts(path, state, self._saved)
            for part in self._saved:
                if part.name in saved and (problem := part.check(saved[part.name])) is not None:
                    raise of_another_run(path, problem)
        for part in self._saved:
            if part.name in saved:
                with nullcontext() if part.shows_own_errors else fitting(path):
                    part.load_state_dict(saved[part.name], path)
        self._saved_step = self._position.step
        logger.info("resumed from {} after step {}", path, self._position.step)

    def restore_random(self) -> bool:
        """Restore a checkpoint's random states; False if this run did not resume from any step."""
        return self._random.restore()

    def _load_newest(self, folder: Path, lineage: Lineage | None = None) -> bool:
        """Resume from the newest checkpoint that is complete on every node; if `lineage` is given, it must match."""
        if folder.is_dir():
            wait_for_writers(folder, _WRITER_SECONDS)
        there = checkpoints(folder) if folder.is_dir() else ()
        for found in takewhile(lambda found: not found.whole, there):
            if found.newer:
                raise newer(found)
            logger.warning("checkpoint skipped: {}", found)
        for step in self._common(folder, [found.step for found in there if found.whole][:_COMPARED]):
            path = folder / name_of(step)
            state = self._read(path)
            if state is not None:
                if lineage is not None and state.get("lineage", state.get("course")) != lineage:
                    return False
                self._take_up(path, state)
                return True
        return False

    def _common(self, folder: Path, own: list[int]) -> list[int]:
        """The steps whose checkpoint every rank sees, newest first. Raises `CheckpointError` if ranks share none."""
        table = gathered(self._parts.world, own + [-1] * (_COMPARED - len(own)))
        common = set.intersection(*({step for step in row if step >= 0} for row in table))
        if not common and any(step >= 0 for row in table for step in row):
            seen = "; ".join(
                f"rank {rank} sees {', '.join(str(step) for step in row if step >= 0) or 'none'}"
                for rank, row in enumerate(table)
            )
            raise CheckpointError(
                f"no checkpoint in {folder} is complete on every node: {seen}",
                "set checkpoint.dir to a folder that all nodes share, or checkpoint.resume=None to start from step 0",
            )
        return sorted(common, reverse=True)

    def _read(self, path: Path) -> dict[str, Any] | None:
        """Its state; None, with a warning, if it is damaged on any rank. A collective."""
        state, problem = None, ""
        try:
            state = load(path, device=self._device_of, wanted=self._piece_of)
        except CheckpointError as error:
            problem = error.message
        problems = every_text(problem.encode(), self._parts.world)
        bad = [rank for rank, text in enumerate(problems) if text]
        if bad:
            logger.warning(
                "checkpoint skipped because of rank {}: {}", ", ".join(map(str, bad)), problems[bad[0]].decode()
            )
        return None if bad else state


def _lineage(path: Path | None, job: str) -> Lineage:
    """The lineage of a run that `job` started from the checkpoint `path`; None: from scratch."""
    return {"from": None if path is None else str(path.resolve()), "job": job}


def _size(parts: Parts) -> int:
    """Bytes of weights and optimizer state, which make most of a checkpoint."""
    states = chain(*(state.values() for state in parts.optimizer.state.values() if isinstance(state, dict)))
    held = [each for each in states if isinstance(each, Tensor) and each.layout is torch.strided]
    weights = zip(parts.model.parameters(), parts.strategy.local_parameters(), strict=True)
    everything = not parts.config.checkpoint.trainable_only
    stored = [local for each, local in weights if each.requires_grad or everything]
    return sum(each.nbytes for each in (*stored, *held))


def _make_mark(mark: Path) -> None:
    try:
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
    except OSError as error:
        raise CheckpointError(
            f"checkpoint.dir = {str(mark.parent)!r} cannot be written to: {error.strerror or error}",
            "choose a folder that this process may write to",
        ) from None
