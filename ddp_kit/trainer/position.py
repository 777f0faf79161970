"""The position of a run (steps, epochs and samples done), and the state of its loop."""

import json
import math
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any

from ddp_kit.checkpoint.manager import Checkpoints
from ddp_kit.checkpoint.state import SavedPart, as_text, from_text
from ddp_kit.config.settings import TrainerConfig
from ddp_kit.data import ReaderState
from ddp_kit.data.comparison import check_same_samples
from ddp_kit.data.feed import StreamPosition
from ddp_kit.distributed.barrier import all_arrive
from ddp_kit.distributed.consistency import Facts
from ddp_kit.distributed.world import (
    World,
    decoded,
    encoded,
    random_states_kept,
    set_random_states,
)
from ddp_kit.errors import DataError, DdpKitError
from ddp_kit.log import logger
from ddp_kit.records import Step
from ddp_kit.state_values import flag, real_number, whole_number
from ddp_kit.storage.urls import Location

# --- Position ---------------------------------------------------------------------------------------------------------


class Position(SavedPart):
    """The progress of a run. A checkpoint stores it, and a resumed run continues from it.

    The names of the attributes are the keys in the checkpoint.
    """

    name = "progress"

    def __init__(self) -> None:
        self.step = 0
        """Optimizer steps done."""
        self.epoch = 0
        """Epochs done."""
        self.steps_in_epoch = 0
        """Steps done in the current epoch."""
        self.epoch_length: int | None = None
        """Number of steps in the current, unfinished epoch, if known."""
        self.epoch_facts: Facts = {}
        """Facts that determine the samples of each step in the current epoch, such as the seed and the global batch."""
        self.samples = 0
        """Samples trained on, over all ranks."""
        self.loss = math.nan
        """The mean loss of the last log row."""
        self.micro_batches: dict[str, int] = {}
        """Number of ranks -> the micro-batch that "auto" has chosen; a resumed run uses the same one."""
        self.evaluation_pending = False
        """Whether the evaluation after this step was interrupted; a resumed run starts by repeating it."""
        self.was_stopping = False
        """Whether stop() had been called when the evaluation was interrupted: after repeating it, the run ends."""
        self.stream_position: StreamPosition = ()
        """This rank's position in its stream; checkpoints store it for each rank."""
        self.evaluated = -1
        """The last step at which callbacks received the metrics of an evaluation; -1: none."""

    def advance(
        self, samples: int, epoch_length: int | None, stream_position: StreamPosition = (), *, ends_epoch: bool
    ) -> None:
        """Record that a step is done.

        `samples`: the step's samples over all ranks. `epoch_length`: the number of steps in the epoch, if known.
        `stream_position`: this rank's position in its stream.
        """
        self.evaluation_pending = self.was_stopping = False
        self.step += 1
        self.samples += samples
        self.steps_in_epoch += 1
        self.epoch_length = epoch_length
        self.stream_position = stream_position
        if ends_epoch:
            self.stream_position = ()
            self.epoch += 1
            self.steps_in_epoch = 0
            self.epoch_length = None
            self.epoch_facts = {}

    def check_facts(self, epoch_length: int | None, facts: Facts) -> None:
        """Raise `DataError` if `facts` have changed during the epoch: see `check_same_samples`.

        `epoch_length`: the number of steps in the epoch, if known. `facts`: see `epoch_facts`.
        """
        length = "the number of its steps"
        before: Facts = {} if self.epoch_length is None else {length: self.epoch_length}
        now: Facts = {} if epoch_length is None else {length: epoch_length}
        check_same_samples(before | self.epoch_facts, now | facts, self.epoch, self.steps_in_epoch)

    def last_step(self, config: TrainerConfig, steps_in: Callable[[range], int | None]) -> int | None:
        """The number of optimizer steps in the whole run; None if unknown.

        `steps_in`: a function that returns the number of optimizer steps in a range of epochs that starts with the
        current one, or None if it is unknown.
        """
        if config.last_epoch is None:
            return config.max_steps
        left = steps_in(range(self.epoch, config.last_epoch))
        if left is None:
            return config.max_steps
        by_epochs = self.step + max(0, left - self.steps_in_epoch)
        return min(by_epochs, config.max_steps or by_epochs)

    def epochs_left(
        self, config: TrainerConfig, last: int | None, steps_per_epoch: int | None, after: int = 0
    ) -> int | None:
        """The number of epochs that the run has yet to complete, or None if unknown.

        `last`: the number of optimizer steps in the whole run, or None if unknown. `steps_per_epoch`: the number of
        steps in the current epoch, assumed for later epochs too, or None if unknown. `after`: epochs that end at this
        optimizer step or earlier are not counted.
        """
        if steps_per_epoch is None or last is None:
            if after or config.max_steps is not None or config.last_epoch is None:
                return None
            return config.last_epoch - self.epoch
        first = self.step + steps_per_epoch - self.steps_in_epoch
        return sum(end > after for end in range(first, last + 1, steps_per_epoch))

    def state_dict(self, ranks: Sequence[Any]) -> Any:  # noqa: ARG002
        # `StreamPart` saves `stream_position`, which differs between ranks.
        return {name: value for name, value in vars(self).items() if name != "stream_position"}

    def check(self, state: Any) -> str | None:
        for name in ("step", "epoch", "steps_in_epoch", "samples"):
            whole_number(state[name], name)
        real_number(state["loss"], "loss")
        whole_number(state["evaluated"], "evaluated", -1)
        if state["epoch_length"] is not None:
            whole_number(state["epoch_length"], "epoch_length", 1)
        for name in ("evaluation_pending", "was_stopping"):
            flag(state[name], name)
        for ranks, size in state["micro_batches"].items():
            whole_number(size, f"the micro-batch of {ranks} ranks", 1)
        for name, fact in state["epoch_facts"].items():
            if not isinstance(fact, str | int):
                raise ValueError(f"{name} is {fact!r}")
        return None

    def load_state_dict(self, state: Any, path: Location) -> None:  # noqa: ARG002
        vars(self).update({name: value for name, value in state.items() if name in vars(self)})


class StreamPart(SavedPart):
    """The part of a checkpoint that contains each rank's position in its stream of data."""

    name = "streams"
    required = False

    def __init__(self, world: World, position: Position) -> None:
        self._world = world
        self._position = position

    def rank_state(self) -> Any:
        if not self._position.stream_position:  # not a stream with state, or no epoch has started
            return None
        return json.dumps(
            [
                [reader.reader, reader.number, encoded(reader.random), as_text(reader.dataset)]
                for reader in self._position.stream_position
            ]
        )

    def state_dict(self, ranks: Sequence[Any]) -> Any:
        return [*ranks]

    def check(self, state: Any) -> str | None:
        stream_position_of(state, self._world.rank, self._world.world_size)
        return None

    def load_state_dict(self, state: Any, path: Location) -> None:  # noqa: ARG002
        self._position.stream_position = stream_position_of(state, self._world.rank, self._world.world_size)


def stream_position_of(texts: Sequence[str | None], rank: int, ranks: int) -> StreamPosition:
    """This rank's position in its stream, given the texts of all ranks; empty if the number of ranks has changed.

    Invalid text may raise any exception.
    """
    if len(texts) != ranks:
        return ()
    text = texts[rank]
    if text is None:
        return ()
    readers = []
    with random_states_kept():
        for reader, number, random, state in json.loads(text):
            states = decoded(random)
            set_random_states(states)  # raises an error for invalid states
            readers.append(
                ReaderState(whole_number(reader, "a reader"), whole_number(number, "a batch"), states, from_text(state))
            )
    return tuple(readers)


# --- Loop state -------------------------------------------------------------------------------------------------------


class RunState:
    """The state of a Trainer's loop. The effect of a call depends on when the call is made:

    call          while no loop runs   between two steps     in a callback or an evaluation
    save()        saves                saves                 saves when the step is complete
    stop()        does nothing         no further step       no further step
    evaluate()    evaluates            evaluates             evaluates; callback calls are nested
    fit, steps    trains               replaces the loop     replaces the loop
    """

    def __init__(self) -> None:
        self.stopping = False
        """Whether the run ends after the current step."""
        self.stop_agreed = False
        """Whether all ranks are known to have called `stop` in the current loop."""
        self.seeded = False
        """Whether the run's random states have been set."""
        self.loop: object = None
        """Identifies the loop that was started last; earlier ones may not continue."""
        self._in_loop = False
        self.callbacks = Nesting()
        """The context in which callbacks or an evaluation run."""

    @property
    def may_save(self) -> bool:
        """Whether a requested save can be done now. In a loop, a callback or an evaluation, the save is postponed."""
        return not self._in_loop and not self.callbacks.depth

    @property
    def is_in_callback(self) -> bool:
        """Whether callbacks or an evaluation are running; a checkpoint would contain only some of their changes."""
        return self.callbacks.depth > 0

    def begin_loop(self) -> object:
        """Start a new loop, which replaces the current one. Returns an object that identifies the new loop."""
        self.loop = object()
        self.stop_agreed = False
        return self.loop

    def check_current(self, loop: object) -> None:
        """Raise `DataError` if another loop was started, or a checkpoint was loaded, after `loop` was started."""
        if self.loop is not loop:
            raise DataError(
                "another loop over steps() was started, or a checkpoint was loaded, before this loop was finished",
                "finish or leave this loop first, then start another one or call trainer.resume(path)",
            )

    def resumed(self) -> None:
        """Record that a checkpoint was loaded. A loop that was started before must not continue."""
        self.seeded = False
        self.loop = None

    @contextmanager
    def in_loop(self) -> Iterator[None]:
        """Context manager for the steps of a loop. Saves requested inside it wait for the end of the current step."""
        self._in_loop = True
        try:
            yield
        finally:
            self._in_loop = False


class Nesting:
    """Reentrant context manager that counts its depth. `@contextmanager` would add two microseconds per step."""

    def __init__(self) -> None:
        self.depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1


# --- Saves when a loop is left ----------------------------------------------------------------------------------------


_SECONDS = 10.0
"""The barrier timeout when a loop is left: ranks are at most one loop body apart."""
_loops = count()


Loop = Generator[Step, None, None]


def save_when_left(steps: Loop, world: World, checkpoints: Checkpoints, run_state: RunState) -> Iterator[Step]:
    """Yield the steps. If the caller leaves the loop after a step at which a save is due, do that save.

    Waits until all saves are on disk, so that the next Trainer finds them. A generator cannot tell a `break` from an
    exception, which may occur on only some ranks. Therefore nothing is saved unless all ranks leave the loop.
    """
    number = next(_loops)
    for step in steps:
        loop = run_state.loop
        try:
            yield step
        except GeneratorExit:
            due = checkpoints.is_due and not checkpoints.is_saved and run_state.loop is loop
            place = f"the end of a loop over steps() after step {step.number}"
            if due and not all_arrive(world, place, f"left/{number}", _SECONDS):
                due = False
                logger.warning(
                    "the checkpoint after step {} was not saved: not all ranks left the loop within {:g} s",
                    step.number,
                    _SECONDS,
                )
            steps.close()
            try:
                if due:
                    checkpoints.at_end()
                else:
                    checkpoints.wait_for_saves()
            except DdpKitError as error:  # Python may swallow an error raised while a generator is closed
                logger.error("the checkpoint after step {} could not be saved: {}", step.number, error)
            raise
