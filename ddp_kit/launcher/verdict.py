"""The verdict on a job: which rank failed first, why, and the exit code."""

import re
import signal
from collections.abc import Collection, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ddp_kit.exit_codes import ExitCode

_MAX_GROUPS = 3
_MAX_LISTED_RANKS = 4
_MAX_HEALTH_LINES = 3
# Addresses, ports and source lines, which differ between ranks although the error is the same.
_RANK_SPECIFIC = re.compile(r"\[[^\]]*\](:\d+)?\s*")
# Process ids, memory addresses and other numbers, which differ between attempts although the error is the same.
_NUMBER = re.compile(r"0x[0-9a-f]+|\d+")


@dataclass(frozen=True)
class Failure:
    """One worker that failed. verdict.json has the same field names."""

    rank: int
    local_rank: int
    pid: int
    exit_code: int
    """The worker's exit code; -N if signal N killed the worker."""
    after: float
    """Seconds since this round's workers were started, by the clock of their node."""
    host: str = ""
    """Host name of the worker's node; empty if the job has only one node."""
    message: str = ""
    """The worker's exception in one line; empty: unknown."""
    printed: bool = False
    """Whether a rank of the worker's node has already printed the whole message."""
    printed_here: bool = False
    """Whether this rank printed the message."""
    trace: str = ""
    """The worker's traceback; empty: unknown."""
    step: int | None = None
    """The last optimizer step that the worker's Trainer completed, or None if unknown."""
    hint: str = ""
    """What to do about the failure; empty: the cause is not known."""
    at_start: bool = False
    """Whether the script failed at its imports or with a syntax error. A restart cannot fix that."""
    terminated: bool = False
    """Whether the launcher had begun to terminate the worker before the worker ended."""
    secondary: bool = False
    """Whether the worker's error only reports that another rank has ended."""
    out_of_memory: bool = False
    """Whether the kernel's out-of-memory killer killed the worker."""
    hung: bool = False
    """Whether the launcher killed the worker because it hung."""
    faulty: bool = False
    """Whether the other ranks have found that the worker computes wrong gradients. `exit_code` is then FAULTY."""
    others: tuple[str, ...] = ()
    """What the other ranks of the worker's node were doing when it failed, as lines of text."""
    health: tuple[str, ...] = ()
    """What the kernel and the GPUs' driver of the worker's node have reported, as lines of text."""

    @property
    def from_outside(self) -> bool:
        """Whether the worker was killed by SIGKILL or SIGTERM, but not by the kernel's out-of-memory killer."""
        return self.exit_code in (-signal.SIGKILL, -signal.SIGTERM) and not self.out_of_memory

    @property
    def stopped(self) -> bool:
        """Whether the worker ended only because the launcher terminated it."""
        return self.terminated and (self.exit_code < 0 or not self.message)

    @property
    def message_to_show(self) -> str:
        """The worker's exception; empty if it is already on this console."""
        return "" if self.printed and not self.host else self.message

    @property
    def how(self) -> str:
        """How the worker ended: `exit code 1`, `killed by SIGKILL`, `out of memory, ...` or `hung`."""
        if self.hung:
            return "hung"
        how = f"exit code {self.exit_code}"
        if self.exit_code < 0:
            how = f"killed by {_signal_name(-self.exit_code)}"
        return f"out of memory, {how}" if self.out_of_memory else how

    def __str__(self) -> str:
        return f"rank {self.rank} failed first: {self.described}"

    @property
    def described(self) -> str:
        """How the worker ended, on which host, after which step, and why."""
        details = [f"local rank {self.local_rank}"]
        if self.host:
            details.append(f"host {self.host}")
        details.append(f"pid {self.pid}")
        if self.step is not None:
            details.append(f"after step {self.step}")
        return ": ".join(filter(None, [f"{self.how} ({', '.join(details)})", self.message_to_show]))


@dataclass(frozen=True)
class Outcome:
    """How a job ended; the default values mean success. All nodes get the same verdict. verdict.json contains it."""

    failures: tuple[Failure, ...] = ()
    """All failures on the node that hosts the rendezvous; only the first failure on the other nodes."""
    ended_well: tuple[int, ...] = ()
    """The ranks that exited with code 0 before the first failure."""
    stopped_by: int = 0
    """The signal that stopped this launcher, or the launcher of a node that left."""
    lost: str = ""
    """Why the job could not start or continue, if the reason is not a failed worker."""
    started: bool = True
    """Whether any worker was started."""
    usage: bool = False
    """Whether the command lines of the nodes contradict each other, so that the same commands would fail again."""
    note: str = ""
    """Why there was no restart."""
    restarts: int = 0
    text: str = ""
    """The text of the verdict on failures of which only the first is here; empty: all failures are here."""


@dataclass(frozen=True)
class Verdict:
    """The final message for the user, and the exit code of the launcher."""

    exit_code: int
    text: str = ""
    trace: str = ""
    """The traceback of the rank that failed first, to be printed above `text`."""


def first_failure(failures: tuple[Failure, ...]) -> Failure:
    """Return the failure that most likely is the root cause; among several equally likely failures, the earliest.

    If several ranks have the same error, return the failure of the rank that printed the error.
    """
    first = min(failures, key=lambda failure: (_secondary_level(failure), failure.after))
    printed = [failure for failure in failures if failure.printed_here and not failure.secondary]
    same = [failure for failure in printed if failure.message == first.message]
    return min(same, key=lambda failure: failure.after, default=first)


def _secondary_level(failure: Failure) -> int:
    """How likely a failure is to be only a consequence of another one, from 0 (a root cause) to 4."""
    if failure.stopped:
        return 4
    if failure.secondary:
        return 3
    if failure.exit_code == ExitCode.REQUEUE:
        return 2
    return int(failure.terminated)


def normalised(message: str) -> str:
    """The message without the parts that may differ between ranks or attempts even if the error is the same."""
    return _NUMBER.sub("#", _plain(message))


def asks_for_another_run(outcome: Outcome) -> bool:
    """Whether the workers saved a checkpoint and asked for another run, and no worker failed for another reason."""
    return bool(outcome.failures) and first_failure(outcome.failures).exit_code == ExitCode.REQUEUE


def summary(outcome: Outcome) -> Outcome:
    """The outcome with the verdict in place of all failures but the first. Its size does not depend on their number."""
    if not outcome.failures:
        return outcome
    return replace(outcome, failures=(first_failure(outcome.failures),), ended_well=(), text=judge(outcome).text)


def judge(outcome: Outcome, shown: Collection[int] = ()) -> Verdict:
    """Return the final message for the user and the exit code of the launcher.

    After a failure, the exit code is that of the worker that failed first. `shown`: the ranks whose tracebacks are the
    last output on this console and need not be shown again.
    """
    if asks_for_another_run(outcome):
        return Verdict(
            ExitCode.REQUEUE, f"the job saved a checkpoint; start it again to continue (exit code {ExitCode.REQUEUE:d})"
        )
    if outcome.usage:
        return Verdict(
            ExitCode.USAGE,
            f"the nodes of the job were started with different settings: {outcome.lost}\n"
            "  hint: use the same --nnodes on all nodes, and a different --node-rank on each node",
        )
    stopped = f"stopped by {_signal_name(outcome.stopped_by)}"
    if outcome.lost:
        code = ExitCode.LAUNCH_FAILED
        text = f"the job cannot start: {outcome.lost}"
        if outcome.started:
            code = ExitCode.NODE_LOST
            text = f"the job cannot continue: {outcome.lost}"
        if outcome.stopped_by:
            return Verdict(ExitCode.of_signal(outcome.stopped_by), f"{text} ({stopped})")
        return Verdict(code, text)
    if outcome.stopped_by:
        return Verdict(ExitCode.of_signal(outcome.stopped_by), stopped)
    if not outcome.failures:
        return Verdict(ExitCode.OK)
    first = first_failure(outcome.failures)
    after = [failure for failure in outcome.failures if failure is not first]
    lines = [
        _headline(first, outcome.ended_well),
        *health_lines(first, after),
        *first.others,
        *_grouped(after, first),
        outcome.note,
        first.hint and f"hint: {first.hint}",
    ]
    exit_code = first.exit_code
    if exit_code < 0:
        exit_code = ExitCode.of_signal(-exit_code)
    trace = "" if first.rank in shown else first.trace
    return Verdict(exit_code, outcome.text or "\n  ".join(filter(None, lines)), trace)


def record(outcome: Outcome, own: Iterable[Failure] = ()) -> dict[str, Any]:
    """The outcome and the verdict as a dict for JSON. `own`: the failures on this node, which a summary may lack."""
    verdict = judge(outcome)
    content: dict[str, Any] = {"exit_code": int(verdict.exit_code), "text": verdict.text, "first_failure": None}
    if outcome.failures:
        first = first_failure(outcome.failures)
        content["first_failure"] = asdict(first) | {"how": first.how}
    failures = {failure.rank: failure for failure in (*outcome.failures, *own)}
    return content | asdict(replace(outcome, failures=tuple(failures.values()), text=verdict.text))


def _headline(first: Failure, ended_well: tuple[int, ...]) -> str:
    if first.secondary and ended_well:
        them = "it" if len(ended_well) == 1 else "them"
        return (
            f"{rank_list(ended_well)} ended early, with exit code 0, while other ranks still needed {them}; "
            f"then rank {first.rank} failed: {first.described}"
        )
    return str(first)


def health_lines(first: Failure, others: Sequence[Failure]) -> list[str]:
    """The lines about the node of the first failure, and about other nodes, whose ranks then failed or were stopped."""
    first_by_host = {failure.host: failure for failure in reversed(others) if failure.host != first.host}
    of_others = [f"{host}: {line}" for host, failure in first_by_host.items() for line in failure.health]
    return [*first.health, *of_others][:_MAX_HEALTH_LINES]


def _grouped(failures: Iterable[Failure], first: Failure) -> list[str]:
    """Describe the other failures, with one line for all ranks that have the same error.

    Ranks that the launcher stopped are left out. The message of an error is not repeated if the rank that
    failed first has the same error.
    """
    by_message: dict[str, list[int]] = {}
    for failure in failures:
        if not failure.stopped:
            message = _plain(failure.message_to_show) or failure.how
            if first.message_to_show and normalised(message) == normalised(first.message_to_show):
                message = ""
            by_message.setdefault(message, []).append(failure.rank)
    groups = sorted(by_message.items(), key=lambda group: -len(group[1]))  # the largest first
    lines = []
    for message, ranks in groups[:_MAX_GROUPS]:
        same = " with the same error" if len(ranks) > 1 else ""
        if message:
            lines.append(f"{rank_list(ranks)} then failed{same}: {message}")
        else:
            lines.append(f"{rank_list(ranks)} then failed with the same error")
    rest = sum(len(ranks) for _, ranks in groups[_MAX_GROUPS:])
    if rest:
        lines.append(f"{rest} more ranks then failed, with different errors")
    return lines


def _plain(message: str) -> str:
    return _RANK_SPECIFIC.sub("", message).strip()


def rank_list(ranks: Collection[int]) -> str:
    """Text such as `rank 3` or `ranks 1, 2`; for many ranks, only their number, such as `7 ranks`."""
    if len(ranks) > _MAX_LISTED_RANKS:
        return f"{len(ranks)} ranks"
    noun = "rank" if len(ranks) == 1 else "ranks"
    return f"{noun} {', '.join(map(str, sorted(ranks)))}"


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
