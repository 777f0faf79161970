"""fp8 at two ranks, with emulated products, from start to checkpoint and back."""

import re
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.launching import PROGRAMS

Ddpkit = Callable[..., object]
SCRIPT = PROGRAMS / "in_float8.py"
WITHOUT = 0  # a step that is never done
EMULATED = {"DDPKIT_EMULATE_FP8": "1"}


@pytest.mark.slow
@pytest.mark.skipif(find_spec("torchao") is None, reason="torchao is not installed")
def test_fp8_run_resumes_bitwise_and_saves_a_checkpoint_of_a_plain_model(ddpkit: Ddpkit, tmp_path: Path) -> None:
    ended = {}
    for after in (WITHOUT, 5):
        words = (tmp_path / f"after-{after}", after)
        run = ddpkit("launch", "--nproc-per-node", 2, "--max-restarts", 2, SCRIPT, *words, env=EMULATED)
        assert run.returncode == 0, run.stderr
        assert run.stderr.count("killed by SIGKILL") == (2 if after else 0), "once under ddp, once under fsdp"
        ended[after] = set(re.findall(r"ended .*", run.stdout))  # ddp's was done before fsdp was killed
        losses = dict(re.findall(r"loss (\w+) (\S+)", run.stdout))
        assert float(losses["fsdp"]) == pytest.approx(float(losses["ddp"]), rel=1e-4)
        same, loss, steps = re.findall(r"plain (\w+) (\S+) (\d+)", run.stdout)[0]
        assert (same, steps) == ("True", "10"), "the weights of fp8 are those of bf16, and its training continues"
        assert loss != losses["fsdp"], "the layers did compute in float8"
        assert float(loss) == pytest.approx(float(losses["fsdp"]), rel=0.05)
    assert ended[WITHOUT] == ended[5]
    assert len(ended[5]) == 2
    assert all(" 0.up 1.up 0.norm.weight" in line for line in ended[5]), "two layers are converted, names stay"


@pytest.mark.slow
def test_fp8_without_a_gpu_is_refused(ddpkit: Ddpkit, tmp_path: Path) -> None:
    run = ddpkit("launch", "--nproc-per-node", 2, SCRIPT, tmp_path, WITHOUT, env={"CUDA_VISIBLE_DEVICES": ""})
    assert run.returncode == 1
    assert "precision='fp8' needs a GPU of compute capability 8.9 or higher" in run.stderr
    assert "Traceback" not in run.stderr
