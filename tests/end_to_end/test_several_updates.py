"""Several updates per step, and several evaluations per update: as by hand at any number of ranks."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.programs.closures import closures_by_hand
from tests.programs.gan import gan_by_hand
from tests.support.launching import PROGRAMS

Ddpkit = Callable[..., Any]


def end_values(run: Any) -> dict[str, Any]:
    assert run.returncode == 0, run.stderr
    found = re.search(r"ended (\{.*\})", run.stdout)
    assert found is not None, run.stdout
    values: dict[str, Any] = json.loads(found[1])
    return values


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "within"), [(1, 1e-12), (3, 1e-10)])
def test_gan_trains_like_the_loop_by_hand_and_resumes_bitwise(
    ddpkit: Ddpkit, tmp_path: Path, ranks: int, within: float
) -> None:
    weights, losses = gan_by_hand()
    command = ("launch", "--nproc-per-node", ranks, "--max-restarts", 1, PROGRAMS / "gan.py")
    whole = end_values(ddpkit(*command, tmp_path / "whole", 0))
    for found, expected in zip(whole["weights"], weights, strict=True):
        assert torch.allclose(torch.tensor(found, dtype=torch.float64), expected, rtol=0, atol=within)
    assert whole["loss"] == pytest.approx(losses["critic"], abs=within)
    assert whole["values"]["loss/critic"] == pytest.approx(losses["critic"], abs=within)
    assert whole["values"]["loss/generator"] == pytest.approx(losses["generator"], abs=within)
    assert whole["metrics"].keys() == {"loss", "loss/critic", "loss/generator"}
    run = ddpkit(*command, tmp_path / "killed", 7)
    assert "resumed from" in run.stderr
    assert end_values(run) == whole


@pytest.mark.slow
def test_closures_evaluate_the_global_batch_and_resume_bitwise(ddpkit: Ddpkit, tmp_path: Path) -> None:
    command = ("launch", "--nproc-per-node", 3, "--max-restarts", 1, PROGRAMS / "closures.py")
    whole, killed = (ddpkit(*command, tmp_path / f"dies-{step}", step) for step in (0, 5))
    assert "resumed from" in killed.stderr
    found = dict(re.findall(r"ended (\w+) (.*)", whole.stdout))
    assert found.keys() == {"sam", "lbfgs"}, whole.stderr
    assert dict(re.findall(r"ended (\w+) (.*)", killed.stdout))["lbfgs"] == found["lbfgs"]
    for kind, weights in found.items():
        for each, expected in zip(json.loads(weights), closures_by_hand(kind), strict=True):
            assert torch.allclose(torch.tensor(each, dtype=torch.float64), expected, rtol=0, atol=1e-10), kind
