"""A run that gets a stop request saves, exits with the code for a restart, and later continues bitwise."""

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ddp_kit.checkpoint.format import checkpoints
from tests.support.launching import DDPKIT, PROGRAMS, run, seconds

pytestmark = pytest.mark.slow

SCRIPT = PROGRAMS / "preempted.py"
LAUNCH = [DDPKIT, "launch", "--nproc-per-node", "2"]
ALONE = [sys.executable]
MOST = round(seconds(300))
"""Steps of a run that is to be stopped. One takes 0.2 s once the signal is sent: all ranks hear it before the last."""


def train_and_signal(
    by: list[str | Path],
    folder: Path,
    who: str = "nobody",
    signal: str = "",
    settings: str = "{}",
    script: Path = SCRIPT,
    **env: str,
) -> "subprocess.CompletedProcess[str]":
    return run(*by, script, folder, who, signal, settings, env=env)


def end_line(run: "subprocess.CompletedProcess[str]") -> str:
    assert run.returncode == 0, run.stderr
    (line,) = [line for line in run.stdout.splitlines() if line.startswith("ended")]
    return line


def stopped(run: "subprocess.CompletedProcess[str]", folder: Path, why: str) -> int:
    """The step after which it did, which is saved."""
    assert run.returncode == 75, run.stderr
    newest = next(found for found in checkpoints(folder, hashes=True) if found.whole)
    assert run.stderr.count(f"stopped by {why} after step {newest.step}: the run is saved") == 1, run.stderr
    return newest.step


def last_state(folder: Path) -> dict[str, object]:
    """The last checkpoint, without its tensors."""
    newest = next(found for found in checkpoints(folder) if found.whole)
    state = json.loads((newest.path / "state.json").read_text())
    return {part: state[part] for part in ("progress", "optimizer", "callbacks", "random")}


def test_stop_signals_at_different_times_save_the_same_step_on_all_ranks(tmp_path: Path) -> None:
    settings = json.dumps({"max_steps": MOST})
    whole = end_line(train_and_signal(LAUNCH, tmp_path / "undisturbed", settings=settings))
    folder = tmp_path / "run"
    first = stopped(train_and_signal(LAUNCH, folder, "launcher", "SIGTERM", settings), folder, "SIGTERM")
    second = stopped(train_and_signal(LAUNCH, folder, "rank", "SIGUSR1", settings), folder, "SIGUSR1")
    assert 5 <= first <= second - 5 < MOST - 5
    assert end_line(train_and_signal(LAUNCH, folder, settings=settings)) == whole


def test_run_stopped_by_ctrl_c_or_max_seconds_resumes_later(tmp_path: Path) -> None:
    whole = end_line(train_and_signal(ALONE, tmp_path / "undisturbed"))
    folder = tmp_path / "run"
    stopped(train_and_signal(ALONE, folder, "rank", "SIGINT"), folder, "SIGINT")
    first = stopped(train_and_signal(ALONE, folder, "rank", "SIGUSR2"), folder, "SIGUSR2")
    limit = '{"max_seconds": 0.01}'
    assert stopped(train_and_signal(ALONE, folder, settings=limit), folder, "max_seconds") == first + 1
    assert end_line(train_and_signal(ALONE, folder)) == whole


# The job's last seconds begin once a rank has done its imports.
ENDS_SOON = f"""
import os, runpy, time
import ddp_kit, torch
os.environ["SLURM_JOB_END_TIME"] = str(int(time.time() + {seconds(12)}))
runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
"""


def test_run_saves_before_its_time_limit_and_warns_if_a_save_exceeds_the_grace(
    script: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    often = json.dumps({"checkpoint": {"dir": str(folder), "every_steps": 1}})
    run = train_and_signal(LAUNCH, folder, "saver", "slow", often, script(ENDS_SOON), DDPKIT_GRACE_SECONDS="6")
    stopped(run, folder, "the approaching end of the job")
    said = (
        r"a save takes about \d+\.\d s, which may not fit into the 1 s between SIGTERM and SIGKILL; "
        r"set --shutdown-timeout to \d"
    )
    assert len(re.findall(said, run.stderr)) == 1, run.stderr


def test_saves_every_seconds_are_of_the_same_step_on_all_ranks(tmp_path: Path) -> None:
    most = round(seconds(30))
    often = {"dir": str(tmp_path), "every_seconds": 0.1, "keep_last": 2 * most}
    end_line(train_and_signal(LAUNCH, tmp_path, "nobody", "slow", json.dumps({"checkpoint": often, "max_steps": most})))
    steps = [found.step for found in checkpoints(tmp_path, hashes=True) if found.whole]
    assert len(steps) >= 3
    assert steps[0] == most


@pytest.mark.parametrize("steps", [25, 20])
def test_evaluation_too_long_for_the_grace_is_left_to_the_resumed_run(steps: int, tmp_path: Path) -> None:
    # 20: it is the last one of the run.
    settings = f'{{"eval_every_steps": 10, "max_steps": {steps}}}'
    whole = end_line(train_and_signal(LAUNCH, tmp_path / "undisturbed", settings=settings))
    folder = tmp_path / "run"
    assert stopped(train_and_signal(LAUNCH, folder, "evaluation", "SIGTERM", settings), folder, "SIGTERM") == 20
    assert end_line(train_and_signal(LAUNCH, folder, settings=settings)) == whole
    assert last_state(folder) == last_state(tmp_path / "undisturbed")


EVALUATED = '{"eval_every_steps": 20}'


def test_run_stopped_before_its_first_step_asks_for_a_restart(tmp_path: Path) -> None:
    whole = end_line(train_and_signal(ALONE, tmp_path / "undisturbed", settings=EVALUATED))
    folder = tmp_path / "run"
    assert stopped(train_and_signal(ALONE, folder, "sanity", "SIGTERM", EVALUATED), folder, "SIGTERM") == 1
    assert end_line(train_and_signal(ALONE, folder, settings=EVALUATED)) == whole


def test_stop_request_of_one_rank_before_the_first_step_stops_the_run(tmp_path: Path) -> None:
    settings = json.dumps({"eval_every_steps": 20, "max_steps": MOST})
    assert stopped(train_and_signal(LAUNCH, tmp_path, "sanity", "SIGTERM", settings), tmp_path, "SIGTERM") < MOST


def test_signal_after_the_last_step_does_not_change_the_result(tmp_path: Path) -> None:
    assert end_line(train_and_signal(ALONE, tmp_path, "end", "SIGTERM")).startswith("ended 60")
