"""Reads a trace that `Trainer(profile=...)` recorded: what the time of these steps went to, and what to do about it."""

import re
from pathlib import Path

from ddp_kit.launcher.trace.gpu_time import gpu_time
from ddp_kit.launcher.trace.matrix_products import matrix_products
from ddp_kit.launcher.trace.recording import Recording, recording_of
from ddp_kit.launcher.trace.synchronisations import synchronisations
from ddp_kit.launcher.trace.time_spans import gaps, merged, total
from ddp_kit.launcher.trace.trace_file import TraceFile, load
from ddp_kit.launcher.trace.trace_findings import lines
from ddp_kit.launcher.trace.trace_operations import operations
from ddp_kit.launcher.trace.trace_records import TraceSummary

__all__ = ["lines", "read_trace"]

_FILE = re.compile(r"rank(\d+)_steps(\d+)-(\d+)\.json")


def read_trace(path: Path) -> TraceSummary:
    """Read one trace of torch.profiler, as `profile.dir` has them.

    Raises `UsageError` if the file cannot be read, is cut off, or is not a trace of torch.profiler.
    """
    trace = load(path)
    recording = recording_of(trace)
    rank, steps = _rank_and_steps(trace, recording)
    count = steps[1] - steps[0] + 1 if steps else None
    precision = trace.facts.get("float32_matmul_precision")
    tf32 = precision in ("high", "medium") if precision is not None else None
    waits = recording.waits_for_data()
    busy = merged(recording.in_operators() + waits)
    return TraceSummary(
        rank=rank,
        steps=steps,
        device="gpu" if recording.gpu else "cpu",
        device_name=_device_name(trace) if recording.gpu else None,
        wall=recording.end - recording.start,
        operations=operations(recording),
        gpu=gpu_time(recording),
        waited_for_data=total(waits),
        outside=total(gaps(busy, recording.start, recording.end)),
        synchronisations=synchronisations(recording, count),
        products=matrix_products(recording, tf32=tf32),
        with_stacks=any(event.kind == "python_function" for event in trace.events),
    )


def _rank_and_steps(trace: TraceFile, recording: Recording) -> tuple[int | None, tuple[int, int] | None]:
    """The trace's own word first: files are renamed."""
    named = _FILE.match(trace.path.name)
    world = trace.facts.get("distributedInfo")
    rank = world.get("rank") if isinstance(world, dict) else None
    if not isinstance(rank, int):
        rank = int(named[1]) if named else None
    steps = recording.steps or ((int(named[2]), int(named[3])) if named else None)
    return rank, steps


def _device_name(trace: TraceFile) -> str | None:
    devices = trace.facts.get("deviceProperties")
    first = devices[0] if isinstance(devices, list) and devices else None
    return str(first["name"]) if isinstance(first, dict) and "name" in first else None
