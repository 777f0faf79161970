"""Which failures are followed by another try, and when: the counts behind `--max-restarts`. Pure, without a clock.

What counts against it is a failure without progress; one that others have ended is tried again at once, a crash at once
for the first time and then after 1, 2, 4 ... 60 s. The same error at the same step is not tried a second time. Nodes
that are lost have a budget of their own.
"""

from dataclasses import dataclass

from ddp_kit.launcher.verdict import Failure, alike

IDENTICAL_FAILURES = 5
"""After so many restarts in a row that ended in the same failure without progress, no further one is tried."""
LOST_NODES = 100
"""So often in a row a node may be lost without progress. Losing one is nobody's mistake, and costs little beside the
work it undoes; but where nodes go faster than a run gets on, a hundred tries have shown it."""
PROGRESS_SECONDS = 300.0
"""A round that lasted so long is no crash loop, in a script that notes no steps."""
LONGEST_WAIT = 60.0


@dataclass(frozen=True)
class Steps:
    """Between which optimizer steps the workers of a round were, as their Trainer has noted it."""

    began: int
    """What they went on from: 0, or that of a checkpoint."""
    reached: int


@dataclass(frozen=True)
class Again:
    """Another try."""

    words: str
    """How many there were, for the user."""
    wait: float
    """Seconds before it."""


@dataclass(frozen=True)
class NoMore:
    """No other try."""

    note: str
    """Why there is none although some were left, or what they were spent on; may be empty."""


class Restarts:
    """The counts of one job.

    Progress is a step that no earlier round has reached, in a round that went on from a later step than the last round
    with progress: what was done is kept then. A run that begins at 0 each time makes none, however far it comes.
    """

    def __init__(self, max_restarts: int) -> None:
        """`max_restarts`: failures in a row without progress that are followed by a restart."""
        self._max_restarts = max_restarts
        self.count = 0
        """How many there were, whatever for."""
        self._began = self._reached = 0  # of the latest round with progress; of any
        self._since = 0  # the step of the latest progress
        self._failures = 0  # since then
        self._losses = 0  # likewise
        self._crashes = 0  # likewise, in a row; without those that someone else has ended
        self._same: tuple[tuple[int, int, str], int] | None = None  # the latest failure, and how often in a row
        self._errors: set[tuple[int, str, int]] = set()  # all there were at a known step

    def ended(self, steps: Steps | None, seconds: float) -> None:
        """A round has ended, after so many seconds. `steps`: None where its workers have noted none."""
        if steps is None:
            if seconds >= PROGRESS_SECONDS:
                self._losses = 0
            return
        if steps.began > self._began and steps.reached > self._reached:
            self._began, self._since = steps.began, steps.reached
            self._failures = self._losses = self._crashes = 0
            self._same = None
        self._reached = max(self._reached, steps.reached)

    def lost(self) -> str:
        """A node was lost. Returns why the job ends; empty: it may continue."""
        self._losses += 1
        return f"nodes were lost {self._losses} times in a row without progress" * (self._losses > LOST_NODES)

    def failed(self, first: Failure) -> Again | NoMore:
        """A round has ended in this failure."""
        if first.at_start:
            return NoMore("not restarted: it failed at its imports" if self._failures < self._max_restarts else "")
        self._failures += 1
        times = self._count_alike(first)
        if self._is_repeated(first):
            return NoMore(f"not restarted again: the same error after step {first.step} twice, it is not by chance")
        if self._failures > self._max_restarts:
            spent = self._max_restarts and first.step is not None
            return NoMore(f"not restarted again: {self._max_restarts} in a row brought no progress" if spent else "")
        if times > IDENTICAL_FAILURES:
            return NoMore(f"not restarted again: the same failure {times} times in a row, without progress")
        self.count += 1
        return Again(self._words(), self._wait())

    def _count_alike(self, first: Failure) -> int:
        """How often in a row there was this failure. What someone else has ended is no crash, nor what lasted long."""
        kind = (first.rank, first.exit_code, _kind_of_error(first))
        lasted = first.step is None and first.after >= PROGRESS_SECONDS
        if lasted or first.from_outside:
            self._crashes, self._same = 0, None
        self._crashes += not first.from_outside
        before = self._same[1] if self._same is not None and self._same[0] == kind else 0
        self._same = (kind, before + 1)
        return before + 1

    def _is_repeated(self, first: Failure) -> bool:
        """Whether there was this error at this step before; on any rank: where all see it, chance says who is first."""
        if first.step is None or first.exit_code <= 0 or first.secondary or first.hung:
            return False
        error = (first.exit_code, alike(_kind_of_error(first)), first.step)
        repeated = error in self._errors
        self._errors.add(error)
        return repeated

    def _wait(self) -> float:
        doublings = min(self._crashes, 10) - 2  # more would pass LONGEST_WAIT anyway
        return min(LONGEST_WAIT, 2.0**doublings) if self._crashes > 1 else 0.0

    def _words(self) -> str:
        if self.count == self._failures:
            return f"restart {self.count} of {self._max_restarts}"
        return f"restart {self.count} ({self._failures} of {self._max_restarts} since step {self._since})"


def _kind_of_error(first: Failure) -> str:
    """By what it is known again. A mistake that ddpkit finds has other words after a restart: NaN in the first step."""
    return "" if first.printed else first.message
