"""The rule that decides whether the ranks of this node hang. Pure: it uses neither files nor a clock.

each check compares the heartbeats of all running ranks with those of the previous check:
    one has changed                       that rank is alive; the limit grows to twice its longest pause
    none has changed for the limit        a hang: once one rank is stuck, all others soon wait for it

A rank outside of the Trainer may take any time, unless others wait for it in a collective, or all running ranks are in
native code that does not return, such as the last one after the others have ended.
"""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from ddp_kit.heartbeat import Heartbeat, Phase
from ddp_kit.launcher.agent.stacks import Stack

DEFAULT_SECONDS = 300.0
"""The limit of a run without longer pauses."""
_MAX_CHECK_SECONDS = 1.0
_PAUSE_FACTOR = 2  # times the longest pause so far: a later evaluation may take longer, for example to compile again
_FIRST_STEPS = 2
_FIRST_COLLECTIVES = 10
_STARTUP_FACTOR = 10  # times the limit, for the first steps or collectives
_OTHER_NODES_FACTOR = 1.5  # times the limit: a node whose ranks only wait lets the node with the cause report first
# Files of debuggers: a process that runs one waits for its user.
_DEBUGGER = re.compile(r"(^|/)(i?pdb|bdb|pudb/\w+|debugpy/.*|pydevd\w*)\.py$")


@dataclass(frozen=True)
class NoProgress:
    """No rank of this node has made progress."""

    seconds: float
    limit: float

    @property
    def past_other_nodes_limit(self) -> bool:
        """Whether it has lasted so long that a node with the cause would have reported the hang by now."""
        return self.seconds >= _OTHER_NODES_FACTOR * self.limit


@dataclass
class _Rank:
    heartbeat: Heartbeat
    idle: float = 0.0
    in_native_code: float = 0.0
    """Seconds without a sign that its main thread executes Python code."""
    uncounted: float = 0.0
    """Seconds since its collectives were last counted, which they are unless it holds the interpreter lock."""
    collectives: int = 0
    """Those of the default group, or of the last one if it has been destroyed."""


class HangRule:
    """The rule for one round on this node.

    `floor`: the minimum limit in seconds. `any_script`: whether it also applies to scripts without a Trainer.
    """

    def __init__(self, floor: float, any_script: bool, now: float) -> None:
        self._floor = floor
        self._any_script = any_script
        self._ranks: dict[int, _Rank] = {}
        self._last_check = now
        self._pause = 0.0  # the longest pause so far
        self._stopped = 0.0  # how long a signal has kept any rank stopped

    @property
    def check_interval(self) -> float:
        """Seconds between two checks."""
        return min(_MAX_CHECK_SECONDS, self._floor / 4)

    def next_check(self, now: float) -> float:
        """Seconds until the next check."""
        return max(0.0, self._last_check + self.check_interval - now)

    def check(self, heartbeats: Mapping[int, Heartbeat], now: float, *, stopped: bool = False) -> NoProgress | None:
        """Return how long no rank has made progress; None: less than the limit.

        `heartbeats`: of the ranks that still run. `stopped`: whether a signal such as SIGSTOP has stopped any of them:
        then the minimum limit applies. At most two intervals are counted per check, so that a suspended machine or
        launcher is not taken for a hang.
        """
        passed = min(now - self._last_check, 2 * self.check_interval)
        self._last_check = now
        known = self._ranks
        self._ranks = {rank: self._after(known.get(rank), found, passed) for rank, found in heartbeats.items()}
        self._stopped = self._stopped + passed if stopped else 0.0
        idle, limit = min(rank.idle for rank in self._ranks.values()), self.limit
        if stopped:
            idle, limit = min(idle, self._stopped), self._floor
        elif not self._progress_expected():
            return None
        return NoProgress(idle, limit) if idle >= limit else None

    def reset(self) -> None:
        """Reset the idle times, after a pause with a legitimate reason."""
        for rank in self._ranks.values():
            rank.idle = rank.in_native_code = rank.uncounted = 0.0

    @property
    def limit(self) -> float:
        """How many seconds without progress count as a hang at this point of the run."""
        return max(self._floor * (1 if self._settled else _STARTUP_FACTOR), _PAUSE_FACTOR * self._pause)

    @property
    def _settled(self) -> bool:
        """Whether the run is past its first steps and not saving, which may take long on a slow disk."""
        every = [rank.heartbeat for rank in self._ranks.values()]
        settled = all(map(self._has_settled, self._ranks.values()))
        return settled and all(each.phase is not Phase.CHECKPOINT for each in every)

    def _has_settled(self, rank: _Rank) -> bool:
        if rank.heartbeat.step is None:
            return self._any_script and rank.collectives >= _FIRST_COLLECTIVES
        return rank.heartbeat.steps >= _FIRST_STEPS

    def _after(self, known: _Rank | None, found: Heartbeat, passed: float) -> _Rank:
        if known is None:
            return _Rank(found, collectives=found.collectives)
        after = _Rank(found, collectives=found.collectives or known.collectives)
        if known.heartbeat.python_at == found.python_at:
            after.in_native_code = known.in_native_code + passed
        if known.heartbeat.counted_at == found.counted_at:
            after.uncounted = known.uncounted + passed
        if known.heartbeat == found:
            after.idle = known.idle + passed
        elif self._in_trainer(known.heartbeat):  # pauses of user code say nothing about how long the Trainer takes
            self._pause = max(self._pause, known.idle)
        return after

    def _progress_expected(self) -> bool:
        """Whether any rank should make progress.

        It is in the Trainer, or in a collective that others did not reach, or all ranks are stuck in native code.
        """
        every = [rank.heartbeat for rank in self._ranks.values()]
        apart = self._any_script and len({each.collectives for each in every}) > 1
        return apart or any(map(self._in_trainer, every)) or all(map(self._is_in_native_code, self._ranks.values()))

    def _is_in_native_code(self, rank: _Rank) -> bool:
        """Whether its main thread has executed no Python code for the limit.

        A script without collectives may do so, for example while it waits for another program, if it does not hold the
        interpreter lock.
        """
        if not self._any_script or not rank.heartbeat.python_at or rank.in_native_code < self.limit:
            return False
        return bool(rank.collectives or rank.heartbeat.steps) or rank.uncounted >= self.limit

    @staticmethod
    def _in_trainer(heartbeat: Heartbeat) -> bool:
        return not heartbeat.phase.in_user_code


def culprit(heartbeats: Mapping[int, Heartbeat], stacks: Mapping[int, Stack]) -> int:
    """The rank that the others wait for: a stopped one, else one outside a collective, else the furthest behind."""

    def order(rank: int) -> tuple[bool, bool, int, int, int, int, int]:
        stack, own = stacks.get(rank, Stack()), heartbeats[rank]
        step = -1 if own.step is None else own.step
        within = (own.phase - Phase.CALLBACKS) % len(Phase)  # a step's end is noted just before its callbacks
        counts = own.collectives, step, own.all_collectives, within
        return (not stack.stopped, bool(stack.waits_for_ranks), *counts, rank)

    return min(heartbeats, key=order)


def all_wait_for_ranks(stacks: Collection[Stack]) -> bool:
    """Whether each of them only waits for other ranks, so that the cause is elsewhere."""
    return bool(stacks) and all(stack.waits_for_ranks and not stack.stopped for stack in stacks)


def may_take_long(heartbeat: Heartbeat) -> bool:
    """Whether a rank is in the user's code, for which the others may have to wait."""
    return heartbeat.phase.in_user_code or heartbeat.phase is Phase.CALLBACKS


def is_debugged(stacks: Iterable[Stack]) -> bool:
    """Whether a debugger runs in one of them."""
    return any(_DEBUGGER.search(frame.file) for stack in stacks for frame in stack.frames)
