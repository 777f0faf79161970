"""The samples of the machine in a run record: what the launcher writes as a run grows older, and how often."""

import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ddp_kit.devices import samples
from ddp_kit.devices.gpus import GpuUsage
from ddp_kit.devices.samples import SampleFile, combined
from ddp_kit.health.gpu_errors import GpuErrors
from ddp_kit.launcher import record
from ddp_kit.launcher.record import RecordKeeper

START = 1_790_000_000.0
GIB = 1 << 30


class Clock(threading.Event):
    """The event that ends a keeper, as its clock: waiting takes no time, and the keeper ends after `seconds`."""

    def __init__(self, seconds: int) -> None:
        super().__init__()
        self.now = 0
        self._seconds = seconds

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout == 1.0
        self.now += 1
        return self.now > self._seconds


@contextmanager
def gpus_of(clock: Clock, count: int = 8) -> Iterator[Callable[[], tuple[GpuUsage, ...]]]:
    even, odd = (
        tuple(GpuUsage(index, f"GPU-{index}", "H100", load, 60 * GIB, 80 * GIB, 650.25, 61) for index in range(count))
        for load in (0, 100)
    )
    yield lambda: odd if clock.now % 2 else even


def kept(folder: Path, seconds: int, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The samples that a launcher writes in so many seconds of its clock."""
    clock = Clock(seconds)
    memory = SimpleNamespace(total=1024 * GIB, available=924 * GIB)
    monkeypatch.setattr(record, "threading", SimpleNamespace(Event=lambda: clock, Thread=threading.Thread))
    monkeypatch.setattr(samples, "time", SimpleNamespace(time=lambda: START + clock.now))
    monkeypatch.setattr(samples, "gpu_usage_reader", lambda: gpus_of(clock))
    psutil = SimpleNamespace(cpu_percent=lambda: 50.0, virtual_memory=lambda: memory)
    monkeypatch.setattr(samples, "psutil", psutil)
    monkeypatch.setattr(record, "noted_record_folders", lambda _: [folder])
    folder.mkdir(parents=True)
    keeper = RecordKeeper(folder, None, 0, GpuErrors({}, {}))
    keeper._thread.run()
    return folder / "samples-0.jsonl"


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_samples_of_a_young_run_are_a_line_per_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = lines(kept(tmp_path / "record", 60, monkeypatch))
    assert [line["time"] for line in written] == [START + second for second in range(2, 61)]
    assert [line["gpus"][0]["load"] for line in written[:2]] == [0.0, 1.0]
    assert "seconds" not in written[0]


def test_samples_grow_coarser_with_their_file_and_it_is_opened_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[str] = []
    real_open = os.open
    monkeypatch.setattr(os, "open", lambda path, *more: opened.append(str(path)) or real_open(path, *more))
    monkeypatch.setattr(samples, "_DOUBLING_BYTES", 1 << 14)
    sizes = [kept(tmp_path / str(hours), 3600 * hours, monkeypatch).stat().st_size for hours in (1, 2, 4)]
    assert sizes[2] - sizes[1] < 1.5 * (sizes[1] - sizes[0]), "as much for twice the time"
    assert len(opened) == 3
    written = lines(tmp_path / "4" / "samples-0.jsonl")
    seconds = [line.get("seconds", 1) for line in written]
    assert sum(seconds) == 4 * 3600 - 1, "each second is in one line"
    assert seconds[:-1] == sorted(seconds[:-1])
    assert max(seconds) > 100
    ends = [START + 1 + sum(seconds[: number + 1]) for number in range(len(seconds))]
    assert [line["time"] for line in written] == ends
    assert {gpu["load"] for line in written if line.get("seconds", 1) > 1 for gpu in line["gpus"]} >= {0.5}


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_samples_of_thirty_days_take_few_megabytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert kept(tmp_path / "record", 30 * 86400, monkeypatch).stat().st_size < 20e6


def test_combined_samples_are_means_with_the_peak_of_the_host_memory() -> None:
    def sample(second: int, load: float | None, memory: int) -> dict[str, Any]:
        gpu = {"index": 3, "load": load, "memory": 7, "power": None, "temperature": 60 + second}
        return {"time": START + second, "cpu": 0.1 * second, "memory": memory, "memory_total": 100, "gpus": [gpu]}

    assert combined([sample(0, 0.5, 10), sample(1, None, 90), sample(2, 1.0, 20)]) == {
        "time": START + 2, "cpu": 0.1, "memory": 40, "memory_peak": 90, "memory_total": 100, "seconds": 3,
        "gpus": [{"index": 3, "load": 0.75, "memory": 7, "power": None, "temperature": 61}],
    }  # fmt: skip


def test_samples_go_to_the_new_record_if_the_earlier_one_is_set_aside(tmp_path: Path) -> None:
    sample = {"time": START, "memory": 1, "gpus": []}
    (tmp_path / "record").mkdir()
    file = SampleFile(tmp_path / "record" / "samples-0.jsonl")
    file.add(sample)
    (tmp_path / "record").rename(tmp_path / "aside")
    file.add(sample)  # there is no folder now
    (tmp_path / "record").mkdir()
    file.add(sample)
    file.add(sample)
    file.close()
    assert len(lines(tmp_path / "aside" / "samples-0.jsonl")) == 1
    assert len(lines(tmp_path / "record" / "samples-0.jsonl")) == 2


def test_samples_continue_as_coarse_as_their_file_after_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "samples-0.jsonl"
    path.write_bytes(b"\n" * (3 << 20))
    file = SampleFile(path)
    for second in range(1, 18):
        file.add({"time": START + second, "memory": second, "gpus": []})
    file.close()
    assert [
        line.get("seconds", 1) for line in map(json.loads, path.read_text().split("\n\n")[-1].strip().splitlines())
    ] == [1, 8, 8]
