"""Traces of the steps that were asked for, and of no others."""

import gzip
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import profile, record_function

from ddp_kit.config.settings import ProfileConfig
from ddp_kit.errors import ConfigError
from ddp_kit.report.memory_file import read_memory
from ddp_kit.torch_internals import memory_snapshot
from ddp_kit.trainer import profile as profile_module
from ddp_kit.trainer.profile import Recorder, save_memory_snapshot


def recorder(folder: Path, steps: tuple[int, int] | None = (2, 3), rank: int = 0, **settings: Any) -> Recorder:
    return Recorder(ProfileConfig(steps=steps, dir=folder, **settings), rank)


def train(recording: Recorder, first: int = 1, last: int = 5, fails_in: int = 0) -> None:
    try:
        for number in range(first, last + 1):
            recording.before_step(number)
            with record_function(f"step {number}"):
                torch.ones(3, 7) @ torch.ones(7, 2)
            if number == fails_in:
                raise RuntimeError("the user's own")
            recording.after_step(number)
    finally:
        recording.close()


def recorded(path: Path) -> list[str]:
    """The names of the steps in a trace."""
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    return sorted({event["name"] for event in events if str(event.get("name")).startswith("step ")})


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_profile_records_exactly_the_chosen_steps(tmp_path: Path, lines: list[str]) -> None:
    train(recorder(tmp_path / "traces"))
    path = tmp_path / "traces" / "rank0_steps2-3.json.gz"
    assert names(tmp_path / "traces") == [path.name]
    assert recorded(path) == ["step 2", "step 3"]
    assert lines == [f"INFO profile: wrote {path} (open it at ui.perfetto.dev)"]


def test_profile_trace_has_shapes(tmp_path: Path) -> None:
    train(recorder(tmp_path))
    with gzip.open(tmp_path / "rank0_steps2-3.json.gz") as file:
        shapes = [event.get("args", {}).get("Input Dims") for event in json.load(file)["traceEvents"]]
    assert [[3, 7], [7, 2]] in shapes


def test_profile_trace_marks_each_step_and_has_python_functions(tmp_path: Path) -> None:
    train(recorder(tmp_path))
    with gzip.open(tmp_path / "rank0_steps2-3.json.gz") as file:
        trace = json.load(file)
    marks = [event for event in trace["traceEvents"] if str(event.get("name")).startswith("ProfilerStep#")]
    assert [mark["name"] for mark in marks] == ["ProfilerStep#2", "ProfilerStep#3"]
    assert marks[0]["ts"] + marks[0]["dur"] <= marks[1]["ts"]
    for event in trace["traceEvents"]:
        if event.get("cat") == "cpu_op" and event["name"] == "aten::mm":
            assert any(mark["ts"] <= event["ts"] <= mark["ts"] + mark["dur"] for mark in marks)
    functions = [event["name"] for event in trace["traceEvents"] if event.get("cat") == "python_function"]
    assert any(name.endswith(": train") for name in functions)
    assert trace["float32_matmul_precision"] == torch.get_float32_matmul_precision()


@pytest.mark.parametrize(("ranks", "recording"), [((0,), {0}), ((1, 2), {1, 2}), (None, {0, 1, 2})])
def test_profile_is_recorded_by_the_chosen_ranks(
    tmp_path: Path, ranks: tuple[int, ...] | None, recording: set[int]
) -> None:
    for rank in range(3):
        train(recorder(tmp_path, rank=rank, ranks=ranks))
    assert names(tmp_path) == [f"rank{rank}_steps2-3.json.gz" for rank in sorted(recording)]


def test_profile_without_steps_records_nothing(tmp_path: Path) -> None:
    train(recorder(tmp_path / "traces", steps=None))
    assert not (tmp_path / "traces").exists()


def test_profile_of_a_run_that_ends_in_the_window_is_written(tmp_path: Path) -> None:
    train(recorder(tmp_path, steps=(2, 100)), last=3)
    assert recorded(tmp_path / "rank0_steps2-3.json.gz") == ["step 2", "step 3"]


def test_profile_of_a_run_that_fails_in_the_window_is_written(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="the user's own"):
        train(recorder(tmp_path, steps=(2, 100)), fails_in=2)
    assert recorded(tmp_path / "rank0_steps2-2.json.gz") == ["step 2"]
    assert not torch.autograd._profiler_enabled()  # type: ignore[attr-defined]


def test_profile_of_a_run_resumed_in_the_window_records_the_rest(tmp_path: Path) -> None:
    train(recorder(tmp_path, steps=(2, 4)), first=3)
    assert recorded(tmp_path / "rank0_steps3-4.json.gz") == ["step 3", "step 4"]


def test_profile_of_a_run_resumed_after_the_window_records_nothing(tmp_path: Path) -> None:
    train(recorder(tmp_path), first=4)
    assert names(tmp_path) == []


def test_profile_is_skipped_while_the_users_profiler_runs(tmp_path: Path, lines: list[str]) -> None:
    with profile() as own:
        train(recorder(tmp_path))
    assert {"step 1", "step 2", "step 5"} <= {event.key for event in own.key_averages()}
    assert names(tmp_path) == []
    assert lines == ["WARNING profile: step 2 is not recorded: another torch profiler is running"]


def test_profiler_that_does_not_start_does_not_end_the_run(
    tmp_path: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_profile: object) -> None:
        raise RuntimeError("no CUPTI")

    monkeypatch.setattr(profile, "start", refuse)
    train(recorder(tmp_path))
    assert lines == ["WARNING profile: step 2 cannot be recorded: no CUPTI"]


def test_profile_folder_that_cannot_be_written_is_an_error_before_training(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("a file")
    with pytest.raises(ConfigError, match="profile.dir = .*taken/traces.*Not a directory") as found:
        recorder(tmp_path / "taken" / "traces")
    assert "profile.steps" in found.value.hint
    recorder(tmp_path / "taken" / "traces", rank=1)  # which does not record


def test_profile_trace_that_cannot_be_written_does_not_end_the_run(tmp_path: Path, lines: list[str]) -> None:
    recording = recorder(tmp_path / "traces")
    (tmp_path / "traces").rmdir()
    train(recording)
    assert len(lines) == 1
    assert lines[0].startswith("WARNING profile: no trace was written to ")


class Allocator:
    """In place of a GPU's: what a script that allocates once per step would leave in it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.events: list[dict[str, Any]] = []
        self.asked: list[int] = []
        monkeypatch.setattr(profile_module, "uses_gpu", lambda: True)
        monkeypatch.setattr(profile_module, "memory_snapshot", self.snapshot)
        monkeypatch.setattr(profile_module, "record_allocations", self.record)

    def record(self, most: int) -> None:
        self.asked.append(most)
        self.events = [] if not most else [self.event()]

    def event(self) -> dict[str, Any]:
        here = {"filename": str(Path.cwd() / "model.py"), "line": 12, "name": "forward"}
        torch_itself = {
            "filename": str(Path(torch.__file__).parent / "nn" / "functional.py"),
            "line": 1,
            "name": "gelu",
        }
        return {"action": "alloc", "addr": 1, "size": 1000, "stream": 0, "frames": [torch_itself, here]}

    def snapshot(self) -> dict[str, Any]:
        blocks = [
            {"address": address, "size": 1024, "requested_size": 1000, "state": "active_allocated", "frames": []}
            for address in (1, 2)
        ]
        return {"segments": [{"device": 0, "blocks": blocks}], "device_traces": [self.events, []]}


def test_profile_of_a_gpu_records_its_allocations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[str]
) -> None:
    allocator = Allocator(monkeypatch)
    train(recorder(tmp_path))
    assert names(tmp_path) == ["memory_rank0_steps2-3.json", "rank0_steps2-3.json.gz"]
    assert json.loads((tmp_path / "memory_rank0_steps2-3.json").read_text()) == {
        "format": 1, "rank": 0, "steps": [2, 3], "complete": True, "bytes": 2000, "earlier": 1000,
        "lines": [{"file": "model.py", "line": 12, "function": "forward", "bytes": 1000, "count": 1}],
    }  # fmt: skip
    assert allocator.asked == [1_000_000, 0], "nothing is recorded before and after these steps"
    assert lines[0] == f"INFO profile: wrote {tmp_path}/memory_rank0_steps2-3.json (`ddpkit report` shows it)"
    summary = read_memory(tmp_path / "memory_rank0_steps2-3.json")
    assert (summary.bytes, str(summary.lines[0].place)) == (2000, "forward (model.py:12)")


def test_profile_of_a_run_that_fails_in_the_window_has_its_allocations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    allocator = Allocator(monkeypatch)
    with pytest.raises(RuntimeError, match="the user's own"):
        train(recorder(tmp_path, steps=(2, 100)), fails_in=2)
    assert names(tmp_path) == ["memory_rank0_steps2-2.json", "rank0_steps2-2.json.gz"]
    assert allocator.asked[-1] == 0


def test_profile_does_not_stop_a_memory_history_of_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[str]
) -> None:
    allocator = Allocator(monkeypatch)
    allocator.events = [allocator.event()]
    train(recorder(tmp_path))
    assert allocator.asked == []
    assert names(tmp_path) == ["rank0_steps2-3.json.gz"]
    assert lines[0] == "WARNING profile: memory is not recorded, because the script itself records the memory history"


def test_profile_of_memory_that_cannot_be_recorded_does_not_end_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[str]
) -> None:
    allocator = Allocator(monkeypatch)

    def refuse(_most: int) -> None:
        raise RuntimeError("cudaMallocAsync has no history")

    monkeypatch.setattr(profile_module, "record_allocations", refuse)
    train(recorder(tmp_path))
    assert lines[0] == "WARNING profile: memory cannot be recorded: cudaMallocAsync has no history"
    monkeypatch.setattr(profile_module, "record_allocations", allocator.record)
    monkeypatch.setattr(profile_module, "memory_peak", lambda *_: {}["segments"])
    train(recorder(tmp_path))
    path = f"{tmp_path}/memory_rank0_steps2-3"
    assert lines[2].startswith(f"WARNING profile: the record of GPU memory could not be written to {path}")
    assert allocator.asked == [1_000_000, 0]
    assert names(tmp_path) == ["rank0_steps2-3.json.gz"]


def test_memory_snapshot_without_a_gpu_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert save_memory_snapshot(tmp_path / "traces", 0) is None
    assert names(tmp_path) == []


def test_memory_snapshot_has_its_rank_in_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lines: list[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda.memory, "_dump_snapshot", lambda path: Path(path).write_bytes(b"snapshot"))
    assert save_memory_snapshot(tmp_path / "traces", 3) == tmp_path / "traces" / "rank3_out_of_memory.pickle"
    assert names(tmp_path / "traces") == ["rank3_out_of_memory.pickle"]
    assert save_memory_snapshot(tmp_path / "traces" / "rank3_out_of_memory.pickle", 3) is None
    assert len(lines) == 1
    assert lines[0].startswith("WARNING profile: no memory snapshot")


@pytest.mark.gpu
def test_profile_of_a_gpu_has_kernels_and_a_memory_snapshot(tmp_path: Path) -> None:
    recording = recorder(tmp_path, steps=(1, 1))
    recording.before_step(1)
    torch.ones(64, 64, device="cuda") @ torch.ones(64, 64, device="cuda")
    recording.after_step(1)
    with gzip.open(tmp_path / "rank0_steps1-1.json.gz") as file:
        assert any(event.get("cat") == "kernel" for event in json.load(file)["traceEvents"])
    path = save_memory_snapshot(tmp_path, 0)
    assert path is not None
    assert path.stat().st_size > 0


@pytest.mark.gpu
def test_profile_of_a_gpu_has_the_lines_that_allocated_its_memory(tmp_path: Path) -> None:
    before = torch.ones(1 << 20, device="cuda")  # 4 MiB
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    recording = recorder(tmp_path, steps=(1, 2))
    for number in (1, 2):
        recording.before_step(number)
        small = [torch.ones(1 << 20, device="cuda") for _ in range(3)]
        large = torch.ones(1 << 22, device="cuda")
        del small, large
        recording.after_step(number)
    peak = torch.cuda.memory_stats()["requested_bytes.all.peak"]
    summary = read_memory(tmp_path / "memory_rank0_steps1-2.json")
    assert summary.complete
    assert summary.bytes == pytest.approx(peak, rel=0.01)
    assert summary.earlier >= before.nbytes
    (first, second) = summary.lines[:2]
    assert (first.bytes, first.count) == (16 << 20, 1)
    assert (second.bytes, second.count) == (12 << 20, 3)
    assert [Path(each.file).name for each in (first, second)] == [Path(__file__).name] * 2
    assert first.line == second.line + 1
    assert not any(memory_snapshot()["device_traces"]), "recording has ended"
