"""A killed run resumes from its last checkpoint, and ends bitwise identical to an undisturbed run."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from ddp_kit.checkpoint.format import checkpoints
from tests.support.launching import PROGRAMS, seconds

Ddpkit = Callable[..., object]
SCRIPT = PROGRAMS / "resumed.py"
WITHOUT = 0  # a step that is never done
WIDE = 600_000  # 50 MB of weights and optimizer state


def ended_with(output: str) -> list[str]:
    """What each rank ends with, by rank."""
    return sorted(re.findall(r"ended \d .*", output))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "parallel", "offload"),
    [
        (3, "zero1", ()),
        (3, "fsdp", ()),
        (2, "fsdp", ("all",)),
        (3, "zero1", ("optimizer",)),
        (4, {"replicate": 2, "shard": 2}, ()),
        (4, {"shard": 2, "tensor": 2, "tensor_plan": {"3.0": "column", "3.2": "row"}}, ()),
        (4, {"pipeline": 2, "pipeline_stages": ["3"], "shard": 2}, ()),
        (4, {"pipeline": 2, "pipeline_stages": ["3"], "tensor": 2, "tensor_plan": {"3.0": "column", "3.2": "row"}}, ()),
    ],
    ids=str,
)
def test_resume_under_every_strategy_is_bitwise(
    ddpkit: Ddpkit, tmp_path: Path, ranks: int, parallel: object, offload: tuple[str, ...]
) -> None:
    ended = {}
    for after in (WITHOUT, 7):
        words = (tmp_path / f"after-{after}", after, 0, 8, json.dumps(parallel), *offload)
        run = ddpkit("launch", "--nproc-per-node", ranks, "--max-restarts", 1, SCRIPT, *words)
        assert run.returncode == 0, run.stderr
        assert ("resumed from" in run.stderr) == (after != WITHOUT)
        ended[after] = ended_with(run.stdout)
    assert len(ended[WITHOUT]) == ranks
    assert ended[WITHOUT] == ended[7]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "workers", "dies_after", "width"),
    [
        (1, 0, 11, 8),
        (2, 2, 11, 8),
        (3, 0, 7, 8),
        (3, 0, 7, WIDE),
    ],
)
def test_killed_run_ends_like_an_undisturbed_one(
    ddpkit: Ddpkit, tmp_path: Path, ranks: int, workers: int, dies_after: int, width: int
) -> None:
    ended = {}
    for after in (WITHOUT, dies_after):
        folder = tmp_path / f"after-{after}"
        run = ddpkit("launch", "--nproc-per-node", ranks, "--max-restarts", 1, SCRIPT, folder, after, workers, width)
        assert run.returncode == 0, run.stderr
        assert ("resumed from" in run.stderr) == (after != WITHOUT)
        ended[after] = ended_with(run.stdout)
        assert len(ended[after]) == ranks
        assert [found.step for found in checkpoints(folder, hashes=True) if found.whole] == [12, 10]
        files = [path.name for path in (folder / "step-00000012").iterdir()]
        assert ("model-00003-of-00003.safetensors" in files) == (width == WIDE), "all ranks write a large one"
    assert ended[WITHOUT] == ended[dies_after]


@pytest.mark.slow
def test_run_resumed_with_another_number_of_ranks_reports_the_difference(ddpkit: Ddpkit, tmp_path: Path) -> None:
    died = ddpkit("launch", "--nproc-per-node", 2, SCRIPT, tmp_path / "run", 11, 0)
    assert died.returncode == 137
    run = ddpkit("launch", "--nproc-per-node", 1, SCRIPT, tmp_path / "run", WITHOUT, 0)
    assert run.returncode == 0, run.stderr
    assert "after step 10" in run.stderr
    assert "the checkpoint was saved with 2 ranks, but this run has 1" in run.stderr


@pytest.mark.slow
def test_run_killed_during_a_save_resumes_from_that_save(ddpkit: Ddpkit, tmp_path: Path) -> None:
    script = PROGRAMS / "killed_while_saving.py"
    run = ddpkit("launch", "--nproc-per-node", 1, "--max-restarts", 1, script, tmp_path / "run", 0)
    assert run.returncode == 0, run.stderr
    assert "killed by SIGKILL" in run.stderr
    assert "step-00000004 after step 4" in run.stderr


@pytest.mark.slow
def test_save_of_a_killed_rank_is_completed_before_the_launcher_exits(ddpkit: Ddpkit, tmp_path: Path) -> None:
    script = PROGRAMS / "killed_while_saving.py"
    run = ddpkit("launch", "--nproc-per-node", 1, script, tmp_path / "run", 300)
    assert run.returncode == 137, run.stderr
    assert [checkpoint.step for checkpoint in checkpoints(tmp_path / "run", hashes=True) if checkpoint.whole] == [4, 2]


@pytest.mark.slow
@pytest.mark.timeout(seconds(600))
def test_resume_is_bitwise_although_a_rank_has_no_samples_in_some_steps(start: Ddpkit, tmp_path: Path) -> None:
    run = start("ddpkit", 2, PROGRAMS / "resumed_without_samples.py", str(tmp_path / "runs"), "fsdp")
    assert run.returncode == 0, run.stderr  # type: ignore[attr-defined]
    cases = re.findall(r"case (.*): (\d+) steps, differ (.*)", run.stdout)  # type: ignore[attr-defined]
    assert {int(steps) for _, steps, _ in cases} == {6, 10}
    assert len(cases) == 2 * 7, "kinds of data, on 2 ranks"
    assert {name: differ for name, _, differ in cases if differ != "[]"} == {}
