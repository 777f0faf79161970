"""Analyse a trace that `TrainerConfig(profile=...)` made: where the steps spent their time, and what to do about it.

`read_trace` returns a `TraceSummary`; `lines` turns the summary into findings, one line of text each.
Times are in seconds; shares are fractions of the recorded time, `wall`.
"""

import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ddp_kit.report.trace_recording import (
    CodeLocation,
    Event,
    Recording,
    Spans,
    TraceFile,
    common,
    gaps,
    load,
    merged,
    recording_of,
    total,
)

# --- Host-device synchronisations -------------------------------------------------------------------------------------
# Places where the host waits for the GPU or, in a run on the CPU, where it would wait if the run used a GPU.

# CUDA and HIP functions that return when the GPU is done. Source: CUDA Runtime API, "API synchronization behavior".
# torch calls one of the first three after each blocking copy.
_WAITS = re.compile(r"(cuda|hip)(Stream|Device|Event)Synchronize$|cuCtxSynchronize$|cudaMemcpy$|hipMemcpyWithStream$")
_OPERATORS = {"aten::item", "aten::_local_scalar_dense", "aten::nonzero"}


@dataclass(frozen=True)
class Synchronisation:
    """A place where the host waits for the GPU or, in a run on the CPU, where it would wait if the run used a GPU.

    `operation` is the torch operator, or the CUDA function if there is no operator. `place` is None if no stacks were
    recorded, and in threads that do not run Python.
    """

    operation: str
    place: CodeLocation | None
    calls: int
    per_step: float | None
    seconds: float


def synchronisations(recording: Recording, steps: int | None) -> tuple[Synchronisation, ...]:
    """Host-device synchronisations, grouped by operator and code location, most frequent first.

    In a trace without a GPU, these are the operators that would wait if the run used a GPU.
    """
    spent: dict[tuple[str, CodeLocation | None], dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for index, event in waits_of_the_host(recording) if recording.gpu else _would_wait(recording):
        once = index
        if recording.gpu and recording.calls.operator[index] >= 0:
            once = recording.calls.operator[index]  # which may copy and then wait
        spent[_operation_name(recording, index), recording.calls.place(index)][once] += event.end - event.start
    results = [
        Synchronisation(name, place, len(times), len(times) / steps if steps else None, sum(times.values()))
        for (name, place), times in spent.items()
    ]
    return tuple(sorted(results, key=lambda one: (-one.calls, -one.seconds)))


def waits_of_the_host(recording: Recording) -> Iterator[tuple[int, Event]]:
    """Yield the index and the event of each CUDA call that waits for the GPU, except calls by the profiler."""
    for index, event in recording.host("cuda_runtime", "cuda_driver"):
        if _WAITS.match(event.name) and not recording.profiles(index):
            yield index, event


def _would_wait(recording: Recording) -> Iterator[tuple[int, Event]]:
    calls = recording.calls
    for index, event in recording.host("cpu_op"):
        if event.name not in _OPERATORS or any(
            calls.events[outer].name in _OPERATORS for outer in calls.operators(index)
        ):
            continue
        if not recording.loads_data(index) and not _counts_steps(recording, index):
            yield index, event


def _counts_steps(recording: Recording, index: int) -> bool:
    """Whether this call reads an optimizer's step count. That tensor is on the CPU even if the model is on a GPU."""
    place = recording.calls.place(index)
    for outer in recording.calls.callers(index):
        event = recording.calls.events[outer]
        if event.name.startswith("Optimizer.step#"):
            return True
        if place is not None and event.name == f"{place.file}({place.line}): {place.function}":
            return False
    return False


def _operation_name(recording: Recording, index: int) -> str:
    """The name of the outermost `aten::` operator that contains a call or, without one, the name of the call."""
    name = recording.calls.events[index].name
    names = [recording.calls.events[outer].name for outer in recording.calls.operators(index)]
    return [name, *(name for name in names if name.startswith("aten::"))][-1]


# --- GPU time ---------------------------------------------------------------------------------------------------------
# The time that a GPU spends on computing, communicating and copying, and its idle time by cause.


@dataclass(frozen=True)
class GpuTime:
    """Time breakdown of the busiest GPU, from its first to its last kernel.

    `recorded` is the sum of `computing`, `communication_alone`, `copying` (a copy or memset ran, but no kernel) and the
    idle times. `idle_synchronisation`: after the host waited for the GPU; `idle_data`: while the host waited for data;
    `idle_host`: until the host launched the next kernel; `idle_queued`: although the next kernel was already launched.
    """

    recorded: float
    computing: float
    communication: float
    communication_alone: float
    copying: float
    idle_synchronisation: float
    idle_data: float
    idle_host: float
    idle_queued: float

    @property
    def idle(self) -> float:
        """Seconds in which neither a kernel nor a copy ran."""
        return self.idle_synchronisation + self.idle_data + self.idle_host + self.idle_queued

    @property
    def overlapped(self) -> float:
        """Seconds of communication overlapped with computation."""
        return self.communication - self.communication_alone


def gpu_time(recording: Recording) -> GpuTime | None:
    """Time breakdown of the busiest GPU in the trace; None if the trace contains no kernels."""
    by_device: dict[object, list[Event]] = defaultdict(list)
    for event in recording.gpu:
        by_device[event.thread[0]].append(event)
    events = max(by_device.values(), key=_seconds_of_kernels, default=[])
    kernels = [event for event in events if event.kind == "kernel"]
    if not kernels:
        return None
    copies = [event for event in events if event.kind != "kernel"]
    start = min(event.start for event in kernels)
    end = max(event.end for event in kernels)
    communication = _spans(event for event in kernels if is_communication(event))
    computing = _spans(event for event in kernels if not is_communication(event))
    without_kernel = gaps(merged(computing + communication), start, end)
    copying = common(without_kernel, _spans(copies))
    idle = gaps(merged(computing + communication + copying), start, end)
    causes = _causes(recording, idle, sorted(kernels + copies, key=lambda event: event.start))
    return GpuTime(
        recorded=end - start,
        computing=total(computing),
        communication=total(communication),
        communication_alone=total(communication) - total(common(communication, computing)),
        copying=total(copying),
        idle_synchronisation=causes["synchronisation"],
        idle_data=causes["data"],
        idle_host=causes["host"],
        idle_queued=causes["queued"],
    )


def is_communication(kernel: Event) -> bool:
    """Whether a kernel belongs to NCCL or RCCL, which use the same kernel names."""
    return "nccl" in kernel.name.lower()


def _seconds_of_kernels(events: Iterable[Event]) -> float:
    return sum(event.end - event.start for event in events if event.kind == "kernel")


def _spans(events: Iterable[Event]) -> Spans:
    return merged((event.start, event.end) for event in events)


def _causes(recording: Recording, idle: Spans, work: list[Event]) -> dict[str, float]:
    """Seconds of idle time by cause.

    If a GPU runs out of work while the host waits for it, the GPU stays idle until the host launches the next kernel,
    usually after the wait. All of this idle time is attributed to the wait.
    """
    causes: dict[str, float] = defaultdict(float)
    data = recording.waits_for_data()
    waits = merged((event.start, event.end) for _, event in waits_of_the_host(recording))
    starts = [event.start for event in work]
    for start, end in idle:
        in_data = total(common([(start, end)], data))
        causes["data"] += in_data
        following = work[min(bisect_right(starts, start), len(work) - 1)]
        causes[_cause(recording, start, following, waits)] += end - start - in_data
    return causes


def _cause(recording: Recording, start: float, following: Event, waits: Spans) -> str:
    waiting = bisect_right(waits, (start, float("inf"))) - 1
    if waiting >= 0 and waits[waiting][1] >= start:
        return "synchronisation"
    launch = recording.launch(following)
    launched_in_time = launch >= 0 and recording.calls.events[launch].end <= start
    return "queued" if launched_in_time else "host"


# --- Most expensive operations ----------------------------------------------------------------------------------------


MOST = 10


@dataclass(frozen=True)
class Operation:
    """One operation and its share of the recorded time.

    On a GPU, `name` is a kernel, `operator` is the operator that launched it, and `seconds` is the kernel's time. On a
    CPU, `name` is a torch operator, and `seconds` is its self time, without the operators that it calls.
    """

    name: str
    operator: str | None
    calls: int
    seconds: float
    share: float


def operations(recording: Recording) -> tuple[Operation, ...]:
    """The most expensive operations: kernels and copies on a GPU, or operators by self time on a CPU."""
    spent = _on_gpu(recording) if recording.gpu else _on_cpu(recording)
    wall = recording.end - recording.start or 1.0
    results = [
        Operation(name, operator, len(times), sum(times), sum(times) / wall)
        for (name, operator), times in spent.items()
    ]
    return tuple(sorted(results, key=lambda operation: -operation.seconds)[:MOST])


def _on_gpu(recording: Recording) -> dict[tuple[str, str | None], list[float]]:
    spent: dict[tuple[str, str | None], list[float]] = defaultdict(list)
    by_id = {
        event.args["External id"]: event.name for _, event in recording.host("cpu_op") if "External id" in event.args
    }
    for event in recording.gpu:
        spent[event.name, _operator(recording, event, by_id)].append(event.end - event.start)
    return spent


def _operator(recording: Recording, event: Event, by_id: dict[object, str]) -> str | None:
    by_its_id = by_id.get(event.args.get("External id"))
    launch = recording.launch(event)
    if launch < 0:
        return by_its_id
    operator = recording.calls.operator[launch]
    if operator >= 0:
        return recording.calls.events[operator].name
    return by_its_id or recording.calls.events[launch].name


def _on_cpu(recording: Recording) -> dict[tuple[str, str | None], list[float]]:
    self_times = {index: event.end - event.start for index, event in recording.host("cpu_op")}
    for index, event in recording.host("cpu_op"):
        outer = recording.calls.operator[index]
        if outer in self_times:
            self_times[outer] -= event.end - event.start
    spent: dict[tuple[str, str | None], list[float]] = defaultdict(list)
    for index, seconds in self_times.items():
        spent[recording.calls.events[index].name, None].append(max(seconds, 0.0))
    return spent


# --- Findings ---------------------------------------------------------------------------------------------------------
# Each finding is one line of text that says what to do; the most important finding comes first.


# Shares of the time below which there is little to gain.
_IDLE = 0.05
_ALONE = 0.05
_DATA = 0.10
_OUTSIDE = 0.30
_LARGE = 0.10
_MOST_EACH = 3

Finding = tuple[float, str]
"""The weight of a finding (usually a share of the recorded time), and the text of the finding."""


@dataclass(frozen=True)
class TraceSummary:
    """Summary of one trace. `steps`: the first and the last optimizer step in the trace, or None if not known.

    `device`: "gpu" if the trace contains GPU events, otherwise "cpu". `waited_for_data`: seconds in which the main
    thread waited for data. `outside`: seconds in which it neither waited for data nor ran a torch operator.
    """

    rank: int | None
    steps: tuple[int, int] | None
    device: str
    wall: float
    operations: tuple[Operation, ...]
    gpu: GpuTime | None
    waited_for_data: float
    outside: float
    synchronisations: tuple[Synchronisation, ...]
    with_stacks: bool


def lines(summary: TraceSummary) -> list[str]:
    """The findings, one line of text each, most important first; empty if there is nothing to report."""
    findings: list[Finding] = []
    for part in (_gpu, _synchronisations, _host, _operations):
        findings.extend(part(summary))
    return [line for _, line in sorted(findings, key=lambda finding: -finding[0])]


def _gpu(summary: TraceSummary) -> Iterator[Finding]:
    gpu = summary.gpu
    if gpu is None or not gpu.recorded:
        return
    alone = gpu.communication_alone / gpu.recorded
    if alone > _ALONE:
        hidden = gpu.overlapped / gpu.communication
        yield (
            alone,
            f"{alone:.0%} of the GPU's time was exposed communication ({hidden:.0%} of communication overlapped "
            'with compute): use a larger micro-batch, accumulation_steps or parallel={"compression": "bf16"}',
        )
    for field, (what, remedy) in _CAUSES.items():
        share = getattr(gpu, field) / gpu.recorded
        if share > _IDLE:
            yield share, f"{what.format(f'{share:.0%}')}: {remedy}"


_CAUSES = {  # by field of GpuTime
    "idle_synchronisation": (
        "the GPU was idle {} of the time after a host-device synchronisation",
        "remove the synchronisations named here",
    ),
    "idle_data": (
        "the GPU was idle {} of the time, waiting for the DataLoader",
        "raise data.num_workers or use data.device_transform",
    ),
    "idle_host": (
        "the GPU was idle {} of the time, waiting for the host to launch the next kernel",
        'use compile="model" or a larger micro-batch',
    ),
    "idle_queued": (
        "the GPU was idle {} of the time between kernels that were already queued",
        'the kernels are short or wait for another stream; compile="model" fuses small kernels',
    ),
    "copying": (
        "the GPU spent {} of the time only copying data",
        "create tensors on the device; copy from pinned memory with non_blocking=True",
    ),
}


def _synchronisations(summary: TraceSummary) -> Iterator[Finding]:
    """Findings about synchronisations outside of ddpkit's own code.

    On a GPU, each finding has a weight of at least 0.05 for sorting, because the GPU is also idle after the wait.
    """
    theirs = [one for one in summary.synchronisations if not (one.place and one.place.library == "ddpkit")]
    for one in theirs[:_MOST_EACH]:
        weight = 1.0 if summary.device == "cpu" else max(one.seconds / summary.wall, 0.05)
        yield weight, _synchronisation(one, summary)


def _synchronisation(one: Synchronisation, summary: TraceSummary) -> str:
    what = one.operation
    remedy = "keep the value on the device; trainer.log takes tensors, and reads them at log points"
    if one.place is not None:
        what = f"{what} in {one.place}"
    elif not summary.with_stacks:
        remedy = "this trace contains no Python functions: record one with TrainerConfig(profile=...) to see the place"
    often = f"{one.per_step:g} per step" if one.per_step is not None else f"{one.calls} in this trace"
    waits = f"{one.seconds:.3g} s in total" if summary.device == "gpu" else "would wait for a GPU"
    return f"host-device synchronisation: {what}, {often}, {waits}: {remedy}"


def _host(summary: TraceSummary) -> Iterator[Finding]:
    """Findings about the host, only for CPU traces: in a GPU trace, the GPU's idle time shows the same problems."""
    if summary.device == "gpu" or not summary.wall:
        return
    data = summary.waited_for_data / summary.wall
    outside = summary.outside / summary.wall
    if data > _DATA:
        yield data, f"{data:.0%} of the time went to waiting for data: raise data.num_workers"
    if outside > _OUTSIDE:
        yield (
            outside / 2,  # the profiler slows Python down
            f"{outside:.0%} of the time was spent in Python, outside of torch's operators: use a larger micro-batch "
            'or compile="model"',
        )


def _operations(summary: TraceSummary) -> Iterator[Finding]:
    if summary.operations and summary.operations[0].share > _LARGE:
        first = summary.operations[0]
        name = first.name if len(first.name) <= 80 else f"{first.name[:77]}..."
        if first.operator:
            name = f"{name} (by {first.operator})"
        yield 0.0, f"{first.share:.0%} of the time went to {name}, {first.calls} calls: optimize this first"


# --- Reading a trace --------------------------------------------------------------------------------------------------


__all__ = ["lines", "read_trace"]

_FILE = re.compile(r"rank(\d+)_steps(\d+)-(\d+)\.json")


def read_trace(path: Path) -> TraceSummary:
    """Summarise one torch.profiler trace, such as a file in `profile.dir`.

    Raises `UsageError` if the file cannot be read, is cut off, or is not a trace of torch.profiler.
    """
    trace = load(path)
    recording = recording_of(trace)
    rank, steps = _rank_and_steps(trace, recording)
    count = steps[1] - steps[0] + 1 if steps else None
    waits = recording.waits_for_data()
    busy = merged(recording.in_operators() + waits)
    return TraceSummary(
        rank=rank,
        steps=steps,
        device="gpu" if recording.gpu else "cpu",
        wall=recording.end - recording.start,
        operations=operations(recording),
        gpu=gpu_time(recording),
        waited_for_data=total(waits),
        outside=total(gaps(busy, recording.start, recording.end)),
        synchronisations=synchronisations(recording, count),
        with_stacks=any(event.kind == "python_function" for event in trace.events),
    )


def _rank_and_steps(trace: TraceFile, recording: Recording) -> tuple[int | None, tuple[int, int] | None]:
    """Rank and steps from the trace. If the trace does not contain them, they are read from the file name."""
    rank = None
    steps = recording.steps
    if named := _FILE.match(trace.path.name):
        rank, first, last = map(int, named.groups())
        steps = steps or (first, last)
    match trace.facts.get("distributedInfo"):
        case {"rank": int(told)}:
            rank = told
    return rank, steps
