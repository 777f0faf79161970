"""Where the host waits for the GPU, from a trace; on a CPU, where it would wait."""

import re
from collections import defaultdict
from collections.abc import Iterator

from ddp_kit.launcher.trace.recording import Recording
from ddp_kit.launcher.trace.trace_file import Event
from ddp_kit.launcher.trace.trace_records import Place, Synchronisation

# The functions of CUDA and HIP that return when the GPU is done. Source: CUDA Runtime API, "API synchronization
# behavior". torch calls one of the first three after each copy that blocks.
_WAITS = re.compile(r"(cuda|hip)(Stream|Device|Event)Synchronize$|cuCtxSynchronize$|cudaMemcpy$|hipMemcpyWithStream$")
_OPERATORS = {"aten::item", "aten::_local_scalar_dense", "aten::nonzero"}


def synchronisations(recording: Recording, steps: int | None) -> tuple[Synchronisation, ...]:
    """By operator and place, the most frequent first. Without a GPU: operators that would wait for one."""
    spent: dict[tuple[str, Place | None], dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for index, event in waits_of_the_host(recording) if recording.gpu else _would_wait(recording):
        inner = recording.calls.operator[index] if recording.gpu else index
        # One operator may copy, then wait: that is one synchronisation.
        once = inner if inner >= 0 else index
        spent[_name(recording, index), recording.calls.place(index)][once] += event.end - event.start
    found = [
        Synchronisation(name, place, len(times), len(times) / steps if steps else None, sum(times.values()))
        for (name, place), times in spent.items()
    ]
    return tuple(sorted(found, key=lambda one: (-one.calls, -one.seconds)))


def waits_of_the_host(recording: Recording) -> Iterator[tuple[int, Event]]:
    """Calls of CUDA that return when the GPU is done, with their index; not the profiler's own."""
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
    """Whether torch's optimizer itself reads a value: its count of steps, which is on the host for a GPU too."""
    place = recording.calls.place(index)
    for outer in recording.calls.callers(index):
        event = recording.calls.events[outer]
        if event.name.startswith("Optimizer.step#"):
            return True
        if place is not None and event.name == f"{place.file}({place.line}): {place.function}":
            return False
    return False


def _name(recording: Recording, index: int) -> str:
    """The outermost of torch's operators, else the call itself."""
    own = recording.calls.events[index].name
    names = [recording.calls.events[outer].name for outer in recording.calls.operators(index)]
    return [own, *(name for name in names if name.startswith("aten::"))][-1]
