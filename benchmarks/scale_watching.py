"""Rows of scale.py about watching a run: the samples of its machines, the report that reads them, and `ddpkit top`."""

import io
import json
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

from rich.console import Console
from rich.segment import SegmentLines

from ddp_kit.devices import samples as machine_samples
from ddp_kit.devices.gpus import GpuUsage
from ddp_kit.launcher import record
from ddp_kit.report.run_history import read_runs
from ddp_kit.watching.readings import HostReadings, JobReading, RankReading, as_json, from_json, merged
from ddp_kit.watching.top import screen

START = 1_790_000_000.0  # when the run started
GIB = 1 << 30
SAMPLES_PER_NODE = 500

# --- Samples ----------------------------------------------------------------------------------------------------------


def samples(sizes: Sequence[int]) -> dict[str, Any]:
    """Bytes of the samples of one node with 8 GPUs, after this number of hours."""
    values = []
    for hours in sizes:
        with tempfile.TemporaryDirectory() as folder:
            values.append(bytes_of_samples(3600 * hours, Path(folder)))
    return {"name": "samples", "per": "node", "sizes": [*sizes], "values": values, "unit": "bytes", "bound": 1.15}


class Clock(threading.Event):
    """A clock, and an event that is set after this number of waits: a wait takes a second of simulated time."""

    def __init__(self, seconds: int) -> None:
        super().__init__()
        self._now = 0
        self._seconds = seconds

    def wait(self, timeout: float | None = None) -> bool:  # noqa: ARG002
        self._now += 1
        return self._now > self._seconds

    def time(self) -> float:
        return START + self._now


def bytes_of_samples(seconds: int, folder: Path) -> int:
    """Bytes that the launcher writes in this number of seconds."""
    gpus = tuple(GpuUsage(index, f"GPU-{index}", "H100", 97, 60 * GIB, 80 * GIB, 650.25, 61) for index in range(8))

    @contextmanager
    def gpu_usage_reader() -> Iterator[Callable[[], tuple[GpuUsage, ...]]]:
        yield lambda: gpus

    clock = Clock(seconds)
    memory = SimpleNamespace(total=1024 * GIB, available=924 * GIB)
    machine = SimpleNamespace(cpu_percent=lambda: 50.0, virtual_memory=lambda: memory)
    with (
        patch.object(record, "threading", SimpleNamespace(Event=lambda: clock, Thread=threading.Thread)),
        patch.object(record, "noted_record_folders", lambda _: [folder]),
        patch.object(machine_samples, "time", clock),
        patch.object(machine_samples, "gpu_usage_reader", gpu_usage_reader),
        patch.object(machine_samples, "psutil", machine),
    ):
        record.RecordKeeper(folder, None, 0)._thread.run()
    return (folder / "samples-0.jsonl").stat().st_size


def samples_read(sizes: Sequence[int]) -> dict[str, Any]:
    """CPU seconds in which a report reads the samples of this number of nodes, 500 lines each."""
    gpu = {"load": 0.9, "memory": 60 * GIB, "memory_total": 80 * GIB, "power": 600.0, "temperature": 60}
    gpus = [{"index": index, **gpu} for index in range(8)]
    load = {"cpu": 0.3, "memory": 100 * GIB, "memory_total": 500 * GIB, "gpus": gpus}
    lines = [json.dumps({"time": START + second, **load}) for second in range(SAMPLES_PER_NODE)]
    begin = {"event": "begin", "attempt": "job.0", "time": START, "step": 0, "format": 1}
    values = []
    for nodes in sizes:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            (folder / "attempts.jsonl").write_text(f"{json.dumps(begin)}\n")
            for node in range(nodes):
                (folder / f"samples-{node}.jsonl").write_text("".join(f"{line}\n" for line in lines))
            values.append(cpu_seconds(lambda folder=folder: read_runs([folder])))
    return {"name": "samples_read", "per": "job", "sizes": [*sizes], "values": values, "unit": "CPU s", "bound": 1.15}


def cpu_seconds(function: Callable[[], object]) -> float:
    """The shortest CPU time of three calls, in seconds."""
    found = []
    for _ in range(3):
        began = time.process_time()
        function()
        found.append(time.process_time() - began)
    return min(found)


# --- Top --------------------------------------------------------------------------------------------------------------


def top(sizes: Sequence[int]) -> dict[str, Any]:
    """CPU seconds of one refresh: the hosts' outputs are parsed and merged, and a screen of 200 x 60 is drawn."""
    values = []
    for ranks in sizes:
        texts = [output_of(node, ranks) for node in range(ranks // 8)]
        console = Console(file=io.StringIO(), width=200, height=60, force_terminal=True, markup=False, emoji=False)

        def refresh(texts: list[str] = texts, ranks: int = ranks, console: Console = console) -> None:
            jobs = merged([job for text in texts for job in from_json(text)])
            lines, _ = screen(HostReadings(jobs), console, ranks // 2)
            console.print(SegmentLines(lines, new_lines=True))

        values.append(cpu_seconds(refresh))
    return {"name": "top", "per": "job", "sizes": [*sizes], "values": values, "unit": "CPU s", "bound": 1.15}


def output_of(node: int, ranks: int) -> str:
    """The output of one host: the readings of its 8 ranks."""
    readings = tuple(
        RankReading(
            rank,
            rank % 8,
            1000 + rank,
            "forward pass",
            1000,
            0.5,
            0.1,
            0.2 + 1e-4 * rank,
            0.1,
            memory=10**10,
            host=f"gpu{node}",
            loss=1.0,
            total=10**6,
            mfu=0.4,
        )
        for rank in range(8 * node, 8 * node + 8)
    )
    job = JobReading("j", "train.py", f"gpu{node}", node, ranks // 8, ranks, 0, 100.0, 5, readings)
    return json.dumps(as_json((job,)))
