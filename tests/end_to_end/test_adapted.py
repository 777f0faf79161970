"""Checkpoints of an adapter alone, at two ranks: a killed run resumes bitwise, under another placement too."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ddp_kit import load_model
from ddp_kit.checkpoint.format import checkpoints
from tests.programs.adapted import WIDTH, adapted_model
from tests.support.launching import PROGRAMS

Ddpkit = Callable[..., object]
SCRIPT = PROGRAMS / "adapted.py"
WITHOUT = 0  # a step that is never done


@pytest.mark.slow
@pytest.mark.parametrize(("parallel", "other"), [("ddp", "fsdp"), ("fsdp", "ddp")])
def test_adapter_run_killed_resumes_bitwise_from_its_trained_weights(
    ddpkit: Ddpkit, tmp_path: Path, parallel: str, other: str
) -> None:
    ended = {}
    for after in (WITHOUT, 7):
        run = ddpkit(
            "launch", "--nproc-per-node", 2, "--max-restarts", 1, SCRIPT, tmp_path / f"{after}", after, parallel
        )
        assert run.returncode == 0, run.stderr
        assert ("resumed from" in run.stderr) == (after != WITHOUT)
        ended[after] = sorted(re.findall(r"ended \d .*", run.stdout))
    assert len(ended[WITHOUT]) == 2
    assert ended[WITHOUT] == ended[7]
    newest = checkpoints(tmp_path / "7", hashes=True)[0]
    assert newest.manifest is not None
    assert newest.manifest.bytes < 3 * WIDTH * WIDTH * 4, "less than the frozen weights"
    plain, same = adapted_model(), adapted_model()
    assert load_model(tmp_path / "7", plain).step == load_model(tmp_path / "0", same).step == 12
    assert all(map(torch.equal, plain.state_dict().values(), same.state_dict().values()))
    words = ("launch", "--nproc-per-node", 2, SCRIPT, tmp_path / "7", WITHOUT)
    moved = ddpkit(*words, other)
    assert moved.returncode == 0, moved.stderr
    assert "nothing left to train" in moved.stderr
    refused = ddpkit(*words, parallel, 1)
    assert refused.returncode == 1
    assert "frozen weights are not the same as in the run that saved it: 0.base.weight" in refused.stderr
