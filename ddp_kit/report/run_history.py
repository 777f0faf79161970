"""Read the record of a run (format: docs/run-record.md). The run may still be in progress."""

import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, islice, pairwise
from pathlib import Path
from statistics import median
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field

from ddp_kit.env import RECORD_ATTEMPTS, RECORD_FOLDER, RECORD_ROWS
from ddp_kit.errors import UsageError
from ddp_kit.exit_codes import ExitCode
from ddp_kit.report.machine_load import MachineLoad, machine_load
from ddp_kit.report.rows import Rows

_FORMAT = 1
_SAMPLES = "samples-*.jsonl"
_TOO_LARGE = 1e300
"""Numbers from here on count as not finite: a sum or a change of unit could overflow."""

_QUIET_SECONDS = 30.0
"""Seconds without a new line after which a run without a recorded end no longer counts as running, if it logs often."""
_QUIET_ROWS = 5
"""The same for a run that logs rarely, as a multiple of the time between two rows."""
_QUIET_SAMPLES = 2
"""The same for an old run, whose samples are rare, as a multiple of the time between two samples."""
_BLOCK = 100
"""Number of rows held as dicts until they are added to the columns; of more, garbage collection takes longer."""
_SAMPLE_LINES = 200_000
"""About how many lines with samples are read, of all nodes together; of larger files, lines are skipped evenly."""

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
    stop: Line | None
    """The `stop` event; None if the run was not stopped before its end."""
    ends: tuple[Line, ...]
    """The `end` events, one per node; empty while the attempt is running."""

    @property
    def failed(self) -> bool:
        """Whether the attempt ended with an exit code other than 0, and not because it saved and stopped (75)."""
        return any(end["exit_code"] not in (ExitCode.OK, ExitCode.REQUEUE) for end in self.ends)

    def continues(self, before: "Attempt") -> bool:
        """Whether the launcher itself restarted the workers of attempt `before`, so that both are of one command."""
        job, _, restarts = self.name.rpartition(".")
        job_before, _, restarts_before = before.name.rpartition(".")
        numbers = (restarts_before, restarts)
        return job == job_before and all(map(str.isdecimal, numbers)) and int(restarts_before) < int(restarts)


@dataclass(frozen=True)
class RunHistory:
    """Everything recorded about one run."""

    name: str
    """The name of the run's folder, such as runs/7; unique within a report."""
    attempts: tuple[Attempt, ...]
    """The attempts of the run, at least one."""
    rows: Rows
    """Training metrics, one row per log point."""
    evaluations: Rows
    machines: MachineLoad
    """The load of the nodes' machines."""
    traces: tuple[Path, ...]
    """Trace files of torch.profiler."""
    unreadable: int
    """Number of lines that cannot be read, not counting an incomplete last line of a file."""
    read_at: float
    """Time at which the record was read."""

    @property
    def last(self) -> Attempt:
        """The latest attempt."""
        return self.attempts[-1]

    @property
    def seconds(self) -> float:
        """Seconds in which the run was running: without the time between two commands."""
        return sum(end - begin for begin, end in self.periods)

    @cached_property
    def periods(self) -> list[tuple[float, float]]:
        """The times at which each attempt began and ended.

        An attempt that its launcher restarted ends when the next one begins. The end of any other attempt is the last
        line that belongs to it.
        """
        periods = []
        for attempt, after in zip(self.attempts, (*self.attempts[1:], None), strict=True):
            begin = attempt.begin["time"]
            latest = math.inf if after is None else after.begin["time"]
            if after is not None and after.continues(attempt):
                end = latest
            else:
                lines = (*attempt.ends, *attempt.advice, *filter(None, (attempt.done, attempt.stop)))
                times = [line["time"] for line in lines]
                for rows in (self.rows, self.evaluations):
                    times += [rows.times[number] for number in rows.by_attempt.get(attempt.name, ())]
                end = max((time for time in times if time <= latest), default=begin)
            periods.append((begin, max(begin, end)))
        return periods

    def running_seconds(self, time: float) -> float:
        """Seconds that the run had been running at a time."""
        past = [(begin, min(end, time)) for begin, end in self.periods if begin <= time]
        return float(sum(max(0.0, end - begin) for begin, end in past))

    @property
    def steps(self) -> int:
        """The number of optimizer steps that the run has completed."""
        ends = [end for end in self.last.ends if end.get("step") is not None]
        lines = [self.last.begin, *filter(None, (self.last.done, self.last.stop)), *ends]
        return max([*self.rows.steps[-1:], *(int(line["step"]) for line in lines)])

    @property
    def is_live(self) -> bool:
        """Whether the run is probably still running: it has no recorded end, and its last line is recent."""
        if self.last.ends or self.last.done is not None or self.last.stop is not None:
            return False
        nodes = self.machines.nodes.values()
        begin = self.last.begin["time"]
        latest = max([begin, *self.rows.times, *self.evaluations.times, *(node.last for node in nodes)])
        intervals = [after - before for before, after in pairwise(self.rows.times[-_QUIET_ROWS:])]
        samples = [_QUIET_SAMPLES * node.seconds for node in nodes]
        quiet = max(_QUIET_SECONDS, _QUIET_ROWS * median(intervals or [0.0]), *samples)
        return bool(abs(self.read_at - latest) < quiet)


def read_runs(folders: Sequence[Path]) -> tuple[RunHistory, ...]:
    """Read the records of runs. Each folder may be a checkpoint folder, a log folder, or the record itself.

    Raises `UsageError` for a folder without a record, and for a record that this version cannot read.
    """
    records = list({record.resolve(): record for folder in folders for record in _records(folder)}.values())
    return tuple(_read(record, name) for record, name in zip(records, _names(records), strict=True))


def repeated_folders(folders: Sequence[Path]) -> list[tuple[Path, Path]]:
    """Pairs of folders with the same records: a folder, and an earlier one."""
    pairs = []
    earlier: dict[frozenset[Path], Path] = {}
    for folder in folders:
        first = earlier.setdefault(frozenset(record.resolve() for record in _records(folder)), folder)
        if first is not folder:
            pairs.append((folder, first))
    return pairs


def _records(folder: Path) -> list[Path]:
    further = f"{RECORD_FOLDER}-[0-9]*"  # a process with several Trainers has several records
    patterns = (RECORD_FOLDER, f"*/{RECORD_FOLDER}", further, f"*/{further}")
    found = chain.from_iterable(sorted(folder.glob(pattern)) for pattern in patterns)
    records = [path.absolute() for path in (folder, *found) if (path / RECORD_ATTEMPTS).is_file()]
    if not records:
        what = "has no record of a run" if folder.is_dir() else "is not a folder"
        raise UsageError(
            f"{folder} {what}",
            'a Trainer with checkpoint={"dir": "run"} writes a record, which `ddpkit report run` reads',
        )
    return records


def _names(records: Sequence[Path]) -> list[str]:
    """Name each run after the last parts of its path, with as few parts as needed to make all names different."""
    runs = [record.parent if record.name == RECORD_FOLDER else record for record in records]
    for parts in range(1, max((len(run.parts) for run in runs), default=1)):
        names = ["/".join(run.parts[-parts:]) for run in runs]
        if len(set(names)) == len(names):
            return names
    return [str(run) for run in runs]


def _read(record: Path, name: str) -> RunHistory:
    reader = _Reader()
    attempts = _attempts(record, list(reader.lines(record / RECORD_ATTEMPTS, _EVENTS)))
    rows = {"train": Rows(), "eval": Rows()}
    lines = reader.lines(record / RECORD_ROWS, _ROWS)
    while block := list(islice(lines, _BLOCK)):
        for event, rows_of_event in rows.items():
            rows_of_event.extend([line for line in block if line["event"] == event])
    paths = sorted(record.glob(_SAMPLES))
    samples = {
        path.stem.removeprefix("samples-"): reader.lines(path, {None: _Sample}, _SAMPLE_LINES // len(paths))
        for path in paths
    }
    return RunHistory(
        name,
        attempts,
        rows["train"],
        rows["eval"],
        machine_load(samples),
        _recorded(attempts, "rank*_steps*.json.gz"),
        reader.unreadable,
        time.time(),
    )


# --- Lines ------------------------------------------------------------------------------------------------------------
# The fields of a line on whose types the report relies. Lines with other types are left out and counted.


_Step = Annotated[int, Field(ge=0, lt=1 << 53)]  # a larger number is not exact in the page's script
_Count = Annotated[int, Field(ge=0, lt=1 << 31)]


class _Timed(BaseModel):
    model_config = ConfigDict(strict=True)
    time: Annotated[float, Field(ge=0, lt=4e9)]  # before the year 2096


class _Placed(_Timed):
    attempt: str
    step: _Step


class _Begin(_Placed):
    folder: str = ""
    devices: list[str] = []
    ranks: _Count | None = None
    nodes: _Count | None = None
    total_steps: _Step | None = None
    planned_memory: float | None = None
    config: dict[str, Any] = {}
    command: list[str] = []


class _Advice(_Placed):
    text: str


class _Done(_Placed):
    seconds: float | None = None


class _End(_Timed):
    attempt: str
    exit_code: Annotated[int, Field(ge=0, lt=256)]
    text: str = ""
    stacks: dict[str, Any] = {}
    step: _Step | None = None


class _Row(_Placed):
    # Factories: pydantic copies other defaults, which takes longer than all the rest.
    rank_seconds: list[float | None] = Field(default_factory=list)
    rank_memory: list[float] = Field(default_factory=list)
    rank_seconds_summary: list[float | None] = Field(default_factory=list)
    rank_memory_summary: list[float] = Field(default_factory=list)
    samples_checksums: str = ""
    weights_checksum: str = ""


class _Sample(_Timed):
    seconds: Annotated[int, Field(gt=0, lt=1 << 31)] = 1
    gpus: list[dict[str, Any]] = []


_Kinds = Mapping[str | None, type[_Timed]]
_EVENTS: _Kinds = {"begin": _Begin, "advice": _Advice, "done": _Done, "stop": _Placed, "end": _End}
_ROWS: _Kinds = {"train": _Row, "eval": _Placed}


class _Reader:
    """Reads files of JSON lines, and counts the invalid lines."""

    def __init__(self) -> None:
        self.unreadable = 0

    def lines(self, path: Path, kinds: _Kinds, most: int | None = None) -> Iterator[Line]:
        """Yield the valid lines of a file. Lines with an unknown event are skipped. `kinds`: models by event.

        `most`: about how many lines are read of a larger file, evenly distributed; None: all.
        """
        try:
            with path.open(encoding="utf-8", errors="replace") as file:
                first = file.readline()
                every = 1
                if most is not None:
                    every += path.stat().st_size // (len(first) * most + 1)
                for line in chain([first], islice(file, every - 1, None, every)):
                    if line.endswith("\n") or line is first:  # otherwise, the last line is not complete yet
                        yield from self._content(path, line.rstrip("\n"), kinds)
        except FileNotFoundError:
            return
        except OSError as error:
            raise UsageError(f"{path} cannot be read: {error.strerror}", "check the permissions of the file") from None

    def _content(self, path: Path, line: str, kinds: _Kinds) -> Iterator[Line]:
        """Yield the content of a line, if it is valid and not of a later version."""
        try:
            content = _DECODER.decode(line)
            event = content.get("event")
            if isinstance(event, str | None) and event not in kinds:
                return
            if event == "begin":
                _check_format(path, content)
            kinds[event].model_validate(content)
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):  # also pydantic's errors
            self.unreadable += bool(line)
        else:
            yield content


def _finite(text: str) -> float | None:
    """A number of a JSON file; None if it is too large to calculate with."""
    value = float(text)
    return value if abs(value) < _TOO_LARGE else None


def _finite_int(text: str) -> int | float | None:
    return int(text) if len(text) < 19 else _finite(text)


_DECODER = json.JSONDecoder(parse_float=_finite, parse_int=_finite_int, parse_constant=lambda _: None)


def _check_format(path: Path, begin: Line) -> None:
    version = begin.get("format")
    if not isinstance(version, int) or version > _FORMAT:
        raise UsageError(
            f"the record {path.parent} has format {version}, but this version of ddpkit reads formats up to {_FORMAT}",
            "pip install --upgrade ddpkit",
        )


def _attempts(record: Path, lines: Sequence[Line]) -> tuple[Attempt, ...]:
    """The attempts in the order in which they began. Lines belong to the latest attempt with their name."""
    attempts: list[tuple[Line, list[Line]]] = []
    for line in lines:
        if line["event"] == "begin":
            attempts.append((line, []))
        else:
            same_name = (further for begin, further in reversed(attempts) if begin["attempt"] == line["attempt"])
            next(same_name, []).append(line)
    if not attempts:
        raise UsageError(
            f"{record / RECORD_ATTEMPTS} is not the record of a run: no line records the beginning of an attempt",
            "give the folder of a run's checkpoints or logs",
        )
    return tuple(_attempt(begin, further) for begin, further in attempts)


def _attempt(begin: Line, further: Sequence[Line]) -> Attempt:
    events = ("advice", "done", "stop", "end")
    advice, done, stops, ends = (tuple(line for line in further if line["event"] == name) for name in events)
    last_done = next(reversed(done), None)
    return Attempt(begin["attempt"], begin, advice, last_done, next(reversed(stops), None), ends)


def _recorded(attempts: Sequence[Attempt], pattern: str) -> tuple[Path, ...]:
    """Profile files that exist in the folder of the latest attempt that set `profile.steps`."""
    for attempt in reversed(attempts):
        profile = attempt.begin.get("config", {}).get("profile")
        if isinstance(profile, dict) and profile.get("steps") is not None:
            with suppress(OSError, ValueError, TypeError):  # the path is not one that a Trainer has written
                folder = Path(attempt.begin.get("folder", ""), profile.get("dir", ""))
                return tuple(sorted(folder.glob(pattern)))
    return ()
