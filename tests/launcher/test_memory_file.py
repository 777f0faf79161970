"""The largest allocations of a run, read from a file that may be any file."""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from ddp_kit.errors import UsageError
from ddp_kit.launcher.commands.report import run as report
from ddp_kit.launcher.report.findings import profiles_of
from ddp_kit.launcher.report.run_history import read_runs
from ddp_kit.launcher.trace.memory_file import read_memory
from ddp_kit.launcher.trace.records import CodeLocation, LineMemory, MemorySummary

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


def test_a_file_is_read(tmp_path: Path) -> None:
    lines = (LineMemory(CodeLocation("forward", "model.py", 12), 3 << 30, 24), LineMemory(None, 1 << 29, 1))
    summary = read_memory(written(tmp_path, FOUND))
    assert summary == MemorySummary(1, (10, 12), 8 << 30, 4 << 30, complete=True, lines=lines)
    assert summary.other == 1 << 29


@pytest.mark.parametrize(
    ("found", "problem"),
    [
        ("", "is not JSON, or was not written completely"),
        (json.dumps(FOUND)[:-20], "is not JSON, or was not written completely"),
        ("\x80\x04\x95", "is not JSON"),
        ("[" * 100_000, "too deeply nested"),
        ("9" * 5000, "is not JSON"),
        (" " * (1 << 20) + "{}", "it is larger than 1 MiB"),
        ([FOUND], "the file contains a list instead of a JSON object"),
        ({}, "`format` is not a non-negative integer"),
        ({**FOUND, "format": 2}, "the file has format 2, but this version of ddpkit reads format 1"),
        ({**FOUND, "rank": "1"}, "`rank` is not a non-negative integer"),
        ({**FOUND, "bytes": -1}, "`bytes` is not a non-negative integer"),
        ({**FOUND, "earlier": 1e400}, "`earlier` is not a non-negative integer"),
        ({**FOUND, "bytes": 1 << 70}, "`bytes` is not a non-negative integer"),
        ({**FOUND, "bytes": True}, "`bytes` is not a non-negative integer"),
        ({**FOUND, "steps": [10]}, "`steps` is not a pair of numbers"),
        ({**FOUND, "lines": {}}, "`lines` is not a list"),
        ({**FOUND, "lines": ["model.py"]}, "an entry of `lines` is a str instead of a JSON object"),
        ({**FOUND, "lines": [{**LINE, "function": None}]}, "`function` in an entry of `lines` is not printable text"),
        (
            {**FOUND, "lines": [{**LINE, "file": "\x1b]0;title\x07"}]},
            "`file` in an entry of `lines` is not printable text",
        ),
        ({**FOUND, "lines": [{**LINE, "count": 0.5}]}, "`count` is not a non-negative integer"),
    ],
    ids=range(20),
)
def test_any_other_file_is_refused_in_words(tmp_path: Path, found: Any, problem: str) -> None:
    path = written(tmp_path, found)
    with pytest.raises(UsageError) as refused:
        read_memory(path)
    assert str(refused.value).startswith(f"{path} ")
    assert problem in str(refused.value)
    assert "profile" in refused.value.hint


def test_a_file_that_cannot_be_opened_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read: No such file or directory"):
        read_memory(tmp_path / "memory_rank0_steps1-2.json")
    with pytest.raises(UsageError, match="cannot be read: Is a directory"):
        read_memory(tmp_path)


def test_a_report_tells_and_shows_it(tmp_path: Path) -> None:
    written(
        tmp_path / "profile", {**FOUND, "complete": False, "lines": [{**LINE, "function": "<b>"}, FOUND["lines"][1]]}
    )
    written(tmp_path / "profile", "{", "memory_rank2_steps10-12.json")
    config = {"profile": {"steps": [10, 12], "dir": "profile"}}
    record = write_record(tmp_path / "run", [begin(folder=str(tmp_path), config=config)])
    said: list[str] = []
    assert report([str(record), "--out", str(tmp_path / "report.html")], said.append) == 0
    told = [line.strip() for line in said]
    at = told.index("Memory of rank 1, steps 10 to 12 (memory_rank1_steps10-12.json):")
    assert told[at + 1 : at + 5] == [
        "peak memory: 8.00 GiB, including 4.00 GiB allocated before step 10, such as weights and optimizer state",
        "<b> (model.py:12): 3.00 GiB in 24 tensors",
        "code outside Python, such as the backward pass: 512.00 MiB in 1 tensor",
        "there were too many allocations to record all of them: record fewer steps",
    ]
    assert any("memory_rank2_steps10-12.json is not JSON" in line for line in told)
    html = (tmp_path / "report.html").read_text()
    assert "<th scope=row>&lt;b&gt; (model.py:12)</th><td>24</td><td>3,072</td><td>37.5%</td>" in html
    assert "<th scope=row>other lines</th><td></td><td>512</td><td>6.2%</td>" in html
    assert "<th scope=row>allocated before the recording</th><td></td><td>4,096</td><td>50.0%</td>" in html


def test_a_run_without_a_gpu_has_none(tmp_path: Path) -> None:
    config = {"profile": {"steps": [10, 12], "dir": "profile"}}
    (run,) = read_runs([write_record(tmp_path / "run", [begin(folder=os.fspath(tmp_path), config=config)])])
    assert profiles_of(run) == ()
