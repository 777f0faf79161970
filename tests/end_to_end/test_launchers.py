"""The same script under python, torchrun and ddpkit launch."""

import ast
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Start = Callable[..., "subprocess.CompletedProcess[str]"]
WAYS = [("python", 1), ("torchrun", 2), ("ddpkit", 3)]

# What names a place, an instance or a file of this one run.
OWN_TO_A_RUN = {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_ERROR_FILE", "_", "SHLVL"}


@pytest.mark.slow
def test_digits_example_has_the_same_loss_under_every_launcher(
    start: Start, script: Callable[[str], Path], root: Path
) -> None:
    # In float64: rounding differs with the number of ranks, and each step amplifies it, in float32 to 0.9 % after 345.
    example = (root / "examples" / "digits.py").read_text()
    doubled = example.replace("torch.float32", "torch.float64").replace("epochs=15", "epochs=3")
    doubled = doubled.replace(
        "torch.manual_seed(0)  #", "torch.set_default_dtype(torch.float64); torch.manual_seed(0)  #"
    )
    losses = {}
    for launcher, ranks in WAYS:
        run = start(launcher, ranks, script(doubled))
        assert run.returncode == 0, (launcher, ranks, run.stderr)
        (loss,) = re.findall(r"final loss: ([\d.]+)", run.stdout)
        (accuracy,) = re.findall(r"test accuracy: ([\d.]+)%", run.stdout)
        assert float(accuracy) > 96
        losses[launcher, ranks] = float(loss)
    assert max(losses.values()) == pytest.approx(min(losses.values()), abs=2e-8), losses  # shown with 8 digits


@pytest.mark.slow
def test_workers_have_the_same_environment_as_under_torchrun(start: Start, script: Callable[[str], Path]) -> None:
    shows = script("say((os.environ['RANK'], dict(os.environ)))")

    def seen(launcher: str) -> dict[str, dict[str, str]]:
        run = start(launcher, 2, shows, env={"MY_OWN": "kept", "OMP_NUM_THREADS": None})
        assert run.returncode == 0, run.stderr
        ranks = dict(ast.literal_eval(line) for line in run.stdout.splitlines())
        return {rank: {k: v for k, v in env.items() if k not in OWN_TO_A_RUN} for rank, env in ranks.items()}

    ours = seen("ddpkit")
    assert ours == seen("torchrun")
    assert ours["1"]["MY_OWN"] == "kept"


@pytest.mark.slow
def test_script_has_the_same_argv_and_path_as_under_torchrun(start: Start, script: Callable[[str], Path]) -> None:
    shows = script(
        "import sys, torch.distributed as dist\n"
        "print(__name__, __file__, sys.argv, sys.path[0], sys.stdout.isatty(), dist.is_torchelastic_launched())"
    )
    ours, theirs = (start(launcher, 1, shows, "--lr", "0.1 ' x") for launcher in ("ddpkit", "torchrun"))
    assert ours.stdout == theirs.stdout
    assert ours.stdout.endswith("True\n")
