"""What the time of a trace went to, by operator and by kernel."""

from collections import defaultdict

from ddp_kit.launcher.trace.recording import Recording
from ddp_kit.launcher.trace.trace_file import Event
from ddp_kit.launcher.trace.trace_records import Operation

MOST = 10


def operations(recording: Recording) -> tuple[Operation, ...]:
    """The most expensive ones: kernels and copies if there are any, else operators by the time of their own."""
    spent = _on_gpu(recording) if recording.gpu else _on_cpu(recording)
    wall = recording.end - recording.start
    found = [
        Operation(name, operator, len(times), sum(times), sum(times) / wall if wall else 0.0)
        for (name, operator), times in spent.items()
    ]
    return tuple(sorted(found, key=lambda operation: -operation.seconds)[:MOST])


def _on_gpu(recording: Recording) -> dict[tuple[str, str | None], list[float]]:
    spent: dict[tuple[str, str | None], list[float]] = defaultdict(list)
    by_id = {
        event.args["External id"]: event.name for _, event in recording.host("cpu_op") if "External id" in event.args
    }
    for event in recording.gpu:
        spent[event.name, _operator(recording, event, by_id)].append(event.end - event.start)
    return spent


def _operator(recording: Recording, event: Event, by_id: dict[object, str]) -> str | None:
    launch = recording.launch(event)
    if launch >= 0:
        operator = recording.calls.operator[launch]
        if operator >= 0:
            return recording.calls.events[operator].name
    if event.args.get("External id") in by_id:
        return by_id[event.args["External id"]]
    return recording.calls.events[launch].name if launch >= 0 else None


def _on_cpu(recording: Recording) -> dict[tuple[str, str | None], list[float]]:
    own = {index: event.end - event.start for index, event in recording.host("cpu_op")}
    for index, event in recording.host("cpu_op"):
        outer = recording.calls.operator[index]
        if outer in own:
            own[outer] -= event.end - event.start
    spent: dict[tuple[str, str | None], list[float]] = defaultdict(list)
    for index, seconds in own.items():
        spent[recording.calls.events[index].name, None].append(max(seconds, 0.0))
    return spent
