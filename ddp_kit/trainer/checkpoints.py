"""A run's checkpoints: what belongs into one, when it is written, and going on from one."""

import json
import time
import uuid
from array import array
from base64 import b64decode, b64encode
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddp_kit.callbacks import Callback
from ddp_kit.checkpoint.loading import load
from ddp_kit.checkpoint.saver import Saver
from ddp_kit.errors import CheckpointError
from ddp_kit.log import logger
from ddp_kit.manifest import checkpoints, name_of, newest_whole
from ddp_kit.trainer.agreement import every_text, gathered
from ddp_kit.trainer.position import Position
from ddp_kit.trainer.step import OptimizerStep, Parts
from ddp_kit.world import RandomStates, mixed_seed, random_states, seed_generators, set_random_states

_COMPARED = 32  # of the newest checkpoints, among which nodes with folders of their own look for one that all have


class Checkpoints:
    """Saves and resumes a run, as `config.checkpoint` says. Every method is a collective."""

    def __init__(
        self, parts: Parts, position: Position, optimizer_step: OptimizerStep, callbacks: Sequence[Callback]
    ) -> None:
        self._parts = parts
        self._position = position
        self._optimizer_step = optimizer_step
        self._callbacks = callbacks
        self._config = parts.config.checkpoint
        self._settings = parts.config.model_dump(mode="json")
        self._saver: Saver | None = None
        self._saved_step = -1
        self.saved_at = time.monotonic()
        """When the latest save began, or this run."""
        if self._config.dir is not None and self._writes(self._config.dir):
            self._saver = Saver(self._config.dir, keep_last=self._config.keep_last, background=self._config.background)

    # --- saving -------------------------------------------------------------------------------------------------

    def after_step(self) -> None:
        """Save where it is due; an error of a save before comes out here."""
        every = self._config.every_steps
        if every is not None and self._position.step % every == 0:
            self.save_once()
        elif self._saver is not None:
            self._saver.check()

    def save_once(self) -> None:
        """Save, where this step is not saved yet."""
        if self._saved_step != self._position.step:
            self.save()

    def finish(self) -> None:
        """Save what the run came to, and wait until all is on the disk."""
        if self._config.dir is not None:
            self.save_once()
        if self._saver is not None:
            self._saver.wait()

    def save(self) -> None:
        """Write a checkpoint of this step. Raises `CheckpointError`."""
        if self._config.dir is None:
            raise CheckpointError("there is no folder to save in", 'set checkpoint={"dir": ...} in the TrainerConfig')
        self.saved_at = time.monotonic()
        random = every_text(_text(random_states(self._parts.world)).encode(), self._parts.world)
        if self._saver is not None:
            self._saver.save(self._position.step, self._state([text.decode() for text in random]))
        self._saved_step = self._position.step

    def _state(self, random: list[str]) -> dict[str, Any]:
        parts = self._parts
        return {
            "model": parts.model.state_dict(),
            "optimizer": parts.optimizer.state_dict(),
            "scheduler": None if parts.scheduler is None else parts.scheduler.state_dict(),
            "scaler": parts.precision.state(),
            "position": self._position.state(),
            "skipped": self._optimizer_step.skipped,
            "callbacks": [[type(each).__name__, each.state_dict()] for each in self._callbacks],
            "random": random,
            "config": self._settings,
        }

    def _writes(self, folder: Path) -> bool:
        """Whether this process does: rank 0, and the first rank of each node that does not see rank 0's folder."""
        world = self._parts.world
        names = every_text(uuid.uuid4().hex.encode() if world.rank == 0 else b"", world)
        mark = folder / f".writing-mark-{names[0].decode()}"
        if world.rank == 0:
            _make_mark(mark)
        gathered(world, [0])  # the mark is there
        sees = mark.exists()
        gathered(world, [0])  # all have looked
        if world.rank == 0:
            mark.unlink(missing_ok=True)
        return world.rank == 0 or (world.local_rank == 0 and not sees)

    # --- going on -----------------------------------------------------------------------------------------------

    def resume(self) -> bool:
        """Go on from where the configuration says, if there is anything. True where it did."""
        wanted, folder = self._config.resume, self._config.dir
        if wanted is None or (wanted == "auto" and folder is None):
            return False
        path = self._newest(folder) if wanted == "auto" and folder is not None else Path(str(wanted))
        if path is None:
            return False
        self.load(path)
        return True

    def load(self, path: Path) -> None:
        """Go on from this checkpoint. Raises `CheckpointError` where it is damaged or of something else."""
        state, parts = load(path, device=self._parts.world.device), self._parts
        _check_model(path, state["model"], parts.model.state_dict())
        parts.model.load_state_dict(state["model"])
        try:
            parts.optimizer.load_state_dict(state["optimizer"])
        except (ValueError, KeyError) as error:
            raise _of_another_run(path, f"its optimizer does not fit: {error}") from None
        if parts.scheduler is not None and state["scheduler"] is not None:
            parts.scheduler.load_state_dict(state["scheduler"])
        parts.precision.set_state(state["scaler"])
        self._position.set_state(state["position"])
        self._optimizer_step.skipped = state["skipped"]
        for callback, (_, own) in zip(self._callbacks, state["callbacks"], strict=False):
            callback.load_state_dict(own)
        self._set_random(state["random"])
        self._saved_step = self._position.step
        logger.info("resumed from {} after step {}", path, self._position.step)

    def _set_random(self, random: list[str]) -> None:
        world = self._parts.world
        if len(random) == world.world_size:
            set_random_states(_states(random[world.rank]))
            return
        seed_generators(mixed_seed(self._parts.config.seed, world.rank, self._position.step))
        logger.warning(
            "the checkpoint is of {} ranks, and there are {}: the samples of each step stay the same; dropout and "
            "other random numbers do not, nor does what BatchNorm sees at once",
            len(random),
            world.world_size,
        )

    def _newest(self, folder: Path) -> Path | None:
        """The newest one that is whole on every node; the ranks agree on it."""
        choice = newest_whole(folder) if folder.is_dir() else None
        for found in choice.passed_over if choice is not None else ():
            logger.warning("checkpoint passed over: {}", found)
        own = [found.step for found in checkpoints(folder) if found.whole][:_COMPARED] if folder.is_dir() else []
        table = gathered(self._parts.world, own + [-1] * (_COMPARED - len(own)))
        common = set.intersection(*({step for step in row if step >= 0} for row in table))
        if not common and any(step >= 0 for row in table for step in row):
            without = [rank for rank, row in enumerate(table) if row[0] < 0]
            raise CheckpointError(
                f"no checkpoint in {folder} is whole on every node; rank {', '.join(map(str, without))} sees none",
                "let `checkpoint.dir` be a folder that all nodes share, or set checkpoint.resume=None to start afresh",
            )
        return folder / name_of(max(common)) if common else None


def _make_mark(mark: Path) -> None:
    try:
        mark.parent.mkdir(parents=True, exist_ok=True)
        mark.touch()
    except OSError as error:
        raise CheckpointError(
            f"checkpoint.dir = {str(mark.parent)!r} cannot be written to: {error.strerror or error}",
            "choose a folder that this process may write to",
        ) from None


def _check_model(path: Path, saved: dict[str, Any], own: dict[str, Any]) -> None:
    problems = [f"{name} is missing in it" for name in own if name not in saved]
    problems += [f"{name} is not in the model" for name in saved if name not in own]
    problems += [
        f"{name} has shape {tuple(saved[name].shape)}, in the model {tuple(own[name].shape)}"
        for name in own
        if name in saved and isinstance(own[name], Tensor) and saved[name].shape != own[name].shape
    ]
    if problems:
        more = f"; and {len(problems) - 8} more" if len(problems) > 8 else ""
        raise _of_another_run(path, "; ".join(problems[:8]) + more)


def _of_another_run(path: Path, what: str) -> CheckpointError:
    return CheckpointError(
        f"the checkpoint {path} is of another model or optimizer: {what}",
        "give the folder of this run, or another one to start afresh (or checkpoint.resume=None)",
    )


def _text(states: RandomStates) -> str:
    """A line of JSON, then a line for each generator's thousands of numbers: base64, which is soon made."""
    version, numbers, gauss = states.python
    blocks = {"python": array("I", numbers).tobytes(), "torch": states.torch.numpy().tobytes()}
    numpy = states.numpy
    if numpy is not None:
        blocks["numpy"] = numpy[1].tobytes()
    if states.device is not None:
        blocks["device"] = states.device.numpy().tobytes()
    first = {
        "python": [version, gauss],
        "numpy": None if numpy is None else [numpy[0], *map(float, numpy[2:])],
        "lines": list(blocks),
    }
    return "\n".join([json.dumps(first), *(b64encode(block).decode() for block in blocks.values())])


def _states(text: str) -> RandomStates:
    line, *lines = text.split("\n")
    first = json.loads(line)
    blocks = {name: bytearray(b64decode(block)) for name, block in zip(first["lines"], lines, strict=True)}
    version, gauss = first["python"]
    numpy = first["numpy"]
    if numpy is not None:
        import numpy as np

        key = np.frombuffer(blocks["numpy"], dtype=np.uint32)
        numpy = (numpy[0], key, int(numpy[1]), int(numpy[2]), numpy[3])
    return RandomStates(
        (version, tuple(array("I", bytes(blocks["python"]))), gauss),
        torch.frombuffer(blocks["torch"], dtype=torch.uint8),
        numpy,
        torch.frombuffer(blocks["device"], dtype=torch.uint8) if "device" in blocks else None,
    )
