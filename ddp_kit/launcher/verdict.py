"""How a job ended: who failed first, with what, what to do about it."""

import re
import signal
from collections import Counter
from collections.abc import Collection, Iterable
from dataclasses import asdict, dataclass
from typing import Any

from ddp_kit.exit_codes import ExitCode

_MOST_GROUPS = 3
_FEW = 4  # ranks that are listed one by one
# Addresses, ports and source lines differ from rank to rank in what is otherwise the same message.
_PECULIAR = re.compile(r"\[[^\]]*\](:\d+)?\s*")
# And these from one attempt to the next: process ids, addresses in memory, figures.
_NUMBER = re.compile(r"0x[0-9a-f]+|\d+")


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
    """Its exception, in one line, if anything is known of it."""
    printed: bool = False
    """Whether that stands on the console of its node, in full."""
    trace: str = ""
    """Its traceback, likewise."""
    step: int | None = None
    """The last optimizer step that its Trainer had done."""
    hint: str = ""
    """What to do about it, where the cause is a usual one."""
    at_start: bool = False
    """Whether it failed at the imports or the syntax of its script: starting again cannot help."""
    terminated: bool = False
    """Whether the launcher was terminating it before it ended."""
    secondary: bool = False
    """Whether it only says that another rank went away."""
    out_of_memory: bool = False
    """Whether the kernel has killed it for want of memory."""
    hung: bool = False
    """Whether the launcher has killed it because it did nothing any more."""
    others: tuple[str, ...] = ()
    """Where the other ranks of its node were at that time, a line each."""

    @property
    def from_outside(self) -> bool:
        """Whether someone else ended it."""
        return self.exit_code in (-signal.SIGKILL, -signal.SIGTERM) and not self.out_of_memory

    @property
    def stopped(self) -> bool:
        """Whether it only ended because it was told to."""
        return self.terminated and (self.exit_code < 0 or not self.message)

    @property
    def to_say(self) -> str:
        """Its exception, where the console may lack it: that of another node does."""
        return "" if self.printed and not self.host else self.message

    @property
    def how(self) -> str:
        """Its end in words."""
        if self.hung:
            return "hung"
        if self.out_of_memory:
            return f"out of memory, {_ending(self.exit_code)[0]}"
        return _ending(self.exit_code)[0]

    def __str__(self) -> str:
        return f"rank {self.rank} failed first: {self.described}"

    @property
    def described(self) -> str:
        """How it ended, where, and why."""
        where = f", host {self.host}" if self.host else ""
        when = f", after step {self.step}" if self.step is not None else ""
        because = f": {self.to_say}" if self.to_say else ""
        return f"{self.how} (local rank {self.local_rank}{where}, pid {self.pid}{when}){because}"


@dataclass(frozen=True)
class Outcome:
    """How a job ended; nothing set where all went well. The same on every node."""

    failures: tuple[Failure, ...] = ()
    ended_well: tuple[int, ...] = ()
    """The ranks that had ended with exit code 0 before the first failure."""
    stopped_by: int = 0
    """The signal that stopped the launcher itself, or the one of the node that left."""
    lost: str = ""
    """Why the job could not continue although no worker had failed."""
    started: bool = True
    """Whether any worker was."""
    note: str = ""
    """Why there was no further restart."""
    restarts: int = 0


@dataclass(frozen=True)
class Verdict:
    """The last lines for the user, and the exit code."""

    exit_code: int
    text: str = ""
    trace: str = ""
    """What to show above `text`: the traceback of the first failing rank."""


def first_failure(failures: tuple[Failure, ...]) -> Failure:
    """The worker that failed before all others; those that failed in consequence of another's end left aside."""
    return min(failures, key=lambda failure: (_consequence(failure), failure.after))


def _consequence(failure: Failure) -> int:
    """How likely a failure only follows from another one: 0 is a cause of its own."""
    if failure.stopped:
        return 4
    if failure.secondary:
        return 3
    if failure.exit_code == ExitCode.REQUEUE:
        return 2
    return int(failure.terminated)  # it was on its way out already


def alike(message: str) -> str:
    """What a message has in common with those of the same error on other ranks and in other attempts."""
    return _NUMBER.sub("#", _plain(message))


def asks_for_another_run(outcome: Outcome) -> bool:
    """Whether the workers have saved and asked to be started again, and none failed for a reason of its own."""
    return bool(outcome.failures) and first_failure(outcome.failures).exit_code == ExitCode.REQUEUE


def judge(outcome: Outcome, shown: Collection[int] = ()) -> Verdict:
    """The exit code of the first failing worker, and what to say of it.

    `shown`: the ranks whose traceback is the last thing on this console already.
    """
    if asks_for_another_run(outcome):
        return Verdict(ExitCode.REQUEUE, f"saved, to be started again (exit code {ExitCode.REQUEUE:d})")
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
        *_folded(after),
        outcome.note,
        first.hint and f"hint: {first.hint}",
    ]
    trace = "" if first.rank in shown else first.trace
    return Verdict(_ending(first.exit_code)[1], "\n  ".join(filter(None, lines)), trace)


def record(outcome: Outcome) -> dict[str, Any]:
    """The same for programs, to be written as JSON."""
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
        return (
            f"{in_words(ended_well)} ended early, with exit code 0, while others still needed {_it(ended_well)}; "
            f"then rank {first.rank} failed: {first.described}"
        )
    return str(first)


def _folded(failures: Iterable[Failure]) -> list[str]:
    """The other ranks, those that were stopped left out: one line for all that ended alike."""
    alike: dict[str, list[int]] = {}
    for failure in failures:
        if not failure.stopped:
            words = _plain(failure.to_say) or failure.how
            alike.setdefault(words, []).append(failure.rank)
    largest = Counter({words: len(ranks) for words, ranks in alike.items()}).most_common()
    lines = []
    for words, count in largest[:_MOST_GROUPS]:
        same = " with the same" if count > 1 else ""
        lines.append(f"{in_words(alike[words])} failed after it{same}: {words}")
    rest = sum(count for _, count in largest[_MOST_GROUPS:])
    return [*lines, f"{rest} more failed after it, each in another way"] if rest else lines


def _plain(message: str) -> str:
    return _PECULIAR.sub("", message).strip()


def in_words(ranks: Collection[int]) -> str:
    """Ranks in a sentence: by their numbers where they are few."""
    if len(ranks) > _FEW:
        return f"{len(ranks)} ranks"
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, sorted(ranks)))}"


def _it(ranks: Collection[int]) -> str:
    return "it" if len(ranks) == 1 else "them"


def _ending(exit_code: int) -> tuple[str, int]:
    if exit_code >= 0:
        return f"exit code {exit_code}", exit_code
    return f"killed by {_signal_name(-exit_code)}", ExitCode.of_signal(-exit_code)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
