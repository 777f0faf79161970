"""The record of a run: what a job with a restart leaves in its checkpoint folder, or in its log folder."""

import json
import os
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.launching import DDPKIT, PROGRAMS, clean_environment, launch, run, seconds, started, wait_until


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_run_record_of_a_job_that_restarts_is_one_record(tmp_path: Path) -> None:
    words = ["--nproc-per-node", 2, "--max-restarts", 1, PROGRAMS / "fails_once.py", "save", "--token", "abcdef123"]
    done = launch(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / "run" / "record"
    attempts = _lines(folder / "attempts.jsonl")
    assert [each["event"] for each in attempts if each["event"] != "advice"] == ["begin", "end", "begin", "done", "end"]
    first, failed, second, result, ended = (each for each in attempts if each["event"] != "advice")
    assert (first["format"], first["step"], first["ranks"], first["total_steps"]) == (1, 0, 2, 20)
    assert first["config"]["checkpoint"]["every_steps"] == 5
    assert first["command"][1:] == ["save", "--token", "****"]
    assert (failed["attempt"], failed["node"], failed["exit_code"]) == (first["attempt"], 0, 1)
    assert (failed["step"], ended["step"]) == (11, 20)
    assert "RuntimeError: boom" in failed["text"]
    assert second["step"] in (5, 10)
    assert second["attempt"].removesuffix(".1") == first["attempt"].removesuffix(".0")
    assert (result["step"], ended["exit_code"]) == (20, 0)
    rows = _lines(folder / "rows.jsonl")
    assert [each["step"] for each in rows if each["event"] == "train"] == list(range(2, 21, 2)), "each step once"
    assert [each["step"] for each in rows if each["event"] == "eval"] == [10, 20]
    assert all(len(each["rank_seconds"]) == 2 for each in rows if each["event"] == "train")
    samples = _lines(folder / "samples-0.jsonl")
    assert 0 <= samples[0]["cpu"] <= 1
    assert 0 < samples[0]["memory"] < samples[0]["memory_total"]
    told = run(DDPKIT, "report", "run", cwd=tmp_path)
    assert told.stdout.startswith("run: finished, 20 of 20 steps in "), told.stderr
    assert "Attempt 1 of 2: rank 1 failed first: " in told.stdout
    assert "RuntimeError: boom" in told.stdout


@pytest.mark.slow
def test_run_record_without_a_checkpoint_folder_is_in_the_log_folder(tmp_path: Path) -> None:
    words = ["--nproc-per-node", 2, "--log-dir", "logs", "--max-restarts", 1, PROGRAMS / "fails_once.py"]
    done = launch(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (folder,) = tmp_path.glob("logs/*/record")
    assert [each["event"] for each in _lines(folder / "attempts.jsonl")].count("end") == 2
    assert not list(tmp_path.glob("**/ddpkit-record")), "the launcher's note is removed"


@pytest.mark.slow
def test_run_records_of_several_trainers_in_one_process_are_separate(tmp_path: Path) -> None:
    words = ["--nproc-per-node", 2, "--log-dir", "logs", PROGRAMS / "several_records.py"]
    done = launch(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (logs,) = tmp_path.glob("logs/*/record")
    folders = {0.1: tmp_path / "run/record", 0.2: tmp_path / "probe/record", 0.3: logs, 0.4: logs.with_name("record-2")}
    for rate, folder in folders.items():
        rows = _lines(folder / "rows.jsonl")
        assert [(each["learning_rate"], each["step"]) for each in rows] == [(rate, step) for step in range(1, 5)]
        events = [each["event"] for each in _lines(folder / "attempts.jsonl") if each["event"] != "advice"]
        assert events == (["begin", "done", "end"] if rate == 0.4 else ["begin", "done"])
    assert not list(tmp_path.glob("**/ddpkit-*record")), "the launcher's notes are removed"
    told = run(DDPKIT, "report", logs.parent, "--out", tmp_path / "report.html")
    assert told.stdout.count(": finished, 4 of 4 steps in ") == 2, told.stdout + told.stderr


@pytest.mark.slow
def test_run_record_is_unchanged_by_a_second_job_that_is_refused(tmp_path: Path) -> None:
    path = PROGRAMS / "waits_at_step_7.py"
    with started(DDPKIT, "launch", "--cold", path, cwd=tmp_path) as first:
        wait_until((tmp_path / "at-7").exists, "step 7", within=120)
        second = launch("--cold", path, cwd=tmp_path)
        assert "another run is writing checkpoints" in second.stderr
        first.send_signal(signal.SIGTERM)
        (tmp_path / "go").touch()
        assert first.wait(seconds(120)) == 75
    begun, stop, end = _lines(tmp_path / "run" / "record" / "attempts.jsonl")
    assert [(each["event"], each["attempt"]) for each in (stop, end)] == [
        (e, begun["attempt"]) for e in ("stop", "end")
    ]
    stopped_at = end["step"]
    assert stop["step"] == stopped_at
    assert 7 <= stopped_at < 10
    told = run(DDPKIT, "report", "run", cwd=tmp_path)
    assert f"exit code 75, {stopped_at} of 20 steps in " in told.stdout, "the last row is of step 5"


@pytest.mark.slow
def test_names_that_are_not_utf8_can_be_trained_reported_and_submitted(tmp_path: Path) -> None:
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/caf\xe9"))
    folder.mkdir()
    script = folder / "train.py"
    script.write_text((PROGRAMS / "trains_and_saves.py").read_text())
    run, page = folder / "run", folder / "report.html"
    commands: list[list[object]] = [
        ["launch", "--nproc-per-node", "2", script, run],
        ["report", run, "--out", page],
        ["submit", "--on", "slurm", "--nodes", "2", "--gpus", "1", "--dry-run", script, run],
    ]
    for command in commands:
        done = subprocess.run(
            [DDPKIT, *map(str, command)],
            capture_output=True,
            check=False,
            env=clean_environment({"A_VARIABLE": "caf\udce9"}),
            timeout=seconds(120),
        )
        assert done.returncode == 0, done.stderr
    assert page.stat().st_size > 10_000
    assert b"caf\xe9/run" in done.stdout
    assert b"udce9" not in done.stdout
