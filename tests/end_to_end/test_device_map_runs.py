"""Training with a device map, in one and in several processes, against training without one."""

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.launching import PROGRAMS

Start = Callable[..., "subprocess.CompletedProcess[str]"]
Ddpkit = Callable[..., "subprocess.CompletedProcess[str]"]
SCRIPT = PROGRAMS / "mapped.py"
ON_THE_CPU = {"CUDA_VISIBLE_DEVICES": ""}
SPLIT = json.dumps({"": 0, "blocks.0-1": 0, "blocks.2-3": 1, "head": 1})


def end_values(run: "subprocess.CompletedProcess[str]") -> dict[str, Any]:
    assert run.returncode == 0, run.stderr
    (line,) = [line for line in run.stdout.splitlines() if line.startswith("ended")]
    found: dict[str, Any] = json.loads(line.removeprefix("ended"))
    return found


@pytest.mark.slow
def test_device_map_on_two_ranks_trains_as_one_process_without(start: Start) -> None:
    """The CPU stands for all devices: see `ddp_kit.parallel.device_map.device_at`."""
    alone, mapped, ddp, both = (
        end_values(start("ddpkit", ranks, SCRIPT, "plain", "0", device_map, env=ON_THE_CPU))
        for ranks, device_map in ((1, "null"), (1, SPLIT), (2, "null"), (2, SPLIT))
    )
    assert mapped == alone
    assert both == ddp
    assert both["weights"] == pytest.approx(alone["weights"], abs=1e-12)
    assert both["values"] == pytest.approx(alone["values"], abs=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("gpus", [pytest.param(count, marks=pytest.mark.gpu(count)) for count in (2, 4)])
def test_device_map_on_gpus_trains_as_one_process_without_and_resumes(
    ddpkit: Ddpkit, tmp_path: Path, gpus: int
) -> None:
    alone = end_values(ddpkit("launch", "--gpus", 1, SCRIPT, "plain", 0, "null"))
    words = ["--gpus", gpus, "--gpus-per-process", 2, "--max-restarts", 1]
    mapped = end_values(ddpkit("launch", *words, SCRIPT, "plain", 0, SPLIT))
    assert mapped["weights"] == pytest.approx(alone["weights"], abs=1e-9)
    resumed = []
    for dies_after in (0, 7):
        (folder := tmp_path / str(dies_after)).mkdir()
        resumed.append(end_values(ddpkit("launch", *words, SCRIPT, "resumes", dies_after, SPLIT, cwd=folder)))
    assert resumed[0] == resumed[1]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_device_map_run_killed_ends_like_an_undisturbed_one(ddpkit: Ddpkit, tmp_path: Path, ranks: int) -> None:
    found = []
    for dies_after in (0, 7):
        (folder := tmp_path / str(dies_after)).mkdir()
        words = ["--nproc-per-node", ranks, "--max-restarts", 1, SCRIPT, "resumes", dies_after, SPLIT]
        run = ddpkit("launch", *words, cwd=folder, env=ON_THE_CPU)
        assert ("resumed from" in run.stderr) == (dies_after > 0), run.stderr
        found.append(end_values(run))
    assert found[0] == found[1]


@pytest.mark.slow
def test_device_map_checkpoint_loads_without_a_device_map(ddpkit: Ddpkit, tmp_path: Path) -> None:
    undisturbed = end_values(
        ddpkit("launch", "--nproc-per-node", 1, SCRIPT, "resumes", 0, "null", cwd=tmp_path, env=ON_THE_CPU)
    )
    (folder := tmp_path / "mapped").mkdir()
    died = ddpkit("launch", "--nproc-per-node", 1, SCRIPT, "resumes", 7, SPLIT, cwd=folder, env=ON_THE_CPU)
    assert died.returncode == 137, died.stderr
    assert (
        end_values(ddpkit("launch", "--nproc-per-node", 1, SCRIPT, "resumes", 0, "null", cwd=folder, env=ON_THE_CPU))
        == undisturbed
    )
