"""Scripts under `ddpkit plan`, in this process, with and without GPUs; the command: end_to_end/test_planned.py."""

import re
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch

from ddp_kit import ConfigError
from ddp_kit.env import PLAN_MEMORY, PLAN_RANKS, PLAN_RANKS_PER_NODE
from ddp_kit.errors import UsageError
from ddp_kit.trainer import plan_script
from tests.support.fake_cuda import GIB, visible_gpus

Plan = Callable[..., str]
BEGIN = """\
import torch
from torch import nn
from torch.utils.data import TensorDataset
from ddp_kit import Trainer, TrainerConfig, Update

def squares(model, batch):
    return (model(batch[0]) - batch[1]).square().mean()

def trainer(model, optimizer=None, loss_fn=squares, **settings):
    config = TrainerConfig(**{"max_steps": 1, "global_batch_size": 8} | settings)
    return Trainer(model, optimizer or torch.optim.AdamW(model.parameters()), loss_fn, config)

data = TensorDataset(torch.randn(32, 4), torch.randn(32, 6))
"""


@pytest.fixture
def plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Plan:
    """Run a script with a request for a plan, and return what it prints. `gpus`: those that torch reports."""

    def run(text: str, gpus: int = 0, ranks: int = 2, memory: int = 8 * GIB, per_node: int | None = None) -> str:
        path = tmp_path / "train.py"
        path.write_text(BEGIN + text)
        for name in ("argv", "path", "excepthook"):
            monkeypatch.setattr(sys, name, getattr(sys, name) if name != "path" else [*sys.path])
        monkeypatch.setenv(PLAN_RANKS, str(ranks))
        monkeypatch.setenv(PLAN_RANKS_PER_NODE, str(per_node or ranks))
        monkeypatch.setenv(PLAN_MEMORY, str(memory))
        with visible_gpus(gpus, memory=1) if gpus else nullcontext():
            plan_script.main([str(path)])
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize("gpus", [0, 2])
def test_plan_of_a_model_that_the_script_moves_to_a_gpu_is_that_of_any_machine(plan: Plan, gpus: int) -> None:
    text = plan(
        """
model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6))
weight = model[0].weight
model.to("cuda").to("cuda:1").to(0).to(torch.device("cuda", 1)).cuda().cuda(1).half().cpu().float()
assert model[0].weight is weight
trainer(model).fit(data)
""",
        gpus,
    )
    assert re.search(r"^  weights +224 bytes  exact$", text, re.MULTILINE)  # 42 values and the buffers
    assert "not known" not in text


@pytest.mark.parametrize("gpus", [0, 2])
def test_plan_of_a_model_that_the_script_moves_nowhere_ignores_the_gpus(plan: Plan, gpus: int) -> None:
    assert "not known" not in plan("trainer(nn.Linear(4, 6)).fit(data)", gpus)


@pytest.mark.parametrize("gpus", [0, 2])
def test_plan_of_a_script_that_moves_its_tensors_to_a_gpu_runs_its_pass(plan: Plan, gpus: int) -> None:
    text = """
def loss_fn(model, batch):
    batch = [batch[0].cuda(non_blocking=True), batch[1].pin_memory().to("cuda", torch.float32)]
    noise = torch.randn(6, device=torch.device("cuda", 0)) + torch.zeros(6, device="cuda") + torch.ones(6, device=0)
    return squares(model, batch) + noise.mean() + table.mean()

table = torch.zeros(6, pin_memory=True).to(device="cuda:0")
with torch.device("cuda"), torch.random.fork_rng([]):
    model = nn.Linear(4, 6)
with torch.device("meta"):
    assert torch.zeros(1).is_meta
trainer(model, loss_fn=loss_fn).fit(data)
"""
    assert "not known" not in plan(text, gpus)


WRAPPED = """\
import warnings
from torch.nn.utils import parametrizations, spectral_norm, weight_norm
warnings.simplefilter("ignore")
layer = {}(nn.Linear(4, 6))
trainer(layer.cuda().bfloat16().float(), precision="bf16-true").fit(data)
"""
WRAPPERS = ("weight_norm", "spectral_norm", "parametrizations.weight_norm", "parametrizations.spectral_norm")


@pytest.mark.parametrize("wrapper", WRAPPERS)
def test_plan_of_a_normalised_weight_is_complete(plan: Plan, wrapper: str) -> None:
    text = plan(WRAPPED.format(wrapper), gpus=2)
    assert "exact" in text
    assert "not known" not in text


def test_plan_of_a_model_larger_than_the_local_gpu_is_not_refused(plan: Plan) -> None:
    assert "fits: 1.0 GiB of 8.0 GiB" in plan("trainer(nn.Linear(4, 6)).fit(data)", 1)  # a GPU of one byte


def test_plan_that_misses_by_little_shows_the_difference(plan: Plan) -> None:
    text = plan("trainer(nn.Linear(4, 600)).fit(TensorDataset(torch.ones(32, 4), torch.ones(32, 600)))", memory=GIB)
    ((needed, has),) = re.findall(r"does not fit: needs ([\d.]+) GiB, but a device has ([\d.]+) GiB", text)
    assert float(needed) > float(has)


@pytest.mark.parametrize(
    ("precision", "gpus"),
    [("tf32", 0), ("fp8", 0), ("fp32", 1), ("tf32", 1), ("bf16", 1), ("fp16", 1), ("bf16-true", 1), ("fp8", 1)],
)
def test_plan_of_every_precision_is_complete_with_and_without_a_gpu(plan: Plan, precision: str, gpus: int) -> None:
    text = plan(f"trainer(nn.Linear(4, 6), precision={precision!r}).fit(data)", gpus)
    assert f"precision={precision!r}" in text
    assert "not known" not in text


def test_plan_script_sees_the_planned_ranks_and_nodes(plan: Plan) -> None:
    text = plan(
        """
made = trainer(nn.Linear(4, 6))
print(made.world.world_size, made.world.local_world_size, made.world.rank, made.data_ranks, made.batch_plan.micro_batch)
made.fit(data)
""",
        ranks=4,
        per_node=2,
    )
    assert text.startswith("4 2 0 4 2\n30 parameters")


def test_plan_of_several_updates_counts_the_state_of_each_optimizer(plan: Plan) -> None:
    text = plan("""
model = nn.ModuleDict({"first": nn.Linear(4, 6), "second": nn.Linear(4, 6)})
def loss_of(name):
    return lambda model, batch: squares(model[name], batch)
updates = [
    Update("first", loss_of("first"), torch.optim.AdamW(model["first"].parameters())),
    Update("second", loss_of("second"), torch.optim.SGD(model["second"].parameters(), lr=0.1, momentum=0.9)),
]
Trainer(model, updates=updates, config=TrainerConfig(max_steps=1, global_batch_size=8)).fit(data)
""")
    assert "not known" not in text
    size = 30 * 8 + 2 * 4 + 30 * 4  # Adam has a step count for each parameter
    assert re.search(rf"^  optimizer state +{size} bytes  exact$", text, re.MULTILINE)


def test_plan_of_lbfgs_counts_its_history(plan: Plan) -> None:
    text = plan("""
model = nn.Linear(4, 6)
trainer(model, torch.optim.LBFGS(model.parameters(), history_size=10)).fit(data)
""")
    assert "not known" not in text
    assert re.search(rf"^  optimizer state +{30 * 4 * 22 / 1024:.1f} KiB  exact$", text, re.MULTILINE)


def test_plan_of_data_that_the_model_makes_says_what_is_unknown(plan: Plan) -> None:
    text = plan("""
class Played(torch.utils.data.Dataset):
    def __len__(self):
        return 32
    def __getitem__(self, index):
        return torch.full((4,), model(torch.ones(4)).sum().item()), torch.ones(6)
model = nn.Linear(4, 6)
trainer(model).fit(Played())
""")
    assert "not known: activations: the data cannot be read if the model has no values: DataDependent" in text
    assert "optimizer state" in text


def test_plan_restores_real_parameters_after_the_script(plan: Plan) -> None:
    plan("trainer(nn.Linear(4, 6)).fit(data)")
    assert torch.nn.Linear(1, 1).weight.item() is not None
    assert torch.is_grad_enabled()
    with pytest.raises(ConfigError):
        plan("trainer(nn.Linear(4, 6), parallel={'shard': 3}).fit(data)")
    assert torch.nn.Linear(1, 1).weight.item() is not None


# --- errors of the script ---------------------------------------------------------------------------------------------


BROKEN_DATA = """
class Broken(torch.utils.data.Dataset):
    def __init__(self, where):
        self.where = where
    def set_epoch(self, epoch):
        self.act("set_epoch")
    def __len__(self):
        self.act("len")
        return 32
    def __getitem__(self, index):
        self.act("getitem")
        return torch.ones(4), torch.ones(6)
    def act(self, where):
        if where == self.where:
            FAIL

def fails():
    FAIL

def collate(samples):
    fails()
"""
FAILURES = [
    "model[0].weight.sum().item()",
    "model[0].weight.numpy()",
    "model[0].weight.tolist()",
    "int(model[0].weight.argmax())",
    "assert model[0].weight.isfinite().all()",
    "{}['missing']",
    "1 / 0",
    "[][1]",
    "raise NotImplementedError('not here')",
    "raise AttributeError('no attribute')",
    "raise OSError(2, 'no file')",
    "next(iter(()))",
]
PLACES = {
    "set_epoch": "trainer(model).fit(Broken('set_epoch'))",
    "__len__": "trainer(model).fit(Broken('len'))",
    "__getitem__": "trainer(model).fit(Broken('getitem'))",
    "collate": "trainer(model).fit(torch.utils.data.DataLoader(data, batch_size=4, collate_fn=collate))",
    "loss": "trainer(model, loss_fn=lambda model, batch: fails()).fit(data)",
    "forward": "model.register_forward_pre_hook(lambda *_: fails())\ntrainer(model).fit(data)",
    "backward": (
        "model.register_full_backward_hook(lambda *_: fails())\n"
        "trainer(model, loss_fn=lambda m, b: squares(m, [b[0].requires_grad_(), b[1]])).fit(data)"
    ),
    "optimizer": (
        "class Own(torch.optim.SGD):\n    def step(self, closure=None):\n        fails()\n"
        "trainer(model, Own(model.parameters(), lr=0.1)).fit(data)"
    ),
}
SCRIPT_PLACES = {
    "script": "fails()",
    "scheduler": "Trainer(model, torch.optim.SGD(model.parameters()), squares, scheduler=lambda _: fails()).fit(data)",
}


def _broken(place: str, failure: str) -> str:
    definitions = BROKEN_DATA.replace("FAIL", failure)
    return f"model = nn.Sequential(nn.Linear(4, 6))\n{definitions}\n{place}\n"


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("place", PLACES)
def test_plan_says_what_it_does_not_know_whatever_user_code_raises(plan: Plan, place: str, failure: str) -> None:
    text = plan(_broken(PLACES[place], failure))
    assert re.search("not known: (activations|optimizer state): ", text), text
    assert re.search(r"weights +120 bytes", text)


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("place", SCRIPT_PLACES)
def test_plan_of_a_script_that_fails_before_it_trains_is_one_message(plan: Plan, place: str, failure: str) -> None:
    with pytest.raises(UsageError, match=r"train\.py fails before it trains at train\.py:\d+: \w+"):
        plan(_broken(SCRIPT_PLACES[place], failure))


@pytest.mark.parametrize("kind", ["Embedding", "EmbeddingBag"])
def test_plan_of_sparse_gradients_counts_them_with_the_batch_and_not_with_the_weights(plan: Plan, kind: str) -> None:
    text = plan(f"""
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.rows, self.head = nn.{kind}(1000, 64, sparse=True), nn.Linear(64, 1)
    def forward(self, x):
        return self.head(self.rows(x))
model = Net()
data = torch.randint(0, 1000, (32, 5))
trainer(model, torch.optim.SGD(model.parameters()), lambda model, batch: model(batch).square().mean()).fit(data)
""")
    assert "not known" not in text
    assert re.search(r"^  gradients +260 bytes  exact; sparse ones are temporary tensors$", text, re.MULTILINE)
    (temporary,) = re.findall(r"^  temporary tensors +([\d.]+) KiB", text, re.MULTILINE)
    assert float(temporary) * 1024 > 4 * 64 * 4, "the rows of a micro-batch of 4 samples"
