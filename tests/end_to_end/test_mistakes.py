"""A user's mistake in several processes: one message, no traceback, and the launcher ends."""

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

Start = Callable[..., "subprocess.CompletedProcess[str]"]
Script = Callable[[str], Path]

FIVE_MISTAKES = """
from ddp_kit import TrainerConfig
TrainerConfig(global_batch_sz=64, precision="bf15", log_every=0, num_workers=2, max_steps=-5)
"""

ONE_RANK_FAILS = """
import torch
from torch import nn
from ddp_kit import Loss, Trainer, TrainerConfig

def loss_fn(model, batch):
    loss = model(batch).mean()
    return "nothing" if trainer.world.rank == 1 and trainer.step == 2 else loss

model = nn.Linear(2, 1)
trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, TrainerConfig(global_batch_size=4))
trainer.fit(torch.randn(40, 2))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("launcher", "processes"), [("python", 1), ("torchrun", 3), ("ddpkit", 3)])
def test_five_mistakes_in_a_configuration_are_listed_once(
    start: Start, script: Script, launcher: str, processes: int
) -> None:
    run = start(launcher, processes, script(FIVE_MISTAKES))
    assert run.returncode == 1
    assert run.stderr.count("ddpkit: error at script.py:3: TrainerConfig has 5 problems:") == 1
    for line in (
        "global_batch_sz = 64: there is no such setting; nearest: global_batch_size",
        "nearest: 'bf16'",
        "log_every = 0: allowed is at least 1; nearest: 1",
        "num_workers = 2: there is no such setting; nearest: data.num_workers",
        "max_steps = -5: allowed is at least 1; nearest: 1",
    ):
        assert run.stderr.count(line) == 1
    if launcher != "torchrun":  # torchrun shows a traceback of its own
        assert "Traceback" not in run.stderr


@pytest.mark.slow
def test_a_mistake_on_one_rank_alone_is_shown_by_that_rank(start: Start, script: Script) -> None:
    run = start("ddpkit", 3, script(ONE_RANK_FAILS))
    assert run.returncode == 1
    assert run.stderr.count("the loss function returned a str") == 1
    assert "ddpkit: error (rank 1) at script.py:" in run.stderr
    assert "rank 1 failed first" in run.stderr.splitlines()[-1]
