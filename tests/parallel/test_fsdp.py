"""What FSDP sends in a step; that its gradients are right is in end_to_end."""

import ast
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ddp_kit import ConfigError
from ddp_kit.config import ParallelConfig
from ddp_kit.parallel.fsdp import FsdpStrategy
from ddp_kit.world import World

Start = Callable[..., "subprocess.CompletedProcess[str]"]

COUNTED = """
import json
from collections import Counter
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from ddp_kit import Trainer, TrainerConfig
from ddp_kit.parallel import fsdp

parallel, keeps_whole = json.loads(sys.argv[1]), sys.argv[2] == "whole"
fsdp.whole_gradients_fit = lambda gradients, memory: keeps_whole

class Sent(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.counts = Counter()
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            self.counts[function.__name__.split(".")[0]] += 1
        return function(*args, **(kwargs or {}))

torch.manual_seed(0)
blocks = [nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)]
model = nn.Sequential(nn.Sequential(*blocks), nn.Linear(4, 1))
config = TrainerConfig(global_batch_size=24, accumulation_steps=3, max_steps=3, log_every=99, parallel=parallel)
sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.1)
trainer = Trainer(model, sgd, lambda model, x: model(x).square().mean(), config)
counts = []
with Sent() as sent:
    for step in trainer.steps(torch.randn(80, 4)):
        counts.append(dict(sent.counts))
        sent.counts.clear()
loss = trainer.evaluate(torch.ones(8, 4))["loss"]
if trainer.world.is_main:
    say(counts[1])
    say(loss)
"""
UNITS, RESHARDED, PASSES = 4, 3, 3  # three blocks and the model itself, which keeps its weights until the backward pass
HYBRID = '{"replicate": 2, "shard": 2}'
GATHERED = {"_allgather_base_": PASSES * (UNITS + RESHARDED)}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "parallel", "gradients", "reduced"),
    [
        (2, '{"strategy": "fsdp"}', "whole", {"_reduce_scatter_base_": UNITS}),
        (2, '{"strategy": "fsdp"}', "sharded", {"_reduce_scatter_base_": UNITS * PASSES}),
        (4, HYBRID, "whole", {"_reduce_scatter_base_": UNITS, "allreduce_": UNITS}),
        (4, HYBRID, "sharded", {"_reduce_scatter_base_": UNITS * PASSES, "allreduce_": UNITS}),
    ],
)
def test_a_step_sends_what_fsdp_needs_and_nothing_else(
    start: Start, script: Callable[[str], Path], ranks: int, parallel: str, gradients: str, reduced: dict[str, int]
) -> None:
    run = start("ddpkit", ranks, script(COUNTED), parallel, gradients)
    assert run.returncode == 0, run.stderr
    counts, loss = (line.removeprefix("[rank 0] ") for line in run.stdout.splitlines())
    assert ast.literal_eval(counts) == GATHERED | reduced
    alone = start("python", 1, script(COUNTED), '"ddp"', gradients)
    assert float(loss) == pytest.approx(float(alone.stdout.splitlines()[-1]), rel=1e-5)


@pytest.mark.parametrize("name", ["find_unused_parameters", "static_graph"])
def test_a_setting_of_ddp_is_to_be_left_out(name: str) -> None:
    config = ParallelConfig(strategy="fsdp", **{name: True})
    strategy = FsdpStrategy(World(0, 2, 0, 2, 0, torch.device("cpu")), config)
    with pytest.raises(ConfigError, match=f"parallel.{name} is a setting of DDP") as raised:
        strategy.check(torch.nn.Linear(2, 2))
    assert f"leave out {name}" in raised.value.hint


def test_a_micro_batch_that_is_found_by_trial_is_refused_with_what_to_do() -> None:
    strategy = FsdpStrategy(World(0, 2, 0, 2, 0, torch.device("cpu")), ParallelConfig(strategy="fsdp"))
    with pytest.raises(ConfigError, match="the others wait in the pass's collectives") as raised:
        strategy.check_recoverable()
    assert "set micro_batch_size to a number; `ddpkit plan" in raised.value.hint
