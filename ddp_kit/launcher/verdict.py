"""How a job ended: who failed first, and with what."""

import signal
from dataclasses import dataclass

from ddp_kit.contract import ExitCode


@dataclass(frozen=True)
class Failure:
    """One worker that did not end well."""

    rank: int
    local_rank: int
    pid: int
    exit_code: int
    """As the operating system reports it; below 0: minus the number of the signal that ended it."""
    after: float
    """Seconds since this round's workers were started, by the clock of their own node."""
    host: str = ""
    """Its node; empty where the job has only one."""
    message: str = ""
    """What the worker left in its error file, if anything."""
    at_start: bool = False
    """Whether it failed at the imports or the syntax of its script: starting again cannot help."""
    told: bool = False
    """Whether the launcher had told it to stop before it ended."""

    @property
    def from_outside(self) -> bool:
        """Whether someone else ended it."""
        return self.exit_code in (-signal.SIGKILL, -signal.SIGTERM)

    def __str__(self) -> str:
        how, _ = _ending(self.exit_code)
        where = f", host {self.host}" if self.host else ""
        because = f": {self.message}" if self.message else ""
        return f"rank {self.rank} failed first: {how} (local rank {self.local_rank}{where}, pid {self.pid}){because}"


@dataclass(frozen=True)
class Outcome:
    """How a job ended; nothing set where all went well. The same on every node."""

    failures: tuple[Failure, ...] = ()
    stopped_by: int = 0
    """The signal that stopped the launcher itself, or the one of the node that left."""
    lost: str = ""
    """Why the job could not go on although no worker had failed."""
    started: bool = True
    """Whether any worker was."""
    note: str = ""
    """Why there was no further restart although there were some left."""
    restarts: int = 0


@dataclass(frozen=True)
class Verdict:
    """The last line for the user, and the exit code."""

    exit_code: int
    text: str = ""


def first_failure(failures: tuple[Failure, ...]) -> Failure:
    """The worker that failed before all others, those that were told to stop left aside."""
    return min(failures, key=lambda failure: (failure.told, failure.after))


def judge(outcome: Outcome) -> Verdict:
    """The exit code of the first failing worker, and a line that names it."""
    if outcome.lost:
        code: int = ExitCode.NODE_LOST if outcome.started else ExitCode.LAUNCH_FAILED
        code = ExitCode.of_signal(outcome.stopped_by) if outcome.stopped_by else code
        by = f" (stopped by {_signal_name(outcome.stopped_by)})" if outcome.stopped_by else ""
        return Verdict(code, f"the job cannot {'go on' if outcome.started else 'start'}: {outcome.lost}{by}")
    if outcome.stopped_by:
        return Verdict(ExitCode.of_signal(outcome.stopped_by), f"stopped by {_signal_name(outcome.stopped_by)}")
    if not outcome.failures:
        return Verdict(ExitCode.OK)
    first = first_failure(outcome.failures)
    note = f"\n  {outcome.note}" if outcome.note else ""
    return Verdict(_ending(first.exit_code)[1], f"{first}{note}")


def _ending(exit_code: int) -> tuple[str, int]:
    if exit_code >= 0:
        return f"exit code {exit_code}", exit_code
    return f"killed by {_signal_name(-exit_code)}", ExitCode.of_signal(-exit_code)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
