"""How a job ended: which rank failed first, why, and what to do about it."""

import re
import signal
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from ddp_kit.exit_codes import ExitCode

_MAX_GROUPS = 3
_MAX_LISTED_RANKS = 4
# Addresses, ports and source lines, which differ between the ranks in the same error message.
_RANK_SPECIFIC = re.compile(r"\[[^\]]*\](:\d+)?\s*")
# Process ids, memory addresses and other numbers, which differ between the attempts in the same error message.
_NUMBER = re.compile(r"0x[0-9a-f]+|\d+")


@dataclass(frozen=True)
class Failure:
    """One worker that failed. The field names are those of verdict.json."""

    rank: int
    local_rank: int
    pid: int
    exit_code: int
    """Negative: minus the number of the signal that killed it."""
    after: float
    """Seconds since this round's workers were started, by the clock of their node."""
    host: str = ""
    """Its node; empty if the job has only one."""
    message: str = ""
    """Its exception in one line; empty: unknown."""
    printed: bool = False
    """Whether a rank of its node has already printed the whole message."""
    printed_here: bool = False
    """Whether it was this rank that printed it."""
    trace: str = ""
    """Its traceback; empty: unknown."""
    step: int | None = None
    """The last optimizer step that its Trainer completed."""
    hint: str = ""
    """What to do about it, for known causes."""
    at_start: bool = False
    """Whether its script failed at its imports or with a syntax error, so that a restart cannot help."""
    terminated: bool = False
    """Whether the launcher had begun to terminate it before it ended."""
    secondary: bool = False
    """Whether its error only says that another rank is gone."""
    out_of_memory: bool = False
    """Whether the kernel's out-of-memory killer killed it."""
    hung: bool = False
    """Whether the launcher killed it because it hung."""
    others: tuple[str, ...] = ()
    """What the other ranks of its node were doing at that time, in lines of text."""

    @property
    def from_outside(self) -> bool:
        """Whether something other than the launcher and the out-of-memory killer killed it."""
        return self.exit_code in (-signal.SIGKILL, -signal.SIGTERM) and not self.out_of_memory

    @property
    def stopped(self) -> bool:
        """Whether it only ended because the launcher terminated it."""
        return self.terminated and (self.exit_code < 0 or not self.message)

    @property
    def message_to_show(self) -> str:
        """Its exception, unless it is already on this console."""
        return "" if self.printed and not self.host else self.message

    @property
    def how(self) -> str:
        """`exit code 1`, `killed by SIGKILL`, `out of memory, ...` or `hung`."""
        if self.hung:
            return "hung"
        if self.out_of_memory:
            return f"out of memory, {_how_ended(self.exit_code)[0]}"
        return _how_ended(self.exit_code)[0]

    def __str__(self) -> str:
        return f"rank {self.rank} failed first: {self.described}"

    @property
    def described(self) -> str:
        """How it ended, on which host, after which step, and why."""
        where = f", host {self.host}" if self.host else ""
        when = f", after step {self.step}" if self.step is not None else ""
        because = f": {self.message_to_show}" if self.message_to_show else ""
        return f"{self.how} (local rank {self.local_rank}{where}, pid {self.pid}{when}){because}"


@dataclass(frozen=True)
class Outcome:
    """How a job ended; the defaults mean success. The same on every node, and in verdict.json."""

    failures: tuple[Failure, ...] = ()
    ended_well: tuple[int, ...] = ()
    """The ranks that exited with code 0 before the first failure."""
    stopped_by: int = 0
    """The signal that stopped this launcher, or that of a node that left."""
    lost: str = ""
    """Why the job could not start or continue, if not because of a failed worker."""
    started: bool = True
    """Whether any worker was started."""
    note: str = ""
    """Why there was no restart."""
    restarts: int = 0


@dataclass(frozen=True)
class Verdict:
    """The last lines for the user, and the exit code."""

    exit_code: int
    text: str = ""
    trace: str = ""
    """The traceback of the rank that failed first, to be printed above `text`."""


def first_failure(failures: tuple[Failure, ...]) -> Failure:
    """The earliest failure, with secondary failures last; if several have its error, the rank that printed it."""
    first = min(failures, key=lambda failure: (_secondary_level(failure), failure.after))
    same = [each for each in failures if each.printed_here and each.message == first.message and not each.secondary]
    return min(same, key=lambda failure: failure.after, default=first)


def _secondary_level(failure: Failure) -> int:
    """How likely a failure is just a consequence of another one; 0: a root cause."""
    if failure.stopped:
        return 4
    if failure.secondary:
        return 3
    if failure.exit_code == ExitCode.REQUEUE:
        return 2
    return int(failure.terminated)


def normalised(message: str) -> str:
    """The message without the parts that differ between ranks and attempts for the same error."""
    return _NUMBER.sub("#", _plain(message))


def asks_for_another_run(outcome: Outcome) -> bool:
    """Whether the workers saved and asked for another run, and none failed for another reason."""
    return bool(outcome.failures) and first_failure(outcome.failures).exit_code == ExitCode.REQUEUE


def judge(outcome: Outcome, shown: Collection[int] = ()) -> Verdict:
    """The exit code of the worker that failed first, and the last lines for the user.

    `shown`: the ranks whose traceback is already the last output on this console.
    """
    if asks_for_another_run(outcome):
        return Verdict(ExitCode.REQUEUE, f"saved; start the job again to continue (exit code {ExitCode.REQUEUE:d})")
    if outcome.lost:
        code: int = ExitCode.NODE_LOST if outcome.started else ExitCode.LAUNCH_FAILED
        code = ExitCode.of_signal(outcome.stopped_by) if outcome.stopped_by else code
        by = f" (stopped by {_signal_name(outcome.stopped_by)})" if outcome.stopped_by else ""
        return Verdict(code, f"the job cannot {'continue' if outcome.started else 'start'}: {outcome.lost}{by}")
    if outcome.stopped_by:
        return Verdict(ExitCode.of_signal(outcome.stopped_by), f"stopped by {_signal_name(outcome.stopped_by)}")
    if not outcome.failures:
        return Verdict(ExitCode.OK)
    first = first_failure(outcome.failures)
    after = [failure for failure in outcome.failures if failure is not first]
    lines = [
        _headline(first, outcome.ended_well),
        *first.others,
        *_grouped(after, first),
        outcome.note,
        first.hint and f"hint: {first.hint}",
    ]
    trace = "" if first.rank in shown else first.trace
    return Verdict(_how_ended(first.exit_code)[1], "\n  ".join(filter(None, lines)), trace)


def record(outcome: Outcome) -> dict[str, Any]:
    """The outcome and the verdict for programs, to be written as JSON."""
    verdict = judge(outcome)
    first = first_failure(outcome.failures) if outcome.failures else None
    return {
        "exit_code": int(verdict.exit_code),
        "text": verdict.text,
        "first_failure": None if first is None else asdict(first) | {"how": first.how},
        **asdict(outcome),
    }


def _headline(first: Failure, ended_well: tuple[int, ...]) -> str:
    if first.secondary and ended_well:
        them = "it" if len(ended_well) == 1 else "them"
        return (
            f"{rank_list(ended_well)} ended early, with exit code 0, while others still needed {them}; "
            f"then rank {first.rank} failed: {first.described}"
        )
    return str(first)


def _grouped(failures: Iterable[Failure], first: Failure) -> list[str]:
    """One line per group of other ranks with the same error, without ranks that the launcher stopped.

    An error that is the same as the first rank's is not repeated.
    """
    by_message: dict[str, list[int]] = {}
    for failure in failures:
        if not failure.stopped:
            message = _plain(failure.message_to_show) or failure.how
            known = first.message_to_show and normalised(message) == normalised(first.message_to_show)
            message = "" if known else message
            by_message.setdefault(message, []).append(failure.rank)
    largest = Counter({message: len(ranks) for message, ranks in by_message.items()}).most_common()
    lines = []
    for message, count in largest[:_MAX_GROUPS]:
        same = " with the same error" if count > 1 or not message else ""
        ranks = rank_list(by_message[message])
        lines.append(f"{ranks} then failed{same}: {message}" if message else f"{ranks} then failed{same}")
    rest = sum(count for _, count in largest[_MAX_GROUPS:])
    return [*lines, f"{rest} more ranks then failed, with different errors"] if rest else lines


def _plain(message: str) -> str:
    return _RANK_SPECIFIC.sub("", message).strip()


def rank_list(ranks: Collection[int]) -> str:
    """`rank 3`, `ranks 1, 2`, or only their number if there are many, as in `7 ranks`."""
    if len(ranks) > _MAX_LISTED_RANKS:
        return f"{len(ranks)} ranks"
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"


def _how_ended(exit_code: int) -> tuple[str, int]:
    if exit_code >= 0:
        return f"exit code {exit_code}", exit_code
    return f"killed by {_signal_name(-exit_code)}", ExitCode.of_signal(-exit_code)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
