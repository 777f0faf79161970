"""Whether the ranks of this node still do anything: a pure rule, without files or a clock of its own.

each look: the signs of life of every rank that runs
    a sign has changed                    that rank is alive; twice the longest pause so far is allowed
    nobody's has, for the limit's time    a hang: once one rank is stuck, all others soon wait for it
"""

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from ddp_kit.heartbeat import Phase, Signs
from ddp_kit.launcher.agent.stacks import Stack

DEFAULT_SECONDS = 300.0
"""After which nobody is waited for any longer, where the run itself has not shown that it makes longer pauses."""
_LONGEST_LOOK_SECONDS = 1.0
_PAUSES = 2  # so many times the longest pause is too long: an evaluation may compile once more
_FIRST_STEPS = 2
_FIRST_COLLECTIVES = 10
_FIRST_ALLOWANCE = 10
_OF_OTHER_NODES = 1.5  # times the limit: other nodes, which may have the cause, come first
# What waits for a person.
_DEBUGGER = re.compile(r"(^|/)(i?pdb|bdb|pudb/\w+|debugpy/.*|pydevd\w*)\.py$")


@dataclass(frozen=True)
class Quiet:
    """Nobody on this node has done anything."""

    seconds: float
    limit: float

    @property
    def long(self) -> bool:
        """So long that another node would have said so if the cause were there to be seen."""
        return self.seconds >= _OF_OTHER_NODES * self.limit


@dataclass
class _Rank:
    signs: Signs
    idle: float = 0.0


class Watch:
    """One round of this node. `floor`: seconds; `any_script`: whether collectives without a Trainer count, too."""

    def __init__(self, floor: float, any_script: bool, now: float) -> None:
        self._floor = floor
        self._any_script = any_script
        self._ranks: dict[int, _Rank] = {}
        self._looked = now
        self._pause = 0.0  # the longest so far
        self._stopped = 0.0  # for so long, any rank

    @property
    def period(self) -> float:
        """Seconds between two looks."""
        return min(_LONGEST_LOOK_SECONDS, self._floor / 4)

    def due(self, now: float) -> float:
        """Seconds until the next look."""
        return max(0.0, self._looked + self.period - now)

    def look(self, signs: Mapping[int, Signs], now: float, *, stopped: bool = False) -> Quiet | None:
        """`signs`: of each rank that still runs. Returns for how long nobody has done anything, once that is too long.

        `stopped`: whether a signal has stopped any of them; that one is not in the midst of anything long. Only time in
        which somebody looked counts: where the whole machine, or this process, stood still, nobody hangs.
        """
        passed = min(now - self._looked, 2 * self.period)
        self._looked = now
        known = self._ranks
        self._ranks = {rank: self._after(known.get(rank), found, passed) for rank, found in signs.items()}
        self._stopped = self._stopped + passed if stopped else 0.0
        quiet, limit = min(rank.idle for rank in self._ranks.values()), self.limit
        if stopped:
            quiet, limit = min(quiet, self._stopped), self._floor
        elif not self._expected():
            return None
        return Quiet(quiet, limit) if quiet >= limit else None

    def start_again(self) -> None:
        """What was quiet had its reason."""
        for rank in self._ranks.values():
            rank.idle = 0.0

    @property
    def limit(self) -> float:
        """Seconds without any sign that are too many by now."""
        return max(self._floor * (1 if self._settled else _FIRST_ALLOWANCE), _PAUSES * self._pause)

    @property
    def _settled(self) -> bool:
        """A save waits for the disk, for as long as that takes: there the allowance of the first steps holds."""
        signs = [rank.signs for rank in self._ranks.values()]
        return all(map(self._has_settled, signs)) and all(each.phase is not Phase.CHECKPOINT for each in signs)

    def _has_settled(self, signs: Signs) -> bool:
        if signs.step is None:
            return self._any_script and signs.collectives >= _FIRST_COLLECTIVES
        return signs.steps >= _FIRST_STEPS

    def _after(self, known: _Rank | None, found: Signs, passed: float) -> _Rank:
        if known is None:
            return _Rank(found)
        if known.signs == found:
            return _Rank(found, known.idle + passed)
        if self._is_expected(known.signs):  # else it did what it liked
            self._pause = max(self._pause, known.idle)
        return _Rank(found)

    def _expected(self) -> bool:
        """Whether anyone is where something has to happen: in the Trainer, or in a collective before others."""
        every = [rank.signs for rank in self._ranks.values()]
        apart = self._any_script and len({signs.collectives for signs in every}) > 1
        return apart or any(map(self._is_expected, every))

    @staticmethod
    def _is_expected(signs: Signs) -> bool:
        return not signs.phase.is_script_s


def culprit(signs: Mapping[int, Signs], stacks: Mapping[int, Stack]) -> int:
    """The rank that the others wait for: one that is stopped, or not in a collective; else the one that is behind."""

    def order(rank: int) -> tuple[bool, bool, int, int, int, int, int]:
        stack, own = stacks.get(rank, Stack()), signs[rank]
        step = -1 if own.step is None else own.step
        within = (own.phase - Phase.CALLBACKS) % len(Phase)  # a step's end is noted just before its callbacks
        counts = own.collectives, step, own.all_collectives, within
        return (not stack.stopped, bool(stack.waits_for_ranks), *counts, rank)

    return min(signs, key=order)


def all_wait(stacks: Collection[Stack]) -> bool:
    """Whether the cause is not among them: each only waits for other ranks."""
    return bool(stacks) and all(stack.waits_for_ranks and not stack.stopped for stack in stacks)


def may_take_long(signs: Signs) -> bool:
    """Whether a rank is in the user's own code, which the others may be waiting for with good reason."""
    return signs.phase.is_script_s or signs.phase is Phase.CALLBACKS


def is_debugged(stacks: Iterable[Stack]) -> bool:
    """Whether a person looks into one of them."""
    return any(_DEBUGGER.search(frame.file) for stack in stacks for frame in stack.frames)
