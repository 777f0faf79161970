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
    time: float
    """Seconds since 1970."""
    message: str = ""
    """What the worker left in its error file, if anything."""


@dataclass(frozen=True)
class Outcome:
    """How the workers of this node ended; nothing set where all went well."""

    failures: tuple[Failure, ...] = ()
    stopped_by: signal.Signals | None = None
    """The signal that stopped the launcher itself."""


@dataclass(frozen=True)
class Verdict:
    """The last line for the user, and the exit code."""

    exit_code: int
    text: str = ""


def judge(outcome: Outcome) -> Verdict:
    """The exit code of the first failing worker, and a line that names it."""
    if outcome.stopped_by is not None:
        return Verdict(ExitCode.of_signal(outcome.stopped_by), f"stopped by {outcome.stopped_by.name}")
    if not outcome.failures:
        return Verdict(ExitCode.OK)
    # Workers that the launcher told to stop after the first failure report SIGTERM at about the same time.
    first = min(outcome.failures, key=lambda failure: (failure.exit_code == -signal.SIGTERM, failure.time))
    how, code = _ending(first.exit_code)
    because = f": {first.message}" if first.message else ""
    return Verdict(
        code, f"rank {first.rank} failed first: {how} (local rank {first.local_rank}, pid {first.pid}){because}"
    )


def _ending(exit_code: int) -> tuple[str, int]:
    if exit_code >= 0:
        return f"exit code {exit_code}", exit_code
    number = -exit_code
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = f"signal {number}"
    return f"killed by {name}", ExitCode.of_signal(number)
