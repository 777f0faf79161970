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


WITH_RANKS = """
import torch
from torch import nn
from ddp_kit import Trainer, TrainerConfig
rank = int(os.environ["RANK"])
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1), nn.Linear(2, 1))
rate, late, keep, choose = 0.1, 0, None, lambda data, _: data
samples, uses, config = 40, lambda given, batch: given[2](given[1](given[0](batch))), TrainerConfig(global_batch_size=8)
{change}
class Whole(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = model
    def forward(self, batch):
        return uses(self.layers, batch)
whole = Whole()
loss = {loss}
trainer = Trainer(whole, lambda parameters: torch.optim.SGD(parameters, lr=rate), loss, config)
with torch.no_grad():
    model[3].bias += late
data = choose(torch.randn(samples, 2), keep)
result = trainer.fit(data, data)
say(rank, result.metrics["loss"], whole.eval()(data).mean().item())
"""
USUAL = "lambda given, batch: given(batch).mean()"
UNUSED_PARAMETERS_ALLOWED = 'config = TrainerConfig(global_batch_size=8, parallel={"find_unused_parameters": True})'


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "loss", "said"),
    [
        (
            "samples += rank",
            USUAL,
            "the ranks do not agree on the number of samples in train_data: 40, 41 on ranks 0 to 1",
        ),
        ("config = TrainerConfig(seed=rank)", USUAL, "the ranks do not agree on the setting seed"),
        ("rate = 0.1 + rank", USUAL, "the ranks do not agree on the optimizer and its settings"),
        ("late = rank", USUAL, "the ranks do not agree on the weights of the model"),
        ("choose = torch.utils.data.Subset; keep = [rank, 3, 5]", USUAL, "the samples that train_data is a subset of"),
        (UNUSED_PARAMETERS_ALLOWED, "lambda given, batch: whole(batch).mean()", "did not call the model"),
        ("", USUAL, 'parallel={"find_unused_parameters": True}'),
    ],
    ids=["other data", "seed", "optimizer", "weights", "subset", "another model", "unused parameters"],
)
def test_what_would_train_the_ranks_apart_is_refused_once(
    start: Start, script: Script, change: str, loss: str, said: str
) -> None:
    run = start("ddpkit", 2, script(WITH_RANKS.replace("{change}", change).replace("{loss}", loss)))
    assert run.returncode == 1
    assert run.stderr.count(said) == 1
    assert "Traceback" not in run.stderr


@pytest.mark.slow
def test_one_model_is_evaluated_its_batch_norm_statistics_included(start: Start, script: Script) -> None:
    text = WITH_RANKS.replace("{change}", UNUSED_PARAMETERS_ALLOWED).replace("{loss}", USUAL)
    run = start("ddpkit", 2, script(text))
    assert run.returncode == 0, run.stderr
    ranks = [[float(word) for word in line.split()] for line in run.stdout.splitlines()]
    assert ranks[0][1] == ranks[1][1]
    for _, metric, loss_of_the_own_model in ranks:
        assert metric == pytest.approx(loss_of_the_own_model, abs=1e-6)


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
