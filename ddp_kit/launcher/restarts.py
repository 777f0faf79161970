"""Which failures are followed by a restart, and when: the counts behind `--max-restarts`. Pure, without a clock.

A failure without progress counts against the limit. After a first crash, or if something else killed a worker, the
restart is immediate; after further crashes it is delayed by 1, 2, 4 ... 60 s. The same error at the same step is
retried only once. Lost nodes have a limit of their own.
"""

from dataclasses import dataclass

from ddp_kit.launcher.verdict import Failure, normalised

IDENTICAL_FAILURES = 5
"""The job ends after this many consecutive restarts with the same failure and no progress."""
LOST_NODES = 100
"""The job ends after this many consecutive losses of nodes without progress. High: they are not the script's fault."""
PROGRESS_SECONDS = 300.0
"""In a script that records no steps, a round that lasted this long is not part of a crash loop."""
MAX_WAIT = 60.0


@dataclass(frozen=True)
class Steps:
    """The range of optimizer steps of a round, as its Trainer recorded it."""

    began: int
    """The step the round started from: 0, or that of a checkpoint."""
    reached: int


@dataclass(frozen=True)
class Restart:
    """The job restarts its workers."""

    description: str
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

    def round_ended(self, steps: Steps | None, seconds: float) -> None:
        """Note that a round ended after `seconds`. `steps`: None if its workers recorded none."""
        if steps is None:
            if seconds >= PROGRESS_SECONDS:
                self._losses = 0
            return
        if steps.began > self._began and steps.reached > self._reached:
            self._began, self._since = steps.began, steps.reached
            self._failures = self._losses = self._crashes = 0
            self._same = None
        self._reached = max(self._reached, steps.reached)

    def node_lost(self) -> str:
        """Note that a node was lost. Return why the job ends; empty: it continues."""
        self._losses += 1
        return f"nodes were lost {self._losses} times in a row without progress" * (self._losses > LOST_NODES)

    def round_failed(self, first: Failure) -> Restart | GiveUp:
        """Decide what follows a round that ended with this failure."""
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
        return Restart(self._description(), self._wait())

    def _count_alike(self, first: Failure) -> int:
        """Count consecutive occurrences of this failure; killed workers and long rounds are no crash loop."""
        kind = (first.rank, first.exit_code, _kind_of_error(first))
        lasted = first.step is None and first.after >= PROGRESS_SECONDS
        if lasted or first.from_outside:
            self._crashes, self._same = 0, None
        self._crashes += not first.from_outside
        before = self._same[1] if self._same is not None and self._same[0] == kind else 0
        self._same = (kind, before + 1)
        return before + 1

    def _is_repeated(self, first: Failure) -> bool:
        """Whether this error occurred at this step before, on any rank: if all fail, any of them may be the first."""
        if first.step is None or first.exit_code <= 0 or first.secondary or first.hung:
            return False
        error = (first.exit_code, normalised(_kind_of_error(first)), first.step)
        repeated = error in self._errors
        self._errors.add(error)
        return repeated

    def _wait(self) -> float:
        doublings = min(self._crashes, 10) - 2  # more would pass MAX_WAIT anyway
        return min(MAX_WAIT, 2.0**doublings) if self._crashes > 1 else 0.0

    def _description(self) -> str:
        if self.count == self._failures:
            return f"restart {self.count} of {self._max_restarts}"
        return f"restart {self.count} ({self._failures} of {self._max_restarts} since step {self._since})"


def _kind_of_error(first: Failure) -> str:
    """The message that identifies an error; empty for ddpkit's own errors, whose message differs after a restart."""
    return "" if first.printed else first.message
