"""A trace as the parts of a summary need it: its calls, its kernels, and the time that it covers."""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from ddp_kit.launcher.trace.time_spans import Spans, common, merged
from ddp_kit.launcher.trace.trace_calls import CallTree, in_folder
from ddp_kit.launcher.trace.trace_file import GPU, Event, TraceFile

_STEP = re.compile(r"ProfilerStep#(\d+)$")
_LOADERS = ("ddp_kit/loader/", "torch/utils/data/")
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
