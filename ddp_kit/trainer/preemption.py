"""Signals and time limits that stop or save a run."""

import json
import signal
import time
import weakref
from functools import partial
from itertools import count
from types import FrameType
from typing import Any, Self

import psutil
import torch.distributed as dist

from ddp_kit.config import TrainerConfig
from ddp_kit.env import job_start_time
from ddp_kit.errors import DdpKitError
from ddp_kit.exit_codes import ExitCode
from ddp_kit.log import logger
from ddp_kit.torch_internals import default_store
from ddp_kit.trainer.checkpoints import Checkpoints
from ddp_kit.trainer.exchange import every_text
from ddp_kit.trainer.position import Position
from ddp_kit.trainer.step_consensus import Purpose, Request, StepConsensus
from ddp_kit.world import World

_ASK_FOR_A_STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)  # schedulers send SIGUSR1 as a warning
_LOOK_SECONDS = 0.01
_numbers = count()
_UNTOUCHED = (signal.SIG_DFL, signal.default_int_handler)


class StopSignals:
    """In this context SIGTERM, SIGUSR1 and Ctrl-C set a flag instead of ending the process.

    A second Ctrl-C interrupts as usual. User handlers are kept; outside the main thread nothing is changed. Several
    Trainers may enter it: the last one that exits restores the handlers.
    """

    def __init__(self) -> None:
        self.heard: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}
        self._entered = 0

    def __enter__(self) -> Self:
        self._entered += 1
        try:
            for number in _ASK_FOR_A_STOP:
                if signal.getsignal(number) in _UNTOUCHED:
                    self._before[number] = signal.signal(number, self._note)
        except ValueError:  # not the main thread
            pass
        return self

    def __exit__(self, *_: object) -> None:
        self._entered -= 1
        while self._before and not self._entered:
            number, before = self._before.popitem()
            if signal.getsignal(number) == self._note:
                signal.signal(number, before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.heard is not None:
            signal.default_int_handler(number, frame)
        self.heard = signal.Signals(number)


_signals = StopSignals()  # one per process: signals stop all its Trainers


class Requests:
    """This rank's requests: stop at a signal or after max_seconds, and save every `checkpoint.every_seconds`."""

    def __init__(self, world: World, config: TrainerConfig, checkpoints: Checkpoints) -> None:
        limit = config.max_seconds
        self._stop_at = None if limit is None else time.monotonic() + limit - _seconds_so_far()
        self._save_every = config.checkpoint.every_seconds
        self._tells_time = world.rank == 0  # one clock is enough
        self.saves = True
        """Whether to request saves too: a granted save blocks later requests until it is done."""
        self._checkpoints = weakref.ref(checkpoints)  # the thread that polls must not keep them alive

    def latest(self) -> Request | None:
        """The request that is due now, if any."""
        heard, now = _signals.heard, time.monotonic()
        if heard is not None:
            return Request(Purpose.STOP, heard.name)
        if not self._tells_time:
            return None
        if self._stop_at is not None and now >= self._stop_at:
            return Request(Purpose.STOP, "max_seconds")
        checkpoints = self._checkpoints()
        if not self.saves or self._save_every is None or checkpoints is None:
            return None
        if now - checkpoints.saved_at >= self._save_every:
            return Request(Purpose.SAVE, "every_seconds")
        return None


class Preemption:
    """Saves at time intervals, and on a stop request saves and ends the run with `ExitCode.REQUEUE`.

    A context manager, active while steps are done. Without a checkpoint folder it does nothing, and signals end the
    process as usual. If a process has several Trainers with a folder, the one that stops saves all of them.
    """

    def __init__(self, world: World, config: TrainerConfig, checkpoints: Checkpoints, position: Position) -> None:
        self._world = world
        self._checkpoints = checkpoints
        self._position = position
        self._folder = config.checkpoint.dir
        self._auto = config.checkpoint.resume == "auto"
        self._number = number = next(_numbers)
        open_store = partial(_store, number) if self._folder is not None and world.world_size > 1 else None
        self._requests = Requests(world, config, checkpoints)
        self._consensus = StepConsensus(world.rank, world.world_size, open_store, self._requests.latest)
        weakref.finalize(self, self._consensus.close)

    def __enter__(self) -> Self:
        if self._folder is not None:
            _saved_at_a_stop[self._number] = self
            _signals.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._folder is not None:
            if kind not in (None, GeneratorExit):  # an error may have interrupted a step
                _saved_at_a_stop.pop(self._number, None)
            self._consensus.close()
            _signals.__exit__()

    def begin(self) -> None:
        """Start listening for requests, before the first step."""
        if self._folder is not None:
            self._consensus.begin()

    def stops(self) -> bool:
        """Whether a stop request is pending during an evaluation. Does not wait for other ranks; ranks may differ."""
        self._requests.saves = False
        return self._folder is not None and self._consensus.stops()

    def after_step(self, finished: bool) -> None:
        """Save, or save and end the run, if the ranks have agreed to. Raises `SystemExit`.

        `finished`: whether this was the last step: then the run ends anyway, after its evaluation.
        """
        position = self._position
        if self._folder is None or (finished and not position.owes_evaluation):
            return
        request, stops = self._consensus.due(), position.owes_evaluation
        while stops and self._consensus.hears and (request is None or request.purpose is not Purpose.STOP):
            time.sleep(_LOOK_SECONDS)  # some rank has requested a stop or is about to
            request = self._consensus.due()
        self._requests.saves = True
        if request is None:
            return
        if request.purpose is Purpose.SAVE:
            self._checkpoints.save_once()
            return
        try:
            self._checkpoints.save_once()
            self._checkpoints.finish()
            _save_others(self, self._world)
        finally:
            _signals.heard = None  # up to here, a second Ctrl-C interrupts
        again = "the same command" if self._auto else 'with checkpoint.resume="auto" the command'
        logger.warning(
            "stopped by {} after step {}: saved in {}; {} resumes from there",
            request.why,
            position.step,
            self._folder,
            again,
        )
        raise SystemExit(ExitCode.REQUEUE)


_saved_at_a_stop: "weakref.WeakValueDictionary[int, Preemption]" = weakref.WeakValueDictionary()
"""This process's Trainers that have a folder and have trained without an error, by number."""


def _save_others(stopping: Preemption, world: World) -> None:
    """Save every other Trainer that has trained, at its current step. A collective."""
    alive = {number: other for number, other in sorted(_saved_at_a_stop.items()) if other is not stopping}
    seen = [json.loads(text) for text in every_text(json.dumps([*alive]).encode(), world)]
    for number in [number for number in alive if all(number in each for each in seen)]:
        other = alive[number]
        if other._position.step and not other._checkpoints.is_saved:
            try:
                other._checkpoints.end()
            except DdpKitError as error:  # the stopping Trainer is saved already and still exits
                logger.error("another Trainer could not be saved in {}: {}", other._folder, error)
            else:
                logger.warning("saved another Trainer after step {} in {}", other._position.step, other._folder)


def _store(number: int, times: int) -> dist.Store:
    """A separate namespace of the group's store per Trainer and call, on its own connection, for a thread."""
    whole: Any = default_store()
    return dist.PrefixStore(f"ddp_kit/preemption/{number}/{times}", whole.clone())


def _seconds_so_far() -> float:
    """Seconds since the job started, restarts included."""
    return time.time() - (job_start_time() or psutil.Process().create_time())
