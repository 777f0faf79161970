"""The rule for late, failed and hung workers of one round: when to wait, when to stop them, and which have failed.

It does no I/O and reads no clock: `Workers` reports what happens to the workers, and carries out the decisions. All
times are seconds since the start of the round.
"""

import signal
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum, auto

from ddp_kit.exit_codes import ExitCode
from ddp_kit.heartbeat import Phase

# A worker that has printed an uncaught exception gets at least this long to exit, or --shutdown-timeout if that is
# longer. NCCL's clean-up may wait for other ranks, which wait for this rank: only the launcher can end that.
EXIT_SECONDS = 5.0
# Time from SIGTERM to SIGKILL for ranks in a Trainer, after another rank failed: they cannot save without it, and
# Python does not run signal handlers during an NCCL collective.
TRAINING_SECONDS = 0.2
SAVING_SECONDS = 1.0  # the same while one of these ranks is saving


class Decision(Enum):
    """Decision on the workers that are still running."""

    WAIT = auto()
    """Let them run."""
    END = auto()
    """End them; they may save a checkpoint. No worker has failed."""
    STOP = auto()
    """Stop them, because another worker has failed or hangs."""


@dataclass(frozen=True)
class FailedWorker:
    """A worker that hung or exited with another code than 0."""

    local_rank: int
    pid: int
    code: int
    """The exit code; -N if signal N killed the worker."""
    after: float
    """When the worker ended, or raised the exception that ended it."""
    terminated: bool
    """Whether the launcher had begun to terminate the worker before it ended."""


class Endings:
    """How the workers of one round on one node have ended so far, and what follows from it.

    `shutdown_timeout`: seconds from SIGTERM to SIGKILL.
    """

    def __init__(self, shutdown_timeout: float) -> None:
        self._shutdown_timeout = shutdown_timeout
        self.running: dict[int, int] = {}
        """The process ids of the workers that are running, by local rank."""
        self.codes: dict[int, int] = {}
        """The exit codes of the workers that have ended, by local rank."""
        self.hung: int | None = None
        """The first local rank that hung. In uninterruptible sleep, it survives SIGKILL and has no exit code."""
        self._pids: dict[int, int] = {}
        self._after: dict[int, float] = {}
        self._raised: dict[int, float] = {}
        self._terminated: set[int] = set()

    # Events -----------------------------------------------------------------------------------------------------------

    def started(self, local_rank: int, pid: int) -> None:
        """Handle the start of a worker."""
        self._pids[local_rank] = pid
        self.running[local_rank] = pid

    def ended(self, local_rank: int, code: int, after: float) -> None:
        """Handle the end of a worker."""
        del self.running[local_rank]
        self.codes[local_rank] = 1 if local_rank in self._raised else code
        self._after[local_rank] = self._raised.get(local_rank, after)

    def hangs(self, local_rank: int) -> None:
        """Handle a worker that hangs, and that is about to be killed."""
        if self.hung is None:
            self.hung = local_rank

    def signalled(self) -> None:
        """Handle a signal that ends all running workers."""
        self._terminated |= self.running.keys() - {self.hung} - self._raised.keys()

    def killed_while_exiting(self, raised: Mapping[int, float]) -> None:
        """Handle workers that are about to be killed after they have raised an exception, at these times."""
        self._raised = {**raised}

    # Decisions --------------------------------------------------------------------------------------------------------

    def decide(self, exiting: Mapping[int, float], now: float) -> Decision:
        """Decide. `exiting`: the running workers that have printed an uncaught exception, and when they did."""
        failed = any(code not in (0, ExitCode.REQUEUE) for code in self.codes.values())
        if failed or self.hung is not None or self.exits_too_late(exiting, now):
            return Decision.STOP
        if self.running and self.seconds_left(now) != 0.0:
            return Decision.WAIT
        return Decision.END

    def exits_too_late(self, exiting: Mapping[int, float], now: float) -> bool:
        """Whether the exit of any of these workers takes too long. `exiting`: see `decide`."""
        limit = max(EXIT_SECONDS, self._shutdown_timeout)
        return any(now - raised >= limit for raised in exiting.values())

    def seconds_left(self, now: float) -> float | None:
        """Seconds that the running workers have after one has saved and exited with `REQUEUE`; None: no limit."""
        saved = [self._after[rank] for rank, code in self.codes.items() if code == ExitCode.REQUEUE]
        if not saved:
            return None
        return max(0.0, min(saved) + self._shutdown_timeout - now)

    # Results ----------------------------------------------------------------------------------------------------------

    def failed(self) -> list[FailedWorker]:
        """The workers that have failed, in the order in which they ended; those that were terminated come last."""
        codes = {**self.codes}
        if self.hung is not None:
            codes[self.hung] = codes.get(self.hung) or -signal.SIGKILL
        workers = [
            FailedWorker(rank, self._pids[rank], code, self._after.get(rank, 0.0), rank in self._terminated)
            for rank, code in codes.items()
            if code
        ]
        return sorted(workers, key=lambda worker: (worker.terminated, worker.after, worker.local_rank))

    def ended_well(self) -> list[int]:
        """The local ranks that exited with code 0 before the launcher terminated any worker."""
        return [rank for rank, code in sorted(self.codes.items()) if not code and rank not in self._terminated]

    def saved(self) -> bool:
        """Whether any worker saved a checkpoint and exited with `ExitCode.REQUEUE`, and no worker failed."""
        codes = set(self.codes.values())
        return ExitCode.REQUEUE in codes and codes <= {0, ExitCode.REQUEUE}


def seconds_to_stop(phases: Collection[Phase], shutdown_timeout: float) -> float:
    """Seconds from SIGTERM to SIGKILL for ranks in a Trainer, after another rank failed. `phases`: their activities."""
    needed = SAVING_SECONDS if Phase.CHECKPOINT in phases else TRAINING_SECONDS
    return min(shutdown_timeout, needed)
