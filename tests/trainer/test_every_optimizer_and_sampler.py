"""Every optimizer of torch.optim and every sampler of torch.utils.data, stopped and resumed at every placement."""

import inspect
import re
from pathlib import Path

import pytest
import torch
from torch.optim import Optimizer
from torch.utils.data import Sampler

from tests.programs.every_resume import OPTIMIZERS, PLACEMENTS, SAMPLERS, resumed
from tests.support.launching import PROGRAMS, launch

PROGRAM = PROGRAMS / "every_resume.py"


def subclasses(module: object, base: type) -> set[str]:
    return {name for name, value in vars(module).items() if inspect.isclass(value) and issubclass(value, base)}


def test_every_optimizer_and_sampler_of_torch_has_a_case() -> None:
    assert subclasses(torch.optim, Optimizer) - {"Optimizer"} == {*OPTIMIZERS}
    assert subclasses(torch.utils.data, Sampler) - {"Sampler"} == {name.partition(" ")[0] for name in SAMPLERS}


@pytest.mark.parametrize("name", [*OPTIMIZERS, *SAMPLERS])
def test_resumed_run_ends_bitwise_identical(name: str, tmp_path: Path) -> None:
    assert resumed(tmp_path, name, {}) == "same"


def test_offloaded_optimizer_for_sparse_gradients_resumes_and_one_with_a_closure_is_refused(tmp_path: Path) -> None:
    assert resumed(tmp_path, "SparseAdam", PLACEMENTS["offload"]) == "same"
    assert resumed(tmp_path, "LBFGS", PLACEMENTS["offload"]).startswith(
        "memory.offload = 'optimizer' is not supported with"
    )


SHARDED = {
    "Adafactor": "the optimizer Adafactor cannot be sharded: the update of a value depends on other values",
    "LBFGS": "the optimizer LBFGS cannot be sharded: .* missing 1 required positional argument: 'closure'",
    "Muon": "the optimizer Muon cannot be sharded: .* Muon only supports 2D parameters",
    "SparseAdam": "does not support modules with sparse gradients: table",
}
REFUSED = {
    "zero1": SHARDED,
    "fsdp": SHARDED,
    "offload": {"LBFGS": "memory.offload = 'optimizer' is not supported with LBFGS"},
}


@pytest.mark.slow
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_resumed_run_on_two_ranks_ends_bitwise_identical_or_is_refused(placement: str, tmp_path: Path) -> None:
    run = launch("--nproc-per-node", 2, PROGRAM, tmp_path / "runs", placement, timeout=280)
    assert run.returncode == 0, run.stderr[-3000:]
    refused = REFUSED.get(placement, {})
    assert run.stderr.count("weight_decay 0.2 (checkpoint: 0.1)") == 1  # on one rank
    for name in (*OPTIMIZERS, *SAMPLERS, "other settings"):
        lines = re.findall(rf"^{re.escape(name)}: (.*)$", run.stdout, re.MULTILINE)
        assert len(lines) == 2, run.stdout
        for line in lines:
            assert re.search(refused[name], line) if name in refused else line == "same", f"{name}: {line}"
