"""Signals and time limits that make a run save or stop."""

import json
import math
import signal
import time
import weakref
from contextlib import AbstractContextManager, nullcontext, suppress
from functools import partial
from itertools import count
from types import FrameType
from typing import Any, Self

import psutil

from ddp_kit.checkpoint.manager import Checkpoints
from ddp_kit.config.settings import TrainerConfig
from ddp_kit.distributed.barrier import control_of
from ddp_kit.distributed.consensus import Purpose, StepConsensus, StepRequest
from ddp_kit.distributed.world import World, gathered_bytes
from ddp_kit.env import job_end_time, job_start_time, shutdown_timeout
from ddp_kit.errors import DdpKitError
from ddp_kit.exit_codes import ExitCode
from ddp_kit.log import logger
from ddp_kit.texts import resuming_command
from ddp_kit.trainer.position import Position

# Cluster schedulers send SIGUSR1 or SIGUSR2 before they end a job.
_STOP_SIGNALS = (
    signal.SIGTERM,
    signal.SIGINT,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
_RESERVE_SECONDS = 60.0  # stop this long before the job's time limit: to finish a step, save, and end all processes
_LONGEST_RESERVE = 0.25  # but at most this part of the time that is left when the run starts
_SAVES_IN_RESERVE = 3.0  # and at least as long as this many saves take
_SAVES_IN_GRACE = 1.5  # SIGKILL must come this many save times after SIGTERM, because a step is finished before a save
_POLL_SECONDS = 0.01
_numbers = count()
_UNTOUCHED = (signal.SIG_DFL, signal.default_int_handler)


class StopSignals:
    """Context manager that makes `_STOP_SIGNALS`, such as SIGTERM and Ctrl-C, set a flag, not end the process.

    A second Ctrl-C interrupts as usual. Handlers that user code has set are not replaced; outside the main thread, no
    handler is set. Several Trainers may enter it; the last one to exit restores the handlers.
    """

    def __init__(self) -> None:
        self.received: signal.Signals | None = None
        """The signal that was received last; None if none was received."""
        self._before: dict[signal.Signals, Any] = {}
        self._entered = 0
        self.ignore_until_exit = False
        """Whether to keep ignoring all of them but Ctrl-C after the context, until the process exits."""

    def __enter__(self) -> Self:
        if not self._entered and self.received is signal.SIGINT:
            self.received = None  # it was meant for an earlier run in this process, such as a cell of a notebook
        self._entered += 1
        with suppress(ValueError):  # not the main thread
            for number in _STOP_SIGNALS:
                if signal.getsignal(number) in _UNTOUCHED:
                    self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        self._entered -= 1
        while self._before and not self._entered:
            number, before = self._before.popitem()
            lasts = self.ignore_until_exit and number != signal.SIGINT
            if signal.getsignal(number) == self._note and not lasts:
                signal.signal(number, before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.received is not None:
            signal.default_int_handler(number, frame)
        self.received = signal.Signals(number)


_signals = StopSignals()  # one per process, because a signal stops all its Trainers


class Requests:
    """This rank's requests to stop or save.

    A stop is requested after a signal, after max_seconds, and shortly before the scheduler ends the job. A save is
    requested every `checkpoint.every_seconds` seconds, and a copy of the state in memory about every
    `checkpoint.memory_seconds` seconds.
    """

    def __init__(self, world: World, config: TrainerConfig, checkpoints: Checkpoints) -> None:
        job_start = job_start_time() or psutil.Process().create_time()  # before restarts
        self._stop_at: float | None = None
        if config.max_seconds is not None:
            self._stop_at = time.monotonic() + config.max_seconds - (time.time() - job_start)
        self._end_time = job_end_time()
        left = 0.0 if self._end_time is None else self._end_time - time.time()
        self._reserve = min(_RESERVE_SECONDS, max(0.0, left * _LONGEST_RESERVE))
        self._save_every = config.checkpoint.every_seconds
        self._tells_time = world.rank == 0  # only one rank's clock counts
        self.saves = True
        """Whether to also request saves and copies. False during an evaluation: one would block later stop requests."""
        self._checkpoints = weakref.ref(checkpoints)  # the polling thread must not keep them alive

    def latest(self) -> StepRequest | None:
        """The request that is due now; None if none is due."""
        received = _signals.received
        now = time.monotonic()
        if received is not None:
            return StepRequest(Purpose.STOP, received.name)
        if not self._tells_time:
            return None
        if self._stop_at is not None and now >= self._stop_at:
            return StepRequest(Purpose.STOP, "max_seconds")
        checkpoints = self._checkpoints()
        if self._end_time is not None:
            save_seconds = 0.0 if checkpoints is None else checkpoints.save_seconds or 0.0
            if time.time() >= self._end_time - max(self._reserve, _SAVES_IN_RESERVE * save_seconds):
                return StepRequest(Purpose.STOP, "the approaching end of the job")
        if not self.saves or checkpoints is None:
            return None
        if self._save_every is not None and now - checkpoints.saved_at >= self._save_every:
            return StepRequest(Purpose.SAVE, "every_seconds")
        if checkpoints.copies is not None and checkpoints.copies.is_due(now):
            return StepRequest(Purpose.KEEP, "memory_seconds")
        return None


class Preemption:
    """Saves at time intervals; on a stop request, saves and ends the run with `ExitCode.REQUEUE`.

    A context manager that is active during a loop over steps. Without a checkpoint folder it does nothing, and signals
    end the process as usual. If a process has several Trainers with checkpoint folders, the Trainer that stops also
    saves the other Trainers.
    """

    def __init__(self, world: World, config: TrainerConfig, checkpoints: Checkpoints, position: Position) -> None:
        self._world = world
        self._checkpoints = checkpoints
        self._position = position
        self._folder = config.checkpoint.dir
        self._auto = config.checkpoint.resume == "auto"
        self._number = number = next(_numbers)
        has_others = self._folder is not None and world.world_size > 1
        control = partial(control_of, world) if has_others else None
        self._requests = Requests(world, config, checkpoints)
        self._consensus = StepConsensus(world.rank, world.world_size, control, str(number), self._requests.latest)
        weakref.finalize(self, self._consensus.close)
        self._grace = shutdown_timeout()
        self._launched = self._grace is not None

    def __enter__(self) -> Self:
        if self._folder is not None:
            self._consensus.begin()
            _saved_at_a_stop[self._number] = self
            _signals.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self._folder is not None:
            if kind not in (None, GeneratorExit):  # after an error, the step may be incomplete
                _saved_at_a_stop.pop(self._number, None)
            self._consensus.close()
            _signals.__exit__()

    def handling_signals(self) -> AbstractContextManager[object]:
        """Return a context manager in which a signal stops the run after its next step, even before the first step.

        Without a checkpoint folder, the context manager does nothing.
        """
        return nullcontext() if self._folder is None else _signals

    def interrupts_evaluation(self) -> bool:
        """Whether a stop request should interrupt an evaluation. The result may differ between ranks.

        From here to the end of the step, this rank does not request saves.
        """
        self._requests.saves = False
        return self._folder is not None and self._consensus.stops()

    @property
    def is_unsaved(self) -> bool:
        """Whether the run has made steps since it was last saved."""
        return bool(self._position.step) and not self._checkpoints.is_saved

    def after_step(self, finished: bool) -> None:
        """Save, or save and end the run, if this is the step after which the ranks have agreed to do so.

        Raises `SystemExit` to end the run. `finished`: whether this was the last step. After the last step, requests
        to save or to stop are ignored unless an evaluation is still pending.
        """
        position = self._position
        if self._grace is not None and self._checkpoints.save_seconds is not None:
            self._compare_with_grace(self._checkpoints.save_seconds, self._grace)
        if self._folder is None or (finished and not position.evaluation_pending):
            return
        self._requests.saves = not position.evaluation_pending
        request = self._consensus.end_step()
        if position.evaluation_pending:  # a rank has requested a stop, which interrupted the evaluation
            while self._consensus.running and (request is None or request.purpose is not Purpose.STOP):
                time.sleep(_POLL_SECONDS)
                request = self._consensus.granted()
        self._requests.saves = True
        if request is None:
            return
        if request.purpose is Purpose.SAVE:
            self._checkpoints.after_interval()
            return
        if request.purpose is Purpose.KEEP:
            # Trainers that train together must resume from the same step: they have no copies.
            self._checkpoints.copy(skip=any(other.is_unsaved for other in _others(self).values()))
            return
        try:
            self._checkpoints.at_stop()
            _save_others(self, self._world)
        finally:
            _signals.received = None  # until here, a second Ctrl-C interrupts
        # The launcher sends SIGTERM when another node has left, and that must not replace the exit code REQUEUE.
        _signals.ignore_until_exit = self._launched
        logger.warning(
            "stopped by {} after step {}: the run is saved in {}; {} resumes from there",
            request.why,
            position.step,
            self._folder,
            resuming_command(auto=self._auto),
        )
        raise SystemExit(ExitCode.REQUEUE)

    def _compare_with_grace(self, seconds: float, grace: float) -> None:
        """Log once whether a save fits into the `grace` seconds between SIGTERM and SIGKILL."""
        self._grace = None
        if self._world.rank:
            return
        if seconds * _SAVES_IN_GRACE <= grace:
            about = max(seconds, 0.1)
            logger.info(
                "a save takes about {:.1f} s, which fits into the {:.0f} s between SIGTERM and SIGKILL", about, grace
            )
            return
        logger.warning(
            "a save takes about {:.1f} s, which may not fit into the {:.0f} s between SIGTERM and SIGKILL; set "
            "--shutdown-timeout to {:.0f} or more, and the cluster's grace period (such as "
            "terminationGracePeriodSeconds) to a larger value",
            seconds,
            grace,
            math.ceil(seconds * _SAVES_IN_GRACE) + 1,
        )


_saved_at_a_stop: "weakref.WeakValueDictionary[int, Preemption]" = weakref.WeakValueDictionary()
"""The `Preemption` of each Trainer of this process that has a checkpoint folder and has trained without an error."""


def _others(own: Preemption) -> "dict[int, Preemption]":
    """The other Trainers that have trained without an error. Ranks may differ in those that are no longer used."""
    return {number: other for number, other in _saved_at_a_stop.items() if other is not own}


def _save_others(stopping: Preemption, world: World) -> None:
    """Save all other Trainers that have trained, at their current steps. A collective."""
    alive = _others(stopping)
    of_ranks = [set(json.loads(text)) for text in gathered_bytes(json.dumps([*alive]).encode(), world)]
    for number in sorted(set.intersection(*of_ranks)):
        other = alive[number]
        if other.is_unsaved:
            try:
                other._checkpoints.at_stop()
            except DdpKitError as error:  # do not raise: the stopping Trainer is saved already, and must exit
                logger.error("another Trainer could not be saved in {}: {}", other._folder, error)
            else:
                logger.warning(
                    "another Trainer was also saved: its checkpoint after step {} is in {}",
                    other._position.step,
                    other._folder,
                )
