"""The largest allocations of a run, read from a file that may be any file."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from ddp_kit.errors import UsageError
from ddp_kit.report.command import run as report
from ddp_kit.report.findings import profiles_of
from ddp_kit.report.memory_file import LineMemory, MemorySummary, read_memory
from ddp_kit.report.run_history import read_runs
from ddp_kit.terminal import Terminal

from recorded_run import begin, write_record  # isort: skip

LINE = {"file": "model.py", "line": 12, "function": "forward", "bytes": 3 << 30, "count": 24}
FOUND: dict[str, Any] = {
    "format": 1, "rank": 1, "steps": [10, 12], "complete": True, "bytes": 8 << 30, "earlier": 4 << 30,
    "lines": [LINE, {"file": "", "line": 0, "function": "", "bytes": 1 << 29, "count": 1}],
}  # fmt: skip


def written(folder: Path, found: Any, name: str = "memory_rank1_steps10-12.json") -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(found if isinstance(found, str) else json.dumps(found))
    return path


def test_memory_file_valid_returns_summary(tmp_path: Path) -> None:
    lines = (LineMemory("model.py", 12, "forward", 3 << 30, 24), LineMemory("", 0, "", 1 << 29, 1))
    summary = read_memory(written(tmp_path, FOUND))
    assert summary == MemorySummary(1, 1, (10, 12), 8 << 30, 4 << 30, lines)
    assert summary.other == 1 << 29


@pytest.mark.parametrize(
    ("found", "problem"),
    [
        ("", "Invalid JSON: EOF while parsing"),
        (json.dumps(FOUND)[:-20], "Invalid JSON: EOF while parsing"),
        ("\x80\x04\x95", "Invalid JSON: expected value"),
        ("[" * 100_000, "Invalid JSON: recursion limit exceeded"),
        ("9" * 5000, "Invalid JSON: number out of range"),
        (" " * (1 << 20) + "{}", "it is larger than 1 MiB"),
        ([FOUND], "Input should be an object"),
        ({}, "`format`: Field required"),
        ({**FOUND, "format": 2}, "`format`: Input should be 1"),
        ({**FOUND, "rank": "1"}, "`rank`: Input should be a valid integer"),
        ({**FOUND, "bytes": -1}, "`bytes`: Input should be greater than or equal to 0"),
        ({**FOUND, "earlier": 1e400}, "`earlier`: Input should be a valid integer"),
        ({**FOUND, "bytes": 1 << 70}, "`bytes`: Input should be less than"),
        ({**FOUND, "bytes": True}, "`bytes`: Input should be a valid integer"),
        ({**FOUND, "steps": [10]}, "`steps.1`: Field required"),
        ({**FOUND, "lines": {}}, "`lines`: Input should be a valid array"),
        ({**FOUND, "lines": ["model.py"]}, "`lines.0`: Input should be an object"),
        ({**FOUND, "lines": [{**LINE, "function": None}]}, "`lines.0.function`: Input should be a valid string"),
        (
            {**FOUND, "lines": [{**LINE, "file": "\x1b]0;title\x07"}]},
            "`lines.0.file`: Value error, not printable text",
        ),
        ({**FOUND, "lines": [{**LINE, "count": 0.5}]}, "`lines.0.count`: Input should be a valid integer"),
    ],
    ids=range(20),
)
def test_memory_file_invalid_raises_usage_error(tmp_path: Path, found: Any, problem: str) -> None:
    path = written(tmp_path, found)
    with pytest.raises(UsageError) as refused:
        read_memory(path)
    assert str(refused.value).startswith(f"{path} ")
    assert problem in str(refused.value)
    assert "profile" in refused.value.hint


def test_memory_file_unreadable_raises_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read: No such file or directory"):
        read_memory(tmp_path / "memory_rank0_steps1-2.json")
    with pytest.raises(UsageError, match="cannot be read: Is a directory"):
        read_memory(tmp_path)


def test_report_shows_memory_files(tmp_path: Path) -> None:
    written(
        tmp_path / "profile", {**FOUND, "complete": False, "lines": [{**LINE, "function": "<b>"}, FOUND["lines"][1]]}
    )
    written(tmp_path / "profile", "{", "memory_rank2_steps10-12.json")
    config = {"profile": {"steps": [10, 12], "dir": "profile"}}
    record = write_record(tmp_path / "run", [begin(folder=str(tmp_path), config=config)])
    said: list[str] = []
    assert report([str(record), "--out", str(tmp_path / "report.html")], Terminal({}, said.append)) == 0
    told = [line.strip() for line in said]
    at = told.index("Memory of rank 1, steps 10 to 12 (memory_rank1_steps10-12.json):")
    assert told[at + 1 : at + 5] == [
        "peak memory: 8.00 GiB, including 4.00 GiB allocated before step 10, such as weights and optimizer state",
        "<b> (model.py:12): 3.00 GiB in 24 tensors",
        "code outside Python, such as the backward pass: 512.00 MiB in 1 tensor",
        "there were too many allocations to record all of them: record fewer steps",
    ]
    assert any("memory_rank2_steps10-12.json is not a valid memory file: Invalid JSON" in line for line in told)
    html = (tmp_path / "report.html").read_text()
    assert "<th scope=row>&lt;b&gt; (model.py:12)</th><td>24</td><td>3,072</td><td>37.5%</td>" in html
    assert "<th scope=row>other lines</th><td></td><td>512</td><td>6.2%</td>" in html
    assert "<th scope=row>allocated before the recording</th><td></td><td>4,096</td><td>50.0%</td>" in html


def test_run_without_gpu_has_no_memory_profile(tmp_path: Path) -> None:
    config = {"profile": {"steps": [10, 12], "dir": "profile"}}
    (run,) = read_runs([write_record(tmp_path / "run", [begin(folder=os.fspath(tmp_path), config=config)])])
    assert profiles_of(run) == ()
