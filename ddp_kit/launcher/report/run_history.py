"""Read the record of a run (format: docs/run-record.md). The run may still be in progress."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_kit.env import RECORD_ATTEMPTS, RECORD_FOLDER, RECORD_ROWS
from ddp_kit.errors import UsageError

_FORMAT = 1
_SAMPLES = "samples-*.jsonl"

Line = Mapping[str, Any]


@dataclass(frozen=True)
class Attempt:
    """One attempt of a run, from the start of the workers until all of them have ended."""

    name: str
    """Name of the attempt: the job's id, and the number of restarts before the attempt."""
    begin: Line
    """The `begin` event, with the settings of the attempt."""
    advice: tuple[Line, ...]
    done: Line | None
    """The `done` event; None if `fit` has not ended."""
    ends: tuple[Line, ...]
    """The `end` events, one per node; empty while the attempt is running."""


@dataclass(frozen=True)
class RunHistory:
    """Everything recorded about one run."""

    name: str
    """The name of the run's folder, such as runs/7; unique within a report."""
    attempts: tuple[Attempt, ...]
    """The attempts of the run, at least one."""
    rows: tuple[Line, ...]
    """Lines with training metrics, one per log point."""
    evaluations: tuple[Line, ...]
    samples: Mapping[str, tuple[Line, ...]]
    """Samples of the machine's load, by node number."""
    traces: tuple[Path, ...]
    """Trace files of torch.profiler."""
    memory: tuple[Path, ...]
    """Files that list the largest allocations on GPUs."""
    unreadable: int
    """Number of lines that cannot be read, not counting an incomplete last line of a file."""

    @property
    def last(self) -> Attempt:
        """The latest attempt."""
        return self.attempts[-1]

    @property
    def seconds(self) -> float:
        """Seconds from the start of the first attempt to the last recorded event."""
        lines = [self.last.begin, *self.last.ends, *self.rows[-1:], *self.evaluations[-1:]]
        return float(max(line["time"] for line in lines) - self.attempts[0].begin["time"])

    @property
    def steps(self) -> int:
        """The number of optimizer steps that the run has completed."""
        lines = [self.last.begin, *self.rows[-1:], *([self.last.done] if self.last.done else [])]
        return max(int(line["step"]) for line in lines)


def read_runs(folders: Sequence[Path]) -> tuple[RunHistory, ...]:
    """Read the records of runs. Each folder may be a checkpoint folder, a log folder, or the record itself.

    Raises `UsageError` for a folder without a record, and for a record that this version cannot read.
    """
    found = {record: None for folder in folders for record in _records(folder)}
    return tuple(_read(record, name) for record, name in zip(found, _names(list(found)), strict=True))


def _records(folder: Path) -> list[Path]:
    candidates = [folder, folder / RECORD_FOLDER, *sorted(folder.glob(f"*/{RECORD_FOLDER}"))]
    found = [each.absolute() for each in candidates if (each / RECORD_ATTEMPTS).is_file()]
    if not found:
        what = "has no record of a run" if folder.is_dir() else "is not a folder"
        raise UsageError(
            f"{folder} {what}",
            'a Trainer with checkpoint={"dir": "run"} writes a record, which `ddpkit report run` reads',
        )
    return found


def _names(records: Sequence[Path]) -> list[str]:
    """Name each run after the last parts of its path, with as few parts as needed to make all names different."""
    runs = [each.parent if each.name == RECORD_FOLDER else each for each in records]
    for parts in range(1, max((len(run.parts) for run in runs), default=1)):
        names = ["/".join(run.parts[-parts:]) for run in runs]
        if len(set(names)) == len(names):
            return names
    return [str(run) for run in runs]


def _read(record: Path, name: str) -> RunHistory:
    reader = _Reader()
    attempts = _attempts(record, list(reader.lines(record / RECORD_ATTEMPTS)))
    rows = list(reader.lines(record / RECORD_ROWS))
    samples = {
        path.stem.removeprefix("samples-"): tuple(line for line in reader.lines(path) if _timed(line))
        for path in sorted(record.glob(_SAMPLES))
    }
    return RunHistory(
        name,
        attempts,
        tuple(line for line in rows if line.get("event") == "train" and _placed(line)),
        tuple(line for line in rows if line.get("event") == "eval" and _placed(line)),
        samples,
        _recorded(attempts, "rank*_steps*.json.gz"),
        _recorded(attempts, "memory_rank*_steps*.json"),
        reader.unreadable,
    )


class _Reader:
    """Reads files of JSON lines, and counts the invalid lines."""

    def __init__(self) -> None:
        self.unreadable = 0

    def lines(self, path: Path) -> Iterator[Line]:
        try:
            text = path.read_text(encoding="utf-8", errors="replace")
        except FileNotFoundError:
            return
        except OSError as error:
            raise UsageError(f"{path} cannot be read: {error.strerror}", "check the permissions of the file") from None
        whole, _, torn = text.rpartition("\n")
        if not whole and torn:
            whole = torn  # the file has only one line, without a newline
        for line in whole.split("\n"):
            try:
                found = json.loads(line)
            except ValueError:
                found = None
            if isinstance(found, dict):
                yield found
            elif line:
                self.unreadable += 1


def _attempts(record: Path, lines: Sequence[Line]) -> tuple[Attempt, ...]:
    begins = [line for line in lines if line.get("event") == "begin" and _placed(line) and "attempt" in line]
    if not begins:
        raise UsageError(
            f"{record / RECORD_ATTEMPTS} is not the record of a run: no line records the beginning of an attempt",
            "give the folder of a run's checkpoints or logs",
        )
    formats = [line.get("format") for line in begins]
    newer = [each for each in formats if not isinstance(each, int) or each > _FORMAT]
    if newer:
        raise UsageError(
            f"the record {record} has format {newer[0]}, but this version of ddpkit reads formats up to {_FORMAT}",
            "pip install --upgrade ddpkit",
        )
    return tuple(_attempt(begin, lines) for begin in begins)


def _attempt(begin: Line, lines: Sequence[Line]) -> Attempt:
    own = [line for line in lines if line.get("attempt") == begin["attempt"] and _timed(line)]
    done = [line for line in own if line.get("event") == "done" and _placed(line)]
    return Attempt(
        str(begin["attempt"]),
        begin,
        tuple(line for line in own if line.get("event") == "advice" and "text" in line),
        done[-1] if done else None,
        tuple(line for line in own if line.get("event") == "end" and "exit_code" in line),
    )


def _recorded(attempts: Sequence[Attempt], pattern: str) -> tuple[Path, ...]:
    """Profile files that exist in the folder of the latest attempt that set `profile.steps`."""
    for attempt in reversed(attempts):
        profile = attempt.begin.get("config", {}).get("profile", {})
        if profile.get("steps") is not None:
            folder = Path(attempt.begin.get("folder", ""), profile.get("dir", ""))
            return tuple(sorted(folder.glob(pattern)))
    return ()


def _timed(line: Line) -> bool:
    return isinstance(line.get("time"), int | float)


def _placed(line: Line) -> bool:
    return _timed(line) and isinstance(line.get("step"), int)
