"""Sets of times: sorted spans (start, end) that do not overlap, in any one unit."""

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

from ddp_kit.errors import UsageError, kind_of
from ddp_kit.launcher.trace.records import Place

Spans = list[tuple[float, float]]


def merged(spans: Iterable[tuple[float, float]]) -> Spans:
    """The union of spans in any order."""
    found: Spans = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            if end > found[-1][1]:
                found[-1] = (found[-1][0], end)
        elif end > start:
            found.append((start, end))
    return found


def common(one: Spans, other: Spans) -> Spans:
    """The times in both."""
    found: Spans = []
    i = j = 0
    while i < len(one) and j < len(other):
        start, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if start < end:
            found.append((start, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return found


def gaps(spans: Spans, start: float, end: float) -> Spans:
    """The times between `start` and `end` that are in none of the spans."""
    found: Spans = []
    for begin, stop in [*spans, (end, end)]:
        if min(begin, end) > start:
            found.append((start, min(begin, end)))
        start = max(start, stop)
    return found


def total(spans: Spans) -> float:
    """How long they are together."""
    return sum(end - start for start, end in spans)


# --- Reads the file of a trace: the Chrome trace format, as torch.profiler (Kineto) writes it -------------------------
# Source of the format: torch/profiler/_chrome_trace_export.py and Kineto's output_json.cpp.


HOST = {"cpu_op", "user_annotation", "python_function", "cuda_runtime", "cuda_driver"}
GPU = {"kernel", "gpu_memcpy", "gpu_memset"}
_NO_ARGUMENTS: Mapping[str, Any] = {}


class Event(NamedTuple):
    """One operator, Python function, call of CUDA or kernel. `thread` is a stream for the GPU's. Seconds."""

    kind: str
    name: str
    thread: tuple[Any, Any]
    start: float
    end: float
    args: Mapping[str, Any]


@dataclass(frozen=True)
class TraceFile:
    """The events of HOST and GPU in a file, in its order, and everything else that it says of the recording."""

    path: Path
    facts: Mapping[str, Any]
    events: list[Event]


def load(path: Path) -> TraceFile:
    """Read a trace, gzipped or not.

    Raises `UsageError` if the file cannot be read, is cut off, or is not a trace of torch.profiler.
    """
    with _no_garbage_collection():  # it would look through all objects again and again, and find none
        return _loaded(path)


def _loaded(path: Path) -> TraceFile:
    found = _json(path, _text(path))
    listed = found.get("traceEvents") if isinstance(found, dict) else None
    if not isinstance(listed, list):
        what = f"its keys are {sorted(found)[:5]}" if isinstance(found, dict) else f"it has {kind_of(found)}"
        raise _not_a_trace(path, f"is JSON, but no trace of torch.profiler: {what}")
    origin = next((entry["ts"] for entry in listed if _is_event(entry)), 0)  # of large numbers, digits are lost
    events = [_event(entry, origin) for entry in listed if _is_event(entry)]
    if not events:
        raise _not_a_trace(path, f"has no operators or kernels among its {len(listed)} entries")
    facts = {name: value for name, value in found.items() if name != "traceEvents"}
    return TraceFile(path, facts, events)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _text(path: Path) -> str:
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
    # Names of functions may be damaged: github.com/pytorch/pytorch/issues/121219
    return raw.decode(errors="replace")


def _json(path: Path, text: str) -> Any:
    try:
        return json.loads(text, strict=False)
    except json.JSONDecodeError as error:
        begun, written = text.lstrip()[:1] in ("{", "["), text.rstrip()
        if begun and (error.pos >= len(written) or not written.endswith(("}", "]"))):
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
        f"{path} ends in the middle: the trace was not written completely",
        "give the trace of another rank, or record again: `ls -l` shows whether the disk was full",
    )


def _not_a_trace(path: Path, what: str) -> UsageError:
    return UsageError(
        f"{path} {what}",
        'give a file that Trainer(profile={"steps": [10, 12]}) wrote, such as profile/rank0_steps10-12.json.gz',
    )


# --- Who called whom in a trace: the events of each thread as a tree --------------------------------------------------


_OUTERMOST_FIRST = {"python_function": 0, "user_annotation": 1, "cpu_op": 2, "cuda_runtime": 3, "cuda_driver": 3}
_FRAME = re.compile(r"^([^<].*)\((\d+)\): (.+)$")
_PACKAGES = re.compile(r"^.*/(?:site|dist)-packages/")
_MODULE = "nn.Module: "
_BACKWARD = "autograd::engine::evaluate_function"


class CallTree:
    """The host's events, sorted by start; `caller[i]`: the index of what called event i, -1 for none."""

    def __init__(self, events: list[Event]) -> None:
        host = (event for event in events if event.kind in HOST)
        self.events = sorted(host, key=lambda event: (event.start, -event.end, _OUTERMOST_FIRST[event.kind]))
        self.caller = [-1] * len(self.events)
        self.operator = [-1] * len(self.events)
        """The operator within which event i ran, -1 for none."""
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
        """What event `index` ran within, from the inside out."""
        start, outer = self.events[index].start, self.caller[index]
        while outer >= 0:
            # An annotation begins within the function that makes it, and outlives it.
            if self.events[outer].end > start:
                yield outer
            outer = self.caller[outer]

    def operators(self, index: int) -> Iterator[int]:
        """The operators among `callers`."""
        outer = self.operator[index]
        while outer >= 0:
            yield outer
            outer = self.operator[outer]

    def place(self, index: int) -> Place | None:
        """The innermost function of Python that is neither torch's nor Python's own, of a backward pass the forward's.

        Functions of ddpkit count: what they do is not what the user's own code does.
        """
        for outer in self.callers(self._source(index)):
            found = _place(self.events[outer])
            if found is not None and found.library not in ("torch", "python"):
                return found
        return None

    def module(self, index: int) -> str | None:
        """The innermost module, such as `Linear_3`: the fourth Linear that was called; of a backward pass likewise."""
        for outer in self.callers(self._source(index)):
            name = self.events[outer].name
            if name.startswith(_MODULE):
                return name.removeprefix(_MODULE)
        return None

    def within(self, index: int, folders: tuple[str, ...]) -> bool:
        """Whether event `index` ran within a function of one of these folders, such as `torch/profiler/`."""
        return any(in_folder(self.events[outer], folders) for outer in self.callers(index))

    def _source(self, index: int) -> int:
        """The event itself; in a backward pass the operator of the forward pass to which it belongs."""
        for outer in self.operators(index):
            event = self.events[outer]
            if event.name.startswith(_BACKWARD):
                return self._forward.get(event.args.get("Sequence number"), index)
        return index

    def _forward_operators(self) -> dict[object, int]:
        """By sequence number: the last operator with it is the one that the backward pass is of."""
        found = {}
        for index, event in enumerate(self.events):
            number = event.args.get("Sequence number")
            if event.kind == "cpu_op" and number is not None and not event.args.get("Fwd thread id"):
                found[number] = index
        return found


def in_folder(event: Event, folders: tuple[str, ...]) -> bool:
    """Whether an event is a function of Python from one of these folders."""
    if event.kind != "python_function" or event.name.startswith("<"):
        return False
    return _inside_packages(event.name).startswith(folders)


def _place(event: Event) -> Place | None:
    if event.kind != "python_function":
        return None
    parts = _FRAME.match(event.name)
    if parts is None:
        return None
    return Place(parts[3], parts[1], int(parts[2]), _library(parts[1]))


def _library(file: str) -> str:
    file = _inside_packages(file)
    if file.startswith("torch/"):
        return "torch"
    if file.startswith("ddp_kit/"):
        return "ddpkit"
    own = "/lib/python3" in file or file.split("/")[0].removesuffix(".py") in sys.stdlib_module_names
    return "python" if own else ""


def _inside_packages(file: str) -> str:
    """A file as seen from the folder of its package; torch itself cuts off only what is in `sys.path`."""
    return _PACKAGES.sub("", file)


# --- A trace as the parts of a summary need it: its calls, its kernels, and the time that it covers -------------------


_STEP = re.compile(r"ProfilerStep#(\d+)$")
_LOADERS = ("ddp_kit/data/", "torch/utils/data/")
_PROFILERS = ("ddp_kit/profile.py", "torch/profiler/")


@dataclass(frozen=True)
class Recording:
    """One trace. `start` to `host_end`: what the host did; `end`: when the GPU was done with it as well. Seconds."""

    calls: CallTree
    gpu: tuple[Event, ...]
    launches: dict[object, int]
    """By correlation number: the call of CUDA, as an index into the calls, that launched a kernel or a copy."""
    steps: tuple[int, int] | None
    main: object
    start: float
    host_end: float
    end: float

    def host(self, *kinds: str) -> Iterator[tuple[int, Event]]:
        """Events of these kinds that began in the recorded time, with their index."""
        for index, event in enumerate(self.calls.events):
            if event.kind in kinds and self.start <= event.start < self.host_end:
                yield index, event

    def launch(self, event: Event) -> int:
        """What launched a kernel or a copy: an index into the calls; -1: not recorded."""
        return self.launches.get(event.args.get("correlation"), -1)

    def waits_for_data(self) -> Spans:
        """When the main thread was in a DataLoader or fetched a batch."""
        return self._within(
            event
            for event in self.calls.events
            if event.thread == self.main and (in_folder(event, _LOADERS) or event.name.startswith("enumerate(DataL"))
        )

    def in_operators(self) -> Spans:
        """When the main thread was in an operator of torch."""
        return self._within(event for _, event in self.host("cpu_op") if event.thread == self.main)

    def loads_data(self, index: int) -> bool:
        """Whether an event is part of loading data."""
        return self.calls.within(index, _LOADERS)

    def profiles(self, index: int) -> bool:
        """Whether an event is part of the profiler itself."""
        return self.calls.within(index, _PROFILERS)

    def _within(self, events: Iterator[Event]) -> Spans:
        return common(merged((event.start, event.end) for event in events), [(self.start, self.end)])


def recording_of(trace: TraceFile) -> Recording:
    """Order the events of a file."""
    calls = CallTree(trace.events)
    marks = [(int(found[1]), event) for event in calls.events if (found := _STEP.match(event.name))]
    # Without marks: from the first operator to the last, as functions that were running seem to begin with the trace.
    bounds = [mark for _, mark in marks] or [e for e in calls.events if e.kind in ("cpu_op", "user_annotation")]
    gpu = tuple(event for event in trace.events if event.kind in GPU)
    bounds = bounds or list(gpu) or trace.events
    start, host_end = min(event.start for event in bounds), max(event.end for event in bounds)
    gpu = tuple(event for event in gpu if event.start >= start)
    return Recording(
        calls=calls,
        gpu=gpu,
        launches={
            event.args["correlation"]: index
            for index, event in enumerate(calls.events)
            if event.kind in ("cuda_runtime", "cuda_driver") and "correlation" in event.args
        },
        steps=(min(number for number, _ in marks), max(number for number, _ in marks)) if marks else None,
        main=marks[0][1].thread if marks else _busiest_thread(calls.events),
        start=start,
        host_end=host_end,
        end=max([host_end, *(event.end for event in gpu)]),
    )


def _busiest_thread(events: list[Event]) -> object:
    """The thread of the optimizer, else the one with the most operators."""
    counts = Counter(event.thread for event in events if event.kind == "cpu_op")
    counts.update({event.thread: len(events) for event in events if event.name.startswith("Optimizer.step#")})
    return max(counts, key=counts.__getitem__) if counts else None
