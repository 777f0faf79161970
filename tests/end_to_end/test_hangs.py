"""A rank that does nothing any more, on the real command: found, named, its stack shown, and nothing left."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support import launching
from tests.support.job_processes import JobProcesses
from tests.support.launching import PROGRAMS, seconds

pytestmark = pytest.mark.slow

HUNG = 124
TRAINS = PROGRAMS / "hangs_in_training.py"
REDUCES = PROGRAMS / "hangs_between_collectives.py"
ENDS = PROGRAMS / "hangs_after_the_last_collective.py"
LIMIT = seconds(4)
"""For --hang-timeout. The launcher allows ten times as much for the first two steps, or the first ten collectives."""


def launch_two_ranks(*words: object, **how: Any) -> "subprocess.CompletedProcess[str]":
    """Run two ranks; nothing of them is left afterwards."""
    job = JobProcesses()
    run = launching.launch("--nproc-per-node", 2, *words, env=job.env, **how)
    assert job.alive() == {}
    return run


@pytest.mark.parametrize(
    ("fault", "workers", "told"),
    [
        ("stop", 0, r"in data \(ways_to_hang.py:\d+ in stop\) and stopped by a signal"),
        ("regex", 0, r"in data \(ways_to_hang.py:\d+ in regex\) with the interpreter lock held"),
        ("sleep", 1, r"in data \(ways_to_hang.py:\d+ in sleep\)"),
    ],
)
def test_hung_rank_in_a_trainer_is_named_with_its_stack(tmp_path: Path, fault: str, workers: int, told: str) -> None:
    run = launch_two_ranks("--hang-timeout", LIMIT, "--log-dir", tmp_path / "logs", TRAINS, fault, workers, 0)
    assert run.returncode == HUNG, run.stderr
    assert re.search(rf"rank 1 failed first: hung \(.*, after step 9\): no progress .*; {told}", run.stderr), run.stderr
    # The last form: on a loaded machine its native frames are not read within the time that they are given.
    waiting = r"(the gradient all-reduce|the backward pass|the backward pass, which may be waiting for other ranks)"
    assert re.search(rf"^  rank 0 was in {waiting} \(hangs_in_training.py", run.stderr, re.MULTILINE), run.stderr
    assert re.search(rf'^  File ".*ways_to_hang.py", line \d+, in {fault}\n', run.stderr, re.MULTILINE), run.stderr
    (found,) = tmp_path.glob("logs/*/verdict.json")
    record = json.loads(found.read_text())
    assert (record["exit_code"], record["first_failure"]["rank"]) == (HUNG, 1)
    assert sorted(record["stacks"]) == ["0", "1"]
    assert f" {fault} (" in record["stacks"]["1"]


def test_hung_run_continues_after_a_restart_and_slow_steps_are_no_hang() -> None:
    run = launch_two_ranks("--hang-timeout", LIMIT, "--max-restarts", 1, TRAINS, "sleep", 0, LIMIT / 2)
    assert run.returncode == 0, run.stderr
    assert run.stderr.count(": hung (") == 1, run.stderr
    assert re.search(r"rank 1 failed first: hung .*; restart 1 of 1", run.stderr)
    assert re.search(r'^  File ".*ways_to_hang.py", line \d+, in sleep\n', run.stderr, re.MULTILINE), run.stderr
    assert run.stdout.count("done 20") == 2


def test_hang_in_a_script_without_a_trainer_is_detected(tmp_path: Path) -> None:
    run = launch_two_ranks("--hang-timeout", LIMIT, REDUCES, 600, cwd=tmp_path)
    assert run.returncode == HUNG, run.stderr
    assert re.search(
        r"rank 1 failed first: hung .*this rank has started 30 collectives, but other ranks have started 31", run.stderr
    ), run.stderr
    assert re.search(
        r"^  rank 0 was in all_reduce \(hangs_between_collectives.py:\d+ in work\)", run.stderr, re.MULTILINE
    )
    assert re.search(r'^  File ".*ways_to_hang.py", line \d+, in sleep\n', run.stderr, re.MULTILINE)


def test_hang_that_torchs_timeout_detects_first_names_the_missing_rank(tmp_path: Path) -> None:
    run = launch_two_ranks("--cold", REDUCES, LIMIT, cwd=tmp_path)
    assert run.returncode == HUNG, run.stderr
    assert "rank 1 failed first: hung" in run.stderr
    assert re.search(r"in the script \(ways_to_hang.py:\d+ in sleep\)", run.stderr), run.stderr
    assert "rank 0 then failed: RuntimeError: Timed out waiting" in run.stderr


@pytest.mark.parametrize(
    ("rank_0", "rank_1"), [("regex", "end"), ("pause", "end"), ("regex", "pause"), ("pause", "pause")]
)
def test_hung_rank_that_no_other_rank_waits_for_is_detected(rank_0: str, rank_1: str) -> None:
    run = launch_two_ranks("--hang-timeout", LIMIT, ENDS, rank_0, rank_1, 0, timeout=60)
    assert run.returncode == HUNG, run.stderr
    held = " with the interpreter lock held" if rank_0 == "regex" else ""
    told = rf"no progress for more than \S+ s; in the script \(ways_to_hang.py:\d+ in {rank_0}\){held}$"
    assert re.search(rf"rank 0 failed first: hung \(.*\): {told}", run.stderr, re.MULTILINE), run.stderr


def test_rank_that_works_after_the_others_have_ended_is_not_hung() -> None:
    run = launch_two_ranks("--hang-timeout", LIMIT, ENDS, "work", "end", 3 * LIMIT)
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("worked") == 1


def test_worker_in_uninterruptible_sleep_is_a_failure_that_counts() -> None:
    env = {"TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT": str(seconds(2))}
    done = launching.launch("--nproc-per-node", 2, "--max-restarts", 1, PROGRAMS / "vforks.py", env=env)
    assert done.returncode == HUNG, done.stderr
    assert done.stderr.count("rank 1 failed first: hung") == 2
    assert "uninterruptible sleep" in done.stderr
