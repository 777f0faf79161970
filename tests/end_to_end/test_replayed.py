"""`verify_ranks="replay"` with real ranks: corrupted gradients are named, and right scripts train as without it."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from ddp_kit.exit_codes import ExitCode
from tests.support import launching
from tests.support.launching import PROGRAMS

Start = Callable[..., "subprocess.CompletedProcess[str]"]
SCRIPT = PROGRAMS / "replayed.py"
FAULTS = 20  # for each number of ranks

RIGHT = {
    "plain": "ddp", "encoding": "ddp", "named_tuple": "ddp", "in_place": "ddp", "python_random": "ddp", "logs": "ddp",
    "weighted": "zero1", "bf16": "ddp", "short": "ddp", "accumulated": "zero1", "recomputed": "ddp", "lbfgs": "ddp",
    "updates": "ddp", "updates_in_place": "ddp", "compiled": "ddp", "momentum": "ddp",
}  # fmt: skip
NOT_REPEATABLE = {
    "gathers": "the loss function communicates with other ranks",
    "counter": "depends on more than its batch",
    "own_generator": "depends on more than its batch",
    "by_rank": "depends on more than its batch",
    "sometimes": "has changed weights of the model, which the pass of the step did not write, so",
    "unknown": "a batch of Pair has objects that cannot be sent to another rank",
}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_replay_of_random_faults_names_rank_and_step(start: Start, ranks: int) -> None:
    run = start("ddpkit", ranks, SCRIPT, "faults", "0", str(FAULTS))
    assert run.returncode == 0, run.stderr
    assert run.stdout.count(f"{FAULTS} faults named on rank") == ranks


@pytest.mark.slow
@pytest.mark.parametrize("name", RIGHT)
def test_replay_of_a_right_script_changes_nothing(start: Start, name: str) -> None:
    runs = [start("ddpkit", 3, SCRIPT, "case", name, RIGHT[name], verify, "replay") for verify in ("replay", "weights")]
    lines = [[line for line in run.stdout.splitlines() if line.startswith(name)] for run in runs]
    assert lines[0] == lines[1]
    assert len(lines[0]) == 1, runs[0].stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", NOT_REPEATABLE)
def test_replay_of_passes_that_cannot_be_repeated_stops_with_a_warning(start: Start, name: str) -> None:
    run = start("ddpkit", 3, SCRIPT, "case", name, "ddp", "replay")
    assert run.returncode == 0, run.stderr
    assert run.stdout.count(NOT_REPEATABLE[name]) == 1


@pytest.mark.slow
def test_launcher_does_not_restart_a_faulty_rank(tmp_path: Path) -> None:
    command = (launching.DDPKIT, "launch", "--nproc-per-node", "2", "--max-restarts", "3")
    run = launching.run(*command, SCRIPT, "case", "by_rank", "ddp", "replay", cwd=tmp_path)
    assert run.returncode == ExitCode.FAULTY
    assert run.stderr.count("compute different gradients from the same batch") == 1
    assert "not restarted: its device would compute wrong numbers again" in run.stderr
