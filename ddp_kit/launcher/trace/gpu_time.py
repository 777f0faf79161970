"""Where the time of a GPU went, from a trace: computing, communicating, copying, idle and why."""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable

from ddp_kit.launcher.trace.recording import Recording
from ddp_kit.launcher.trace.synchronisations import waits_of_the_host
from ddp_kit.launcher.trace.time_spans import Spans, common, gaps, merged, total
from ddp_kit.launcher.trace.trace_file import Event
from ddp_kit.launcher.trace.trace_records import GpuTime


def gpu_time(recording: Recording) -> GpuTime | None:
    """The time of the GPU whose kernels took longest; None: there are no kernels."""
    device = _busiest_device(recording.gpu)
    kernels = [event for event in recording.gpu if event.kind == "kernel" and event.thread[0] == device]
    if not kernels:
        return None
    copies = [event for event in recording.gpu if event.kind != "kernel" and event.thread[0] == device]
    start, end = min(event.start for event in kernels), max(event.end for event in kernels)
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
    """Whether a kernel is NCCL's, or RCCL's, which has the same names."""
    return "nccl" in kernel.name.lower()


def _busiest_device(events: Iterable[Event]) -> object:
    spent: dict[object, float] = defaultdict(float)
    for event in events:
        if event.kind == "kernel":
            spent[event.thread[0]] += event.end - event.start
    return max(spent, key=spent.__getitem__, default=None)


def _spans(events: Iterable[Event]) -> Spans:
    return merged((event.start, event.end) for event in events)


def _causes(recording: Recording, idle: Spans, work: list[Event]) -> dict[str, float]:
    """Seconds of idle time, by cause.

    A GPU that runs dry while the host waits for it stays idle until the host has launched something again, which is
    mostly after the wait: all of that time is due to the wait.
    """
    causes: dict[str, float] = defaultdict(float)
    data = recording.waits_for_data()
    waits = merged((event.start, event.end) for _, event in waits_of_the_host(recording))
    starts = [event.start for event in work]
    for start, end in idle:
        in_data = total(common([(start, end)], data))
        causes["data"] += in_data
        following = work[bisect_right(starts, start)] if starts[-1] > start else work[-1]
        causes[_cause(recording, start, following, waits)] += end - start - in_data
    return causes


def _cause(recording: Recording, start: float, following: Event, waits: Spans) -> str:
    waiting = bisect_right(waits, (start, float("inf"))) - 1
    if waiting >= 0 and waits[waiting][1] >= start:
        return "synchronisation"
    launch = recording.launch(following)
    launched_in_time = launch >= 0 and recording.calls.events[launch].end <= start
    return "queued" if launched_in_time else "host"
