"""A monitored barrier, which reports the missing ranks and where they are.

All ranks wait at this barrier when a call of the Trainer is about to use collectives, and when a forward or backward
pass runs FSDP's units in a different order from the previous pass.

The barrier uses the process group's store, not a collective. A collective could be paired with a different one, such as
a gradient reduction of a rank that has not arrived; both would then hang, crash, or silently return wrong numbers.

    wait_for_all(world, "trainer.fit() after step 0"):
        compare this rank's location with that of the first rank to arrive, which has stored it
        append a line to the log of this barrier, a key of the store, and count it: this rank has arrived
        the last rank to arrive decides that the barrier is passed; the other ranks wait for that (see `control.py`)
        the first rank to arrive looks, while it waits, for a reason why a rank will not arrive:
            the rank's process has ended
            it has started later collectives     -> it has skipped this barrier
            the barrier timeout has passed
        and decides that the barrier fails for this reason, which all ranks then raise as a `WorldError`
        after a few seconds, it asks all ranks where they are, and logs which ranks are missing, and where they are

The first decision counts, so a barrier fails on all ranks or on none. If all ranks arrive soon, none reads the log.
"""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial

from ddp_kit import log
from ddp_kit.distributed.control import STORE_ERRORS, Control
from ddp_kit.distributed.world import World, join
from ddp_kit.errors import WorldError
from ddp_kit.heartbeat import HeartbeatWriter
from ddp_kit.log import logger
from ddp_kit.torch_internals import collectives_of_default_group, default_store

TIMEOUT_SECONDS = 600.0
"""The barrier timeout. It is as long as the timeout of collectives, because a missing rank may be busy."""
ANSWER_SECONDS = 1.0
"""The interval between questions where the missing ranks are."""
_ANSWERS_PER_SECOND = 1024  # the maximum number of answers to these questions, summed over all ranks
SILENT_SECONDS = 5.0
"""The time until the first log line about missing ranks, and until a rank that skipped the barrier causes an error."""
REPEAT_SECONDS = 60.0
"""The time between two log lines about missing ranks."""
_LOOK_SECONDS = 0.25  # the interval at which the first rank looks for ranks that will not arrive
_ENDED = "its process has ended"
_DIFFERENT_CALLS = "the ranks made different calls: "
_MAX_LISTED = 16  # ranks that a message names
_GRACE_SECONDS = 2.0  # how much later than its timeout another rank gives up, because the first one reports the reason

HINT = (
    "all ranks must call fit, steps, evaluate, predict, save, resume and stop at the same step, and leave a loop over "
    "steps() at the same step: base such decisions on values that are equal on all ranks. Do not make these calls "
    "under `if trainer.world.is_main:`; that is for printing and writing your own files"
)


@dataclass(frozen=True)
class RankLocation:
    """Where a rank is in its program."""

    rank: int
    collectives: int
    """The number of collectives that the rank has started in the default group since the previous barrier."""
    words: str
    """A description of the location: a call of the Trainer, a phase of a step, or the script."""

    @staticmethod
    def parse(line: str) -> "RankLocation":
        rank, collectives, words = line.split(" ", 2)
        return RankLocation(int(rank), int(collectives), words)

    def __str__(self) -> str:
        return f"{self.rank} {self.collectives} {self.words}"


class _Barriers:
    """The state that all barriers of this process share."""

    def __init__(self, group_store: object, rank: int, ranks: int) -> None:
        self.rank = rank
        self.passed = 0
        """The number of barriers that this process has reached so far."""
        self.collectives = 0
        """The number of collectives that this process had started at the previous barrier."""
        self.heartbeat: HeartbeatWriter | None = None
        """The heartbeat of the newest Trainer, which reports where this rank is."""
        self.control = Control(group_store, rank, ranks, self.answer)

    def location(self, words: str) -> RankLocation:
        """This rank's location; `words` describe it."""
        return RankLocation(self.rank, collectives_of_default_group() - self.collectives, words)

    def answer(self, question: str) -> None:
        """Append this rank's location to the key `question`."""
        words = "the script" if self.heartbeat is None else self.heartbeat.where
        self.control.store.append(question, f"{self.location(words)}\n")


_current: list[_Barriers] = []  # at most one, for the current process group


def _barriers(world: World) -> _Barriers:
    group_store = default_store()
    if not _current or _current[0].control.group_store is not group_store:
        for old in _current:
            old.control.close()
        _current[:] = [_Barriers(group_store, world.rank, world.world_size)]
    return _current[0]


def control_of(world: World) -> Control:
    """The announcements between the ranks of the current process group."""
    return _barriers(world).control


def join_world(location: str, *, share_gpus: bool) -> World:
    """Join the process group with `world.join`, and wait at a barrier until all ranks have joined.

    If joining takes a long time, ranks 0 and 1 log a warning. `location`: the user's call, in words.
    """
    world = join(share_gpus=share_gpus, starting=partial(_warned_when_late, location))
    log.start(world.rank, world.world_size)
    wait_for_all(world, location)
    return world


@contextmanager
def _warned_when_late(location: str, rank: int, world_size: int) -> Iterator[None]:
    """Context manager that logs a warning if creating the process group takes a long time.

    The warning cannot name the missing ranks, because there is no store yet.
    """

    def warn() -> None:
        log.start(rank, world_size)
        logger.warning(
            "rank {} is waiting at {}: not all of the {} processes have reached this call. Every process must create "
            "the Trainer: is it under a condition such as `if rank == 0`? After {:.0f} minutes, the wait ends with an "
            "error",
            rank,
            location,
            world_size,
            TIMEOUT_SECONDS / 60,
        )

    timer = threading.Timer((rank + 1) * SILENT_SECONDS, warn)
    timer.daemon = True
    if rank <= 1:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def watch(world: World, heartbeat: HeartbeatWriter) -> None:
    """Answer other ranks that ask where this rank is, and announce when this process ends.

    `heartbeat`: the heartbeat that records where this rank is.
    """
    if world.world_size > 1:
        _barriers(world).heartbeat = heartbeat


def wait_for_all(world: World, location: str, *, seconds: float | None = None, hint: str = HINT) -> None:
    """Wait until all ranks are at the same location. Raises `WorldError` if a rank is elsewhere, or does not arrive.

    `seconds`: the timeout; None: `TIMEOUT_SECONDS`. `hint`: the hint of the error.
    """
    if world.world_size == 1:
        return
    barriers = _barriers(world)
    barriers.passed += 1
    wait = _Wait(world, barriers, f"barrier/{barriers.passed}", location, hint)
    wait.until_all_arrived(TIMEOUT_SECONDS if seconds is None else seconds)
    barriers.collectives += wait.location.collectives
    if world.is_main:
        with suppress(*STORE_ERRORS):  # the store has closed: the job is over
            before = f"barrier/{barriers.passed - 1}"  # no rank needs it any more
            answers = f"{Control.QUESTION}{before}"  # which nobody has read
            for key in (before, f"{before}/first", f"{before}/count", f"{before}/decided", answers):
                barriers.control.store.delete_key(key)


def all_arrive(world: World, location: str, name: str, seconds: float) -> bool:
    """Wait at a barrier that some ranks may never reach; return whether all ranks arrive within `seconds`.

    The result is the same on all ranks, even on one that arrives too late. `name`: the name of the barrier, equal on
    all ranks and not used before.
    """
    if world.world_size == 1:
        return True
    try:
        _Wait(world, _barriers(world), f"barrier/{name}", location, HINT).until_all_arrived(seconds)
    except WorldError:
        return False
    return True


class _Wait:
    """One rank's wait for the others at a barrier. `log`: the key of its log, and the name of its decision."""

    def __init__(self, world: World, barriers: _Barriers, log: str, location: str, hint: str) -> None:
        self._world = world
        self._barriers = barriers
        self._control = barriers.control
        self._log = log
        self.location = barriers.location(location)
        self._hint = hint
        self._next_question = self._next_line = time.monotonic() + SILENT_SECONDS
        self._next_question -= 2 * ANSWER_SECONDS
        self._answers: dict[int, RankLocation] = {}
        self._past_since: dict[int, float] = {}

    def until_all_arrived(self, seconds: float) -> None:
        """Log this rank's arrival and wait for the others. Raises `WorldError`."""
        control = self._control
        deadline = time.monotonic() + seconds
        try:
            stored = control.store.compare_set(f"{self._log}/first", "", str(self.location)).decode()
            first = RankLocation.parse(stored)
            if first.words != self.location.words:
                control.store.append(self._log, f"{self.location}\n")  # not counted: this barrier cannot be passed
                raise self._error(control.decide(self._log, self._different_calls(first)))
            if control.append(self._log, str(self.location)) == self._world.world_size:
                control.decide(self._log, "")
            failure = None
            while failure is None:
                pause = max(0.0, deadline - time.monotonic())
                pause = min(pause, _LOOK_SECONDS) if first.rank == self._world.rank else pause + _GRACE_SECONDS
                failure = control.wait(self._log, pause)
                reason = self._reason_to_fail(deadline) if failure is None else None
                if reason is not None:
                    failure = control.decide(self._log, reason)
        except STORE_ERRORS as error:
            raise WorldError(
                f"rank {self._world.rank} is at {self.location.words}, but cannot reach the other ranks: the store "
                f"does not answer ({error})",
                "the process that serves the store (rank 0 or the launcher) has probably ended: see its output. "
                f"{self._hint}",
            ) from None
        if failure:
            raise self._error(failure)

    def _different_calls(self, first: RankLocation) -> str:
        """The reason to fail if this rank's call differs from that of the first rank to arrive."""
        arrived = {first.rank: first, **self._arrived()}
        calls = [f"rank {rank} at {location.words}" for rank, location in sorted(arrived.items())]
        return f"{_DIFFERENT_CALLS}{_listed(calls)}"

    def _arrived(self) -> dict[int, RankLocation]:
        """The ranks that have arrived, by the log."""
        return {location.rank: location for location in map(RankLocation.parse, self._control.lines(self._log))}

    def _error(self, reason: str) -> WorldError:
        if reason.startswith(_DIFFERENT_CALLS):
            return WorldError(reason, self._hint)
        error = WorldError(
            f"rank {self._world.rank} is waiting at {self.location.words}, but other ranks did not arrive: {reason}",
            self._hint,
        )
        error.only_this_rank = _ENDED not in reason  # a rank that has not arrived does not raise it
        return error

    def _reason_to_fail(self, deadline: float) -> str | None:
        """Why a missing rank will not arrive: which rank, and why; None if all of them may still arrive."""
        control = self._control
        now = time.monotonic()
        if not control.is_open:
            if control.rank_0_ended:
                raise self._error(f"rank 0 ({_ENDED})")  # if rank 0 has served the store, nothing can be written to it
            raise RuntimeError("the connection was closed")
        ended = control.ended_ranks()
        asks = now >= self._next_question
        if asks:
            question = f"{Control.QUESTION}{self._log}"
            locations = map(RankLocation.parse, control.lines(question))
            self._answers |= {location.rank: location for location in locations}
            control.store.delete_key(question)
            control.announce(question)
            self._next_question = now + max(ANSWER_SECONDS, self._world.world_size / _ANSWERS_PER_SECOND)
        if not (asks or ended or now >= deadline):
            return None
        # Read after the answers: the answer of a rank that has arrived in the meantime is stale.
        arrived = self._arrived()
        missing = [rank for rank in range(self._world.world_size) if rank not in arrived]
        if absent := [rank for rank in missing if rank in ended]:
            return f"rank {_listed(absent)} ({_ENDED})"
        if missing and now >= deadline:
            return f"rank {_listed(missing)} (did not arrive before the timeout)"
        return self._skipped(missing, now) if asks else None

    def _skipped(self, missing: Sequence[int], now: float) -> str | None:
        """The reason if a missing rank has skipped this barrier. Logs where the missing ranks are, at intervals."""
        locations = {rank: self._answers.get(rank) for rank in missing}
        due = self._next_line + SILENT_SECONDS * (None in locations.values())
        if missing and now >= due:
            self._next_line = now + REPEAT_SECONDS
            where = [
                f"rank {rank} does not answer" if location is None else f"rank {rank} is in {location.words}"
                for rank, location in locations.items()
            ]
            logger.warning("rank {} is waiting at {}: {}", self._world.rank, self.location.words, _listed(where, "; "))
        for rank, location in locations.items():
            if location is None or not self._is_past(location):
                self._past_since.pop(rank, None)
            elif now - self._past_since.setdefault(rank, now) >= SILENT_SECONDS:
                return f"rank {rank} (it did not make this call, and is in {location.words})"
        return None

    def _is_past(self, location: RankLocation) -> bool:
        """Whether a rank has skipped this barrier.

        Such a rank has started more collectives since the previous barrier than this rank.
        """
        return location.collectives > self.location.collectives


def _listed(items: Sequence[object], separator: str = ", ") -> str:
    """The first items as text, and the number of the remaining ones."""
    text = separator.join(map(str, items[:_MAX_LISTED]))
    if len(items) > _MAX_LISTED:
        text += f" and {len(items) - _MAX_LISTED} more"
    return text
