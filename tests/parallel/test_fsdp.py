"""What FSDP sends in a step; that its gradients are right is in end_to_end."""

import ast
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ddp_kit.distributed.world import World
from ddp_kit.parallel.fsdp import UnitOrder

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
config = TrainerConfig(global_batch_size=24, accumulation_steps=3, max_steps=3, log_every_steps=99, parallel=parallel)
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
)  # fmt: skip
def test_fsdp_step_sends_only_the_necessary_collectives(
    start: Start, script: Callable[[str], Path], ranks: int, parallel: str, gradients: str, reduced: dict[str, int]
) -> None:
    run = start("ddpkit", ranks, script(COUNTED), parallel, gradients)
    assert run.returncode == 0, run.stderr
    counts, loss = (line.removeprefix("[rank 0] ") for line in run.stdout.splitlines())
    assert ast.literal_eval(counts) == GATHERED | reduced
    alone = start("python", 1, script(COUNTED), '"ddp"', gradients)
    assert float(loss) == pytest.approx(float(alone.stdout.splitlines()[-1]), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fits", "gathered", "reduced"),
    [("whole", 1, 1), ("sharded", 2 * PASSES, PASSES)],
)
def test_pipeline_with_fsdp_gathers_each_block_once_per_step_if_they_fit(
    start: Start, script: Callable[[str], Path], fits: str, gathered: int, reduced: int
) -> None:
    run = start("ddpkit", 4, script(COUNTED), '{"pipeline": 2, "shard": 2, "pipeline_stages": ["0.1"]}', fits)
    assert run.returncode == 0, run.stderr
    counts, loss = (line.removeprefix("[rank 0] ") for line in run.stdout.splitlines())
    found = ast.literal_eval(counts)
    assert (found["_allgather_base_"], found["_reduce_scatter_base_"]) == (gathered, reduced)
    alone = start("python", 1, script(COUNTED), '"ddp"', fits)
    assert float(loss) == pytest.approx(float(alone.stdout.splitlines()[-1]), rel=1e-5)


DISTILLED = """
import torch
from torch import nn
from ddp_kit import Trainer, TrainerConfig

def loss_fn(model, x):
    with torch.no_grad():
        target = model(x)
    return (model(x) - target + 1).square().mean()

for parallel in ("ddp", "fsdp"):
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)) for _ in range(2)]
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(*blocks), nn.Linear(4, 1))
    config = TrainerConfig(global_batch_size=8, max_steps=3, parallel=parallel, precision=sys.argv[1])
    trainer = Trainer(model, lambda parameters: torch.optim.SGD(parameters, lr=0.5), loss_fn, config)
    trainer.fit(torch.ones(24, 4))
    output = trainer.predict(torch.ones(8, 4))
    if trainer.world.is_main:
        say(output.float().mean().item())
"""


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_fsdp_loss_function_may_first_call_the_model_without_gradients(
    start: Start, script: Callable[[str], Path], precision: str
) -> None:
    run = start("ddpkit", 2, script(DISTILLED), precision)
    assert run.returncode == 0, run.stderr
    ddp, fsdp = (float(line.removeprefix("[rank 0] ")) for line in run.stdout.splitlines())
    assert fsdp == pytest.approx(ddp, rel=1e-3)


SHORT = """
import torch, torch.nn.functional as F
from torch import nn
from torch.utils.data import IterableDataset
from ddp_kit import Trainer, TrainerConfig

class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("cos", torch.linspace(0.5, 1, 4))
        self.register_buffer("mean", torch.ones(4))
    def forward(self, x):
        if self.training:
            self.mean.lerp_(x.mean(0), 0.1)
        return self.b(torch.tanh(self.a(x)) * self.cos * self.mean)

class Stream(IterableDataset):
    def __iter__(self):
        return iter(rows[trainer.world.rank::trainer.world.world_size])

buffers = {}
def loss_fn(model, batch):
    buffers.update({name: each.clone() for name, each in model.named_buffers()})
    labels = batch.pop("labels")
    return F.mse_loss(model(batch["x"]), labels)

torch.manual_seed(0)
rows = [{"x": x, "labels": x} for x in torch.randn(9, 4)]
for data in (lambda: rows, Stream):  # the last step has 1 sample: on the last rank, a pass with zero weight
    torch.manual_seed(0)
    config = TrainerConfig(epochs=1, global_batch_size=4, micro_batch_size=1, data={"shuffle": False},
                           parallel=sys.argv[1])
    trainer = Trainer(Scaled(), lambda weights: torch.optim.SGD(weights, lr=0.1), loss_fn, config)
    own = dict(trainer.model.named_buffers())
    loss = trainer.fit(data()).loss
    if trainer.world.rank and sys.argv[1] == "fsdp":  # without that, it runs no pass
        for name, each in trainer.model.named_buffers():
            assert each is own[name] and torch.equal(each, buffers[name]), name
    found = [loss, trainer.evaluate(rows)["loss"], trainer.evaluate(rows[:1])["loss"]]
    if trainer.world.is_main:
        say(*found)
"""


@pytest.mark.slow
def test_fsdp_pass_with_zero_weight_leaves_buffers_and_batches_unchanged(
    start: Start, script: Callable[[str], Path]
) -> None:
    run, other = (start("ddpkit", 2, script(SHORT), parallel) for parallel in ("fsdp", "ddp"))
    assert run.returncode == 0, run.stderr
    assert len(run.stdout.splitlines()) == 2
    for line, expected in zip(run.stdout.splitlines(), other.stdout.splitlines(), strict=True):
        losses = [[float(word) for word in each.removeprefix("[rank 0] ").split()] for each in (line, expected)]
        assert losses[0] == pytest.approx(losses[1], rel=1e-5)


SWEEP = """
import torch
from torch import nn
from ddp_kit import Trainer, TrainerConfig

for depth in (2, 3):
    model = nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(depth)])
    config = TrainerConfig(max_steps=2, global_batch_size=8, parallel="fsdp")
    sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.1)
    trainer = Trainer(model, sgd, lambda model, x: model(x).square().mean(), config)
    trainer.fit(torch.ones(16, 4))
    trainer.evaluate(torch.ones(16, 4))
say("all trained")
"""


@pytest.mark.slow
def test_fsdp_process_may_have_several_trainers(start: Start, script: Callable[[str], Path]) -> None:
    run = start("ddpkit", 2, script(SWEEP))
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("all trained") == 2


DROPPED = """
import json
import torch
from torch import nn
from ddp_kit import Trainer, TrainerConfig
from ddp_kit.parallel import fsdp

fsdp.whole_gradients_fit = lambda gradients, memory: False
parallel, case = json.loads(sys.argv[1]), sys.argv[2]

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)
    def forward(self, x):
        return x + torch.tanh(self.inner(x))

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.calls = 0
    def forward(self, x):
        self.calls += 1
        for number, block in enumerate(self.blocks):
            if number != 1 or self.calls % 3 == 1:  # only in the first of three micro-batches
                x = block(x)
            elif case == "unused":
                block(x)
        return x

torch.manual_seed(0)
x = torch.randn(48, 4, dtype=torch.float64)
config = TrainerConfig(global_batch_size=24, accumulation_steps=3, max_steps=4, log_every_steps=1,
                       data={"shuffle": False}, parallel=parallel)
sgd = lambda parameters: torch.optim.SGD(parameters, lr=0.1)
trainer = Trainer(Net().double(), sgd, lambda model, x: model(x).square().mean(), config)
history = trainer.fit(x).history
if trainer.world.is_main:
    say(*(f"{value:.12f}" for row in history for value in (row.loss, row.grad_norm)))
"""
REPLICATED = '{"strategy": "fsdp", "shard": 1}'


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "parallel"), [(2, REPLICATED), (4, HYBRID)])
def test_hsdp_reduces_a_block_that_the_last_micro_batch_omits(
    start: Start, script: Callable[[str], Path], ranks: int, parallel: str
) -> None:
    run = start("ddpkit", ranks, script(DROPPED), parallel, "left out")
    assert run.returncode == 0, run.stderr
    other = start("ddpkit", ranks, script(DROPPED), '{"find_unused_parameters": true}', "left out")
    assert run.stdout == other.stdout


@pytest.mark.slow
def test_hsdp_names_the_micro_batch_in_which_a_block_got_no_gradient(
    start: Start, script: Callable[[str], Path]
) -> None:
    run = start("ddpkit", 2, script(DROPPED), REPLICATED, "unused")
    assert run.returncode == 1
    assert "blocks.1.inner.bias got no gradient in the last micro-batch of a step" in run.stderr


def test_unit_order_without_units_waits_in_the_first_pass_only(monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[str] = []
    monkeypatch.setattr("ddp_kit.parallel.fsdp.wait_for_all", lambda _, place, **__: waited.append(place))
    order = UnitOrder(World(0, 2, 0, 2, 0, torch.device("cpu")), {})
    for kind in ("training pass", "evaluation pass", "training pass", "evaluation pass"):
        with order.in_pass(kind):
            pass
    assert waited == ["the end of the pass in training pass 1", "the end of the pass in evaluation pass 2"]


PENALTY = """
import sys
import torch
from torch import nn
from torch.utils.data import TensorDataset
from ddp_kit import LossError, Trainer, TrainerConfig

def loss_fn(model, batch):
    x = batch[0].requires_grad_()
    found = model(x)
    gradient, = torch.autograd.grad(found.sum(), x, create_graph=True)
    return found.square().mean() + (gradient.norm(dim=1) - 1).square().mean()

for parallel in ("fsdp", "zero1"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))
    config = TrainerConfig(max_steps=2, global_batch_size=8, parallel=parallel)
    trainer = Trainer(model, lambda parameters: torch.optim.SGD(parameters, lr=0.1), loss_fn, config)
    try:
        say(parallel, trainer.fit(TensorDataset(torch.randn(64, 4))).steps)
    except LossError as error:
        say(parallel, str(error).replace("\\n", " "))
"""


@pytest.mark.slow
def test_fsdp_refuses_second_derivatives(start: Start, script: Callable[[str], Path]) -> None:
    run = start("ddpkit", 2, script(PENALTY))
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("fsdp a backward pass needs weights that FSDP has freed after an earlier") == 2
    assert run.stdout.count("use parallel='zero1' or 'ddp'") == 2
    assert run.stdout.count("zero1 2") == 2
