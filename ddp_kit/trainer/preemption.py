"""What ends a run early, or has it saved, from outside: signals and the clock."""

import signal
import time
import weakref
from itertools import count
from types import FrameType
from typing import Any, Self

import psutil
import torch.distributed as dist

from ddp_kit import contract
from ddp_kit.config import TrainerConfig
from ddp_kit.contract import ExitCode
from ddp_kit.log import logger
from ddp_kit.trainer.appointments import Appointments, Purpose, Wish
from ddp_kit.trainer.checkpoints import Checkpoints
from ddp_kit.trainer.position import Position
from ddp_kit.world import World

_ASK_FOR_A_STOP = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)  # SIGUSR1: what schedulers send as a warning
_LOOK_SECONDS = 0.01
_numbers = count()
_UNTOUCHED = (signal.SIG_DFL, signal.default_int_handler)


class StopSignals:
    """Within this context SIGTERM, SIGUSR1 and Ctrl-C are noted instead of ending the process.

    A second Ctrl-C interrupts as ever. A handler of the user's own stays; outside the main thread nothing is changed.
    """

    def __init__(self) -> None:
        self.heard: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        try:
            for number in _ASK_FOR_A_STOP:
                if signal.getsignal(number) in _UNTOUCHED:
                    self._before[number] = signal.signal(number, self._note)
        except ValueError:  # not the main thread
            pass
        return self

    def __exit__(self, *_: object) -> None:
        while self._before:
            number, before = self._before.popitem()
            if signal.getsignal(number) == self._note:
                signal.signal(number, before)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self.heard is not None:
            signal.default_int_handler(number, frame)
        self.heard = signal.Signals(number)


class Wishes:
    """What this rank wishes: to stop at a signal or in the end of its time, and to save every so often."""

    def __init__(self, world: World, config: TrainerConfig, signals: StopSignals, checkpoints: Checkpoints) -> None:
        limit = config.max_seconds
        self._stop_at = None if limit is None else time.monotonic() + limit - _seconds_so_far()
        self._save_every = config.checkpoint.every_seconds
        self._tells_time = world.rank == 0  # one clock is enough
        self._signals = signals
        self.saves = True
        """Whether to wish for saves, too: one that is agreed on has to be done before anything else can be."""
        self._checkpoints = weakref.ref(checkpoints)  # a thread asks for wishes, for as long as the process lives

    def latest(self) -> Wish | None:
        """What is due now."""
        heard, now = self._signals.heard, time.monotonic()
        if heard is not None:
            return Wish(Purpose.STOP, heard.name)
        if not self._tells_time:
            return None
        if self._stop_at is not None and now >= self._stop_at:
            return Wish(Purpose.STOP, "max_seconds")
        checkpoints = self._checkpoints()
        if not self.saves or self._save_every is None or checkpoints is None:
            return None
        if now - checkpoints.saved_at >= self._save_every:
            return Wish(Purpose.SAVE, "every_seconds")
        return None


class Preemption:
    """Saves by the clock, and ends the run with `ExitCode.REQUEUE` once it has been told to stop and has saved.

    A context manager, for as long as steps are done. Without a folder for checkpoints it does nothing, and signals end
    the process as ever.
    """

    def __init__(self, world: World, config: TrainerConfig, checkpoints: Checkpoints) -> None:
        self._checkpoints = checkpoints
        self._folder = config.checkpoint.dir
        self._auto = config.checkpoint.resume == "auto"
        self._signals = StopSignals()
        store = _store() if self._folder is not None and world.world_size > 1 else None
        self._wishes = Wishes(world, config, self._signals, checkpoints)
        self._appointments = Appointments(world.rank, world.world_size, store, self._wishes.latest)
        weakref.finalize(self, self._appointments.close)

    def __enter__(self) -> Self:
        if self._folder is not None:
            self._signals.__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        self._signals.__exit__()

    def begin(self) -> None:
        """Steps follow."""
        if self._folder is not None:
            self._appointments.begin()

    def stops(self) -> bool:
        """Whether the evaluation that is going on is in the way of a stop. Waits for nobody; the ranks may differ."""
        self._wishes.saves = False
        return self._folder is not None and self._appointments.stops()

    def after_step(self, position: Position, finished: bool) -> None:
        """Save, or save and end, where the ranks have agreed on that. Raises `SystemExit`.

        `finished`: whether that was the last one: then the run ends by itself, once it is evaluated.
        """
        if self._folder is None or (finished and not position.owes_evaluation):
            return
        wish, stops = self._appointments.due(), position.owes_evaluation
        while stops and self._appointments.hears and (wish is None or wish.purpose is not Purpose.STOP):
            time.sleep(_LOOK_SECONDS)  # some rank wishes it, or has
            wish = self._appointments.due()
        self._wishes.saves = True
        if wish is None:
            return
        self._checkpoints.save_once()
        if wish.purpose is Purpose.STOP:
            self._checkpoints.finish()
            again = "the same command" if self._auto else 'with checkpoint.resume="auto" the command'
            logger.warning(
                "stopped by {} after step {}: saved in {}; {} goes on from there",
                wish.why,
                position.step,
                self._folder,
                again,
            )
            raise SystemExit(ExitCode.REQUEUE)


def _store() -> dist.Store:
    """A part of the group's store, of its own for each Trainer; for a thread of its own."""
    whole: Any = dist.distributed_c10d._get_default_store()
    return dist.PrefixStore(f"ddp_kit/preemption/{next(_numbers)}", whole.clone())


def _seconds_so_far() -> float:
    """Since the job began, restarts included."""
    return time.time() - (contract.job_began() or psutil.Process().create_time())
