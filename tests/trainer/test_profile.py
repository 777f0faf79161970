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
from ddp_kit.trainer.profile import Recorder, save_memory_snapshot


def recorder(folder: Path, steps: tuple[int, int] | None = (2, 3), rank: int = 0, **settings: Any) -> Recorder:
    return Recorder(ProfileConfig(steps=steps, dir=folder, **settings), rank)


def record_steps(recording: Recorder, first: int = 1, last: int = 5, fails_in: int = 0) -> None:
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


def recorded_steps(path: Path) -> list[str]:
    """The names of the steps in a trace."""
    with gzip.open(path) as file:
        events = json.load(file)["traceEvents"]
    return sorted({event["name"] for event in events if str(event.get("name")).startswith("step ")})


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_profile_records_exactly_the_chosen_steps(tmp_path: Path, lines: list[str]) -> None:
    record_steps(recorder(tmp_path / "traces"))
    path = tmp_path / "traces" / "rank0_steps2-3.json.gz"
    assert names(tmp_path / "traces") == [path.name]
    assert recorded_steps(path) == ["step 2", "step 3"]
    assert lines == [f"INFO profile: wrote {path} (open it at ui.perfetto.dev)"]


def test_profile_trace_has_shapes(tmp_path: Path) -> None:
    record_steps(recorder(tmp_path))
    with gzip.open(tmp_path / "rank0_steps2-3.json.gz") as file:
        shapes = [event.get("args", {}).get("Input Dims") for event in json.load(file)["traceEvents"]]
    assert [[3, 7], [7, 2]] in shapes


def test_profile_trace_marks_each_step_and_has_python_functions(tmp_path: Path) -> None:
    record_steps(recorder(tmp_path))
    with gzip.open(tmp_path / "rank0_steps2-3.json.gz") as file:
        trace = json.load(file)
    marks = [event for event in trace["traceEvents"] if str(event.get("name")).startswith("ProfilerStep#")]
    assert [mark["name"] for mark in marks] == ["ProfilerStep#2", "ProfilerStep#3"]
    assert marks[0]["ts"] + marks[0]["dur"] <= marks[1]["ts"]
    for event in trace["traceEvents"]:
        if event.get("cat") == "cpu_op" and event["name"] == "aten::mm":
            assert any(mark["ts"] <= event["ts"] <= mark["ts"] + mark["dur"] for mark in marks)
    functions = [event["name"] for event in trace["traceEvents"] if event.get("cat") == "python_function"]
    assert any(name.endswith(": record_steps") for name in functions)


@pytest.mark.parametrize(("ranks", "recording"), [((0,), {0}), ((1, 2), {1, 2}), (None, {0, 1, 2})])
def test_profile_is_recorded_by_the_chosen_ranks(
    tmp_path: Path, ranks: tuple[int, ...] | None, recording: set[int]
) -> None:
    for rank in range(3):
        record_steps(recorder(tmp_path, rank=rank, ranks=ranks))
    assert names(tmp_path) == [f"rank{rank}_steps2-3.json.gz" for rank in sorted(recording)]


def test_profile_without_steps_records_nothing(tmp_path: Path) -> None:
    record_steps(recorder(tmp_path / "traces", steps=None))
    assert not (tmp_path / "traces").exists()


def test_profile_of_a_run_that_ends_in_the_window_is_written(tmp_path: Path) -> None:
    record_steps(recorder(tmp_path, steps=(2, 100)), last=3)
    assert recorded_steps(tmp_path / "rank0_steps2-3.json.gz") == ["step 2", "step 3"]


def test_profile_of_a_run_that_fails_in_the_window_is_written(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="the user's own"):
        record_steps(recorder(tmp_path, steps=(2, 100)), fails_in=2)
    assert recorded_steps(tmp_path / "rank0_steps2-2.json.gz") == ["step 2"]
    assert not torch.autograd._profiler_enabled()  # type: ignore[attr-defined]


def test_profile_of_a_run_resumed_in_the_window_records_the_rest(tmp_path: Path) -> None:
    record_steps(recorder(tmp_path, steps=(2, 4)), first=3)
    assert recorded_steps(tmp_path / "rank0_steps3-4.json.gz") == ["step 3", "step 4"]


def test_profile_of_a_run_resumed_after_the_window_records_nothing(tmp_path: Path) -> None:
    record_steps(recorder(tmp_path), first=4)
    assert names(tmp_path) == []


def test_profile_is_skipped_while_the_users_profiler_runs(tmp_path: Path, lines: list[str]) -> None:
    with profile() as own:
        record_steps(recorder(tmp_path))
    assert {"step 1", "step 2", "step 5"} <= {event.key for event in own.key_averages()}
    assert names(tmp_path) == []
    assert lines == ["WARNING profile: step 2 is not recorded: another torch profiler is running"]


def test_profiler_that_does_not_start_does_not_end_the_run(
    tmp_path: Path, lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_profile: object) -> None:
        raise RuntimeError("no CUPTI")

    monkeypatch.setattr(profile, "start", refuse)
    record_steps(recorder(tmp_path))
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
    record_steps(recording)
    assert len(lines) == 1
    assert lines[0].startswith("WARNING profile: no trace was written to ")


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
