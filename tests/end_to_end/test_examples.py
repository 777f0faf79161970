"""Every example runs on a laptop's CPU and comes to what it promises."""

import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Start = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.mark.slow
def test_gpt_example_beats_the_character_frequencies(start: Start, root: Path) -> None:
    run = start("ddpkit", 2, root / "examples" / "gpt.py")
    assert run.returncode == 0, run.stderr
    (loss,) = re.findall(r"loss on unseen text: ([\d.]+)", run.stdout)
    (entropy,) = re.findall(r"character frequencies: ([\d.]+)", run.stdout)
    assert float(loss) < float(entropy) - 0.5


@pytest.mark.slow
def test_gpt_example_has_the_same_loss_at_any_number_of_ranks(start: Start, root: Path) -> None:
    losses = set()
    for launcher, ranks in (("python", 1), ("ddpkit", 3)):
        run = start(launcher, ranks, root / "examples" / "gpt.py", "--steps", "4")
        assert run.returncode == 0, run.stderr
        losses |= set(re.findall(r"loss on unseen text: ([\d.]+)", run.stdout))
    assert len(losses) == 1


@pytest.mark.slow
@pytest.mark.parametrize(("name", "said"), [("imperative", "stopped after"), ("plain_ddp", "ranks, mean loss")])
@pytest.mark.parametrize("processes", [3, 1])
def test_example_runs_in_one_and_in_three_processes(
    start: Start, root: Path, name: str, said: str, processes: int
) -> None:
    run = start("ddpkit", processes, root / "examples" / f"{name}.py")
    assert run.returncode == 0, run.stderr
    assert said in run.stdout
