"""Read a torch.profiler trace: the file, the call tree, and the `Recording` that the analysis uses."""

import gc
import gzip
import json
import re
import sys
import zlib
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ddp_kit.errors import UsageError
from ddp_kit.texts import kind_of

# --- Time spans -------------------------------------------------------------------------------------------------------

Spans = list[tuple[float, float]]
"""Sorted pairs (start, end) that do not overlap, all in the same unit."""


def merged(spans: Iterable[tuple[float, float]]) -> Spans:
    """The union of the given spans, which may overlap and be in any order."""
    union: Spans = []
    for start, end in sorted(spans):
        if union and start <= union[-1][1]:
            if end > union[-1][1]:
                union[-1] = (union[-1][0], end)
        elif end > start:
            union.append((start, end))
    return union


def common(one: Spans, other: Spans) -> Spans:
    """The intersection of two lists of spans."""
    intersection: Spans = []
    i = j = 0
    while i < len(one) and j < len(other):
        start = max(one[i][0], other[j][0])
        end = min(one[i][1], other[j][1])
        if start < end:
            intersection.append((start, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return intersection


def gaps(spans: Spans, start: float, end: float) -> Spans:
    """The parts of the time from `start` to `end` that none of the spans covers."""
    uncovered: Spans = []
    for begin, stop in [*spans, (end, end)]:
        if min(begin, end) > start:
            uncovered.append((start, min(begin, end)))
        start = max(start, stop)
    return uncovered


def total(spans: Spans) -> float:
    """The total length of the spans."""
    return sum(end - start for start, end in spans)


# --- Trace files ------------------------------------------------------------------------------------------------------
# The Chrome trace format as torch.profiler (Kineto) writes it.
# Source: torch/profiler/_chrome_trace_export.py and Kineto's output_json.cpp.


HOST = {"cpu_op", "user_annotation", "python_function", "cuda_runtime", "cuda_driver"}
GPU = {"kernel", "gpu_memcpy", "gpu_memset"}
_NO_ARGUMENTS: Mapping[str, Any] = {}


class Event(NamedTuple):
    """One operator, Python function, CUDA call or kernel. Times are in seconds.

    `thread`: the ids of the process and the thread or, for a GPU event, of the GPU and the stream.
    """

    kind: str
    name: str
    thread: tuple[Any, Any]
    start: float
    end: float
    args: Mapping[str, Any]


@dataclass(frozen=True)
class TraceFile:
    """Contents of a trace file. `events`: host and GPU events, in file order. `facts`: all other fields of the file."""

    path: Path
    facts: Mapping[str, Any]
    events: list[Event]


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@_no_garbage_collection()  # each collection would scan all objects, and free none
def load(path: Path) -> TraceFile:
    """Read a trace, gzipped or not.

    Raises `UsageError` if the file cannot be read, is cut off, or is not a trace of torch.profiler.
    """
    content = _json(path, _file_text(path))
    if not isinstance(content, dict):
        raise _not_a_trace(path, f"is JSON, but not a torch.profiler trace: it contains {kind_of(content)}")
    everything = content.pop("traceEvents", None)
    if not isinstance(everything, list):
        raise _not_a_trace(path, f"is JSON, but not a torch.profiler trace: its keys are {sorted(content)[:5]}")
    entries = [entry for entry in everything if _is_event(entry)]
    if not entries:
        raise _not_a_trace(path, f"has no operators or kernels among its {len(everything)} entries")
    origin = entries[0]["ts"]  # large timestamps lose digits
    return TraceFile(path, content, [_event(entry, origin) for entry in entries])


def _file_text(path: Path) -> str:
    try:
        raw = path.read_bytes()
        if raw[:2] == b"\x1f\x8b":
            raw = gzip.decompress(raw)
    except EOFError:
        raise _cut_off(path) from None
    except zlib.error as error:
        raise _not_a_trace(path, f"is a damaged gzip file: {error}") from None
    except OSError as error:
        raise _not_a_trace(path, f"cannot be read: {error.strerror or error}") from None
    # Function names may be damaged: github.com/pytorch/pytorch/issues/121219
    return raw.decode(errors="replace")


def _json(path: Path, text: str) -> Any:
    try:
        return json.loads(text, strict=False)
    except json.JSONDecodeError as error:
        written = text.rstrip()
        if text.lstrip().startswith(("{", "[")) and (error.pos >= len(written) or not written.endswith(("}", "]"))):
            raise _cut_off(path) from None
        raise _not_a_trace(path, f"is not JSON: {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise _not_a_trace(path, "is JSON, but too deeply nested for a trace") from None


def _is_event(entry: Any) -> bool:
    return (
        isinstance(entry, dict)
        and entry.get("ph") == "X"
        and (entry.get("cat") in HOST or entry.get("cat") in GPU)
        and isinstance(entry.get("ts"), int | float)
        and isinstance(entry.get("dur"), int | float)
    )


def _event(entry: dict[str, Any], origin: float) -> Event:
    args = entry.get("args")
    start = entry["ts"] - origin
    return Event(
        entry["cat"],
        str(entry.get("name", "")),
        (entry.get("pid"), entry.get("tid")),
        start / 1e6,
        (start + entry["dur"]) / 1e6,
        args if isinstance(args, dict) else _NO_ARGUMENTS,
    )


def _cut_off(path: Path) -> UsageError:
    return UsageError(
        f"{path} is cut off: the trace was not written completely",
        "give the trace of another rank, or record the steps again; `df -h` shows whether the disk is full",
    )


def _not_a_trace(path: Path, what: str) -> UsageError:
    return UsageError(
        f"{path} {what}",
        'give a file that TrainerConfig(profile={"steps": [10, 12]}) wrote, such as profile/rank0_steps10-12.json.gz',
    )


# --- Call tree --------------------------------------------------------------------------------------------------------


_OUTERMOST_FIRST = {"python_function": 0, "user_annotation": 1, "cpu_op": 2, "cuda_runtime": 3, "cuda_driver": 3}
_FRAME = re.compile(r"^([^<].*)\((\d+)\): (.+)$")
_PACKAGES = re.compile(r"^.*/(?:site|dist)-packages/")
_BACKWARD = "autograd::engine::evaluate_function"


@dataclass(frozen=True)
class CodeLocation:
    """The location of a Python function in the source code.

    `line`: the line on which the function begins, as torch.profiler records it; for a function that was already running
    when recording began, the line being executed. `library`: "ddpkit", "torch" or "" for any other code.
    """

    function: str
    file: str
    line: int
    library: str = ""

    def __str__(self) -> str:
        return f"{self.function} ({self.file}:{self.line})"


class CallTree:
    """Host events sorted by start time, nested in one call tree per thread.

    `caller[i]`: index of the event that encloses event i; -1 if there is none.
    """

    def __init__(self, events: list[Event]) -> None:
        host = (event for event in events if event.kind in HOST)
        self.events = sorted(host, key=lambda event: (event.start, -event.end, _OUTERMOST_FIRST[event.kind]))
        self.caller = [-1] * len(self.events)
        self.operator = [-1] * len(self.events)
        """`operator[i]`: index of the innermost operator that encloses event i; -1 if there is none."""
        self._nest()
        self._forward = self._forward_operators()

    def _nest(self) -> None:
        running: dict[object, list[int]] = defaultdict(list)
        for index, event in enumerate(self.events):
            stack = running[event.thread]
            while stack and self.events[stack[-1]].end <= event.start:
                stack.pop()
            if stack:
                self.caller[index] = caller = stack[-1]
                is_operator = self.events[caller].kind == "cpu_op"
                self.operator[index] = caller if is_operator else self.operator[caller]
            stack.append(index)

    def callers(self, index: int) -> Iterator[int]:
        """Yield the indices of the events that enclose event `index`, innermost first."""
        start = self.events[index].start
        outer = self.caller[index]
        while outer >= 0:
            # An annotation begins within the function that creates it, and ends after that function.
            if self.events[outer].end > start:
                yield outer
            outer = self.caller[outer]

    def operators(self, index: int) -> Iterator[int]:
        """Yield the indices of the operators that enclose event `index`, innermost first."""
        outer = self.operator[index]
        while outer >= 0:
            yield outer
            outer = self.operator[outer]

    def place(self, index: int) -> CodeLocation | None:
        """The innermost Python function around an event, except functions of torch and the standard library.

        In a backward pass, this is the function around the forward operator. Functions of ddpkit are not excluded, so
        that their events can be distinguished from events of the user's code.
        """
        for outer in self.callers(self._source(index)):
            place = _place(self.events[outer])
            if place is not None and place.library not in ("torch", "python"):
                return place
        return None

    def within(self, index: int, folders: tuple[str, ...]) -> bool:
        """Whether event `index` ran inside a function from one of the given folders, such as `torch/profiler/`."""
        return any(in_folder(self.events[outer], folders) for outer in self.callers(index))

    def _source(self, index: int) -> int:
        """The index of the event itself or, in a backward pass, of the forward operator that the event belongs to."""
        for outer in self.operators(index):
            event = self.events[outer]
            if event.name.startswith(_BACKWARD):
                return self._forward.get(event.args.get("Sequence number"), index)
        return index

    def _forward_operators(self) -> dict[object, int]:
        """Forward operators by sequence number. If several have the same number, the last one is kept."""
        operators = {}
        for index, event in enumerate(self.events):
            number = event.args.get("Sequence number")
            if event.kind == "cpu_op" and number is not None and not event.args.get("Fwd thread id"):
                operators[number] = index
        return operators


def in_folder(event: Event, folders: tuple[str, ...]) -> bool:
    """Whether an event is a Python function from one of the given folders."""
    if event.kind != "python_function" or event.name.startswith("<"):
        return False
    return _inside_packages(event.name).startswith(folders)


def _place(event: Event) -> CodeLocation | None:
    if event.kind != "python_function":
        return None
    parts = _FRAME.match(event.name)
    if parts is None:
        return None
    return CodeLocation(parts[3], parts[1], int(parts[2]), _library(parts[1]))


def _library(file: str) -> str:
    file = _inside_packages(file)
    if file.startswith("torch/"):
        return "torch"
    if file.startswith("ddp_kit/"):
        return "ddpkit"
    if "/lib/python3" in file or file.split("/")[0].removesuffix(".py") in sys.stdlib_module_names:
        return "python"
    return ""


def _inside_packages(file: str) -> str:
    """The path of a file relative to its site-packages folder, or unchanged for any other file.

    The paths in a trace may be absolute: torch.profiler shortens only those of files in a folder of `sys.path`.
    """
    return _PACKAGES.sub("", file)


# --- Recording --------------------------------------------------------------------------------------------------------


_STEP = re.compile(r"ProfilerStep#(\d+)$")
_LOADERS = ("ddp_kit/data/", "torch/utils/data/")
_PROFILERS = ("ddp_kit/trainer/profile.py", "torch/profiler/")


@dataclass(frozen=True)
class Recording:
    """One trace in the form that the analysis needs: its calls, its GPU events, and the time that it covers.

    Times are in seconds. The host worked from `start` to `host_end`; the GPU finished that work at `end`.
    """

    calls: CallTree
    gpu: tuple[Event, ...]
    launches: dict[object, int]
    """Index in `calls` of the CUDA call that launched a kernel or a copy, by correlation ID."""
    steps: tuple[int, int] | None
    main: object
    start: float
    host_end: float
    end: float

    def host(self, *kinds: str) -> Iterator[tuple[int, Event]]:
        """Yield index and event for each host event of the given kinds that began between `start` and `host_end`."""
        for index, event in enumerate(self.calls.events):
            if event.kind in kinds and self.start <= event.start < self.host_end:
                yield index, event

    def launch(self, event: Event) -> int:
        """Index in `calls` of the CUDA call that launched a kernel or a copy, or -1 if it was not recorded."""
        return self.launches.get(event.args.get("correlation"), -1)

    def waits_for_data(self) -> Spans:
        """Spans in which the main thread ran DataLoader code or fetched a batch."""
        return self._within(
            event
            for event in self.calls.events
            if event.thread == self.main and (in_folder(event, _LOADERS) or event.name.startswith("enumerate(DataL"))
        )

    def in_operators(self) -> Spans:
        """Spans in which the main thread ran a torch operator."""
        return self._within(event for _, event in self.host("cpu_op") if event.thread == self.main)

    def loads_data(self, index: int) -> bool:
        """Whether an event is part of data loading."""
        return self.calls.within(index, _LOADERS)

    def profiles(self, index: int) -> bool:
        """Whether an event belongs to the profiler itself."""
        return self.calls.within(index, _PROFILERS)

    def _within(self, events: Iterator[Event]) -> Spans:
        return common(merged((event.start, event.end) for event in events), [(self.start, self.end)])


def recording_of(trace: TraceFile) -> Recording:
    """Build a `Recording` from the events of a trace file."""
    calls = CallTree(trace.events)
    marks = [(int(match[1]), event) for event in calls.events if (match := _STEP.match(event.name))]
    # Without step marks, the recording lasts from the first operator to the last: Python functions that were already
    # running appear to begin when the trace begins.
    bounds = [mark for _, mark in marks] or [e for e in calls.events if e.kind in ("cpu_op", "user_annotation")]
    gpu = tuple(event for event in trace.events if event.kind in GPU)
    bounds = bounds or list(gpu) or trace.events
    start = min(event.start for event in bounds)
    host_end = max(event.end for event in bounds)
    numbers = [number for number, _ in marks]
    gpu = tuple(event for event in gpu if event.start >= start)
    return Recording(
        calls=calls,
        gpu=gpu,
        launches={
            event.args["correlation"]: index
            for index, event in enumerate(calls.events)
            if event.kind in ("cuda_runtime", "cuda_driver") and "correlation" in event.args
        },
        steps=(min(numbers), max(numbers)) if numbers else None,
        main=marks[0][1].thread if marks else _busiest_thread(calls.events),
        start=start,
        host_end=host_end,
        end=max([host_end, *(event.end for event in gpu)]),
    )


def _busiest_thread(events: list[Event]) -> object:
    """The thread that runs the optimizer or, if no thread does, the thread with the most operators."""
    counts = Counter(event.thread for event in events if event.kind == "cpu_op")
    counts.update({event.thread: len(events) for event in events if event.name.startswith("Optimizer.step#")})
    return max(counts, key=counts.__getitem__, default=None)
