"""What is shown of the profiles of a run: traces, and the largest allocations."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ddp_kit.errors import UsageError
from ddp_kit.launcher.report.run_history import RunHistory
from ddp_kit.launcher.trace.memory_file import read_memory
from ddp_kit.launcher.trace.trace_reader import lines, read_trace
from ddp_kit.launcher.trace.trace_records import LineMemory, MemorySummary, Operation, TraceSummary
from ddp_kit.sizes import size_text

_MOST_LINES_IN_WORDS = 3


@dataclass(frozen=True)
class Profile:
    """One file in words, and a table of it."""

    title: str
    lines: tuple[str, ...]
    operations: tuple[Operation, ...] = ()
    """Of a trace: what its time went to."""
    memory: MemorySummary | None = None


def profiles_of(run: RunHistory) -> tuple[Profile, ...]:
    """One for each file; for one that cannot be read, the reason."""
    return (*map(_profile, run.traces), *map(_memory, run.memory))


def _profile(path: Path) -> Profile:
    try:
        summary = read_trace(path)
    except UsageError as error:
        return Profile(f"Profile {path.name}", (str(error),))
    return Profile(
        _title("Profile", summary, path), tuple(lines(summary)) or ("Nothing stands out.",), summary.operations
    )


def _memory(path: Path) -> Profile:
    try:
        summary = read_memory(path)
    except UsageError as error:
        return Profile(f"Memory {path.name}", (str(error),))
    return Profile(_title("Memory", summary, path), tuple(_memory_lines(summary)), memory=summary)


def _title(what: str, summary: TraceSummary | MemorySummary, path: Path) -> str:
    rank = "" if summary.rank is None else f" of rank {summary.rank}"
    steps = "" if summary.steps is None else f", steps {summary.steps[0]} to {summary.steps[1]}"
    return f"{what}{rank}{steps} ({path.name})"


def _memory_lines(summary: MemorySummary) -> Iterator[str]:
    yield (
        f"at the peak {size_text(summary.bytes, 2)} were allocated, {size_text(summary.earlier, 2)} of them before "
        f"step {summary.steps[0]}, such as weights and optimizer state"
    )
    for each in summary.lines[:_MOST_LINES_IN_WORDS]:
        tensors = f"{each.count:,} {'tensor' if each.count == 1 else 'tensors'}"
        yield f"{place_of(each)}: {size_text(each.bytes, 2)} in {tensors}"
    if not summary.complete:
        yield "there were too many allocations to record all of them: record fewer steps"


def place_of(line: LineMemory) -> str:
    """Function, file and line."""
    return "no Python code, such as the backward pass" if line.place is None else str(line.place)
