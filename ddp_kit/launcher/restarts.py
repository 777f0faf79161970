"""Which failures are followed by a restart, and when: the counts behind `--max-restarts`. Pure, without a clock.

A failure without progress counts against the limit. Workers killed from outside restart at once; so does a first
crash, and further ones after 1, 2, 4 ... 60 s. The same error at the same step is not retried a second time. Lost
nodes have a limit of their own.
"""

from dataclasses import dataclass

from ddp_kit.launcher.verdict import Failure, alike

IDENTICAL_FAILURES = 5
"""The job ends after so many consecutive restarts that ended in the same failure without progress."""
LOST_NODES = 100
"""The job ends after so many consecutive losses of nodes without progress: they are not the script's fault."""
PROGRESS_SECONDS = 300.0
"""In a script that records no steps, a round that lasted this long is not part of a crash loop."""
LONGEST_WAIT = 60.0


@dataclass(frozen=True)
class Steps:
    """The range of optimizer steps of a round, as its Trainer recorded it."""

    began: int
    """The step the round started from: 0, or that of a checkpoint."""
    reached: int


@dataclass(frozen=True)
class Restart:
    """The job restarts its workers."""

    words: str
    """The count, for the message: `restart 1 of 3`."""
    wait: float
    """Seconds before the restart."""


@dataclass(frozen=True)
class GiveUp:
    """The job ends."""

    note: str
    """Why the job does not restart, if --max-restarts alone does not explain it; may be empty."""


class Restarts:
    """The counts of one job.

    A round made progress if it started from a later step than the last round with progress, and reached a new step. A
    run that starts from step 0 each time never makes progress.
    """

    def __init__(self, max_restarts: int) -> None:
        """`max_restarts`: how many consecutive failures without progress are followed by a restart."""
        self._max_restarts = max_restarts
        self.count = 0
        """All restarts after failures."""
        self._began = self._reached = 0  # first step of the latest round with progress; last step of any round
        self._since = 0  # the step of the latest progress
        self._failures = 0  # since the latest progress
        self._losses = 0  # of nodes, since the latest progress
        self._crashes = 0  # consecutive, since the latest progress; without workers killed from outside
        self._same: tuple[tuple[int, int, str], int] | None = None  # the latest failure, how often in a row
        self._errors: set[tuple[int, str, int]] = set()  # all errors at a known step

    def ended(self, steps: Steps | None, seconds: float) -> None:
        """A round ended after `seconds`. `steps`: None if its workers recorded none."""
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
        """A node was lost. Returns why the job ends; empty: it continues."""
        self._losses += 1
        return f"nodes were lost {self._losses} times in a row without progress" * (self._losses > LOST_NODES)

    def failed(self, first: Failure) -> Restart | GiveUp:
        """A round ended in this failure."""
        if first.at_start:
            return GiveUp(
                "not restarted: the imports of the script failed" if self._failures < self._max_restarts else ""
            )
        self._failures += 1
        times = self._count_alike(first)
        if self._is_repeated(first):
            return GiveUp(f"not restarted again: the same error occurred twice after step {first.step}")
        if self._failures > self._max_restarts:
            spent = self._max_restarts and first.step is not None
            return GiveUp(
                f"not restarted again: {self._max_restarts} consecutive restarts made no progress" if spent else ""
            )
        if times > IDENTICAL_FAILURES:
            return GiveUp(f"not restarted again: the same failure {times} times in a row without progress")
        self.count += 1
        return Restart(self._words(), self._wait())

    def _count_alike(self, first: Failure) -> int:
        """Consecutive occurrences of this failure. Workers killed from outside and long rounds are not a crash loop."""
        kind = (first.rank, first.exit_code, _kind_of_error(first))
        lasted = first.step is None and first.after >= PROGRESS_SECONDS
        if lasted or first.from_outside:
            self._crashes, self._same = 0, None
        self._crashes += not first.from_outside
        before = self._same[1] if self._same is not None and self._same[0] == kind else 0
        self._same = (kind, before + 1)
        return before + 1

    def _is_repeated(self, first: Failure) -> bool:
        """Whether this error occurred at this step before, on any rank: if all ranks fail, any may be the first."""
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
    """What identifies an error. Empty for ddpkit's own errors, whose message differs after a restart."""
    return "" if first.printed else first.message
