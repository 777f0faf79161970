"""The FLOPs of a model, counted in its first step, and the MFU that follows from them."""

import copy
import random
import runpy
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import _get_current_dispatch_mode
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from ddp_kit import Loss, Trainer, TrainerConfig, Update
from ddp_kit.distributed.world import World
from ddp_kit.heartbeat import HeartbeatWriter
from ddp_kit.records import FitResult
from ddp_kit.torch_internals import compilations
from ddp_kit.trainer import model_flops
from ddp_kit.trainer.model_flops import ModelFlops, PeakRates
from tests.support.launching import ROOT
from tests.support.toys import mean_square

WIDTH, SAMPLES = 8, 4
PEAK = 1e12


@pytest.fixture(autouse=True)
def _a_table_with_this_device(monkeypatch: pytest.MonkeyPatch) -> None:
    here = PeakRates("cpu", {"fp32": PEAK / 1e12, "bf16": 2 * PEAK / 1e12}, "this test")
    monkeypatch.setattr(model_flops, "TABLE", (*model_flops.TABLE, here))


def fitted(
    model: nn.Module,
    loss_fn: Any = mean_square,
    data: Any = None,
    optimizer: Any = lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    **settings: Any,
) -> tuple[Trainer, FitResult]:
    settings = {"global_batch_size": SAMPLES, "max_steps": 4, "log_every_steps": 1, "mfu": True} | settings
    trainer = Trainer(model, optimizer, loss_fn, TrainerConfig(**settings))
    return trainer, trainer.fit(TensorDataset(torch.randn(16, WIDTH)) if data is None else data)


def per_sample(result: FitResult, peak: float = PEAK) -> int:
    """The FLOPs that the rows' MFU stands for."""
    found = {round(row.mfu * peak / row.samples_per_second) for row in result.history if row.mfu is not None}
    assert len(result.history) == 4
    assert all(row.mfu is not None for row in result.history)
    (flops,) = found
    return flops


def line(said: list[str]) -> str:
    (found,) = (each for each in said if each.startswith("mfu:"))
    return found


def test_flops_of_a_linear_layer_are_two_per_weight_in_each_of_three_products() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, 32), nn.Tanh(), nn.Linear(32, 5))
    _, result = fitted(model)
    # The gradient of the input is computed for all layers but the first.
    assert per_sample(result) == 2 * 2 * WIDTH * 32 + 3 * 2 * 32 * 5


def test_flops_per_sample_do_not_depend_on_the_passes_per_step() -> None:
    _, result = fitted(nn.Linear(WIDTH, 32), micro_batch_size=1, global_batch_size=4)
    assert per_sample(result) == 2 * 2 * WIDTH * 32


def test_flops_of_a_convolution_are_those_of_its_filter_at_each_place() -> None:
    model = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.SiLU(), nn.Conv2d(6, 4, 5))
    _, result = fitted(model, data=TensorDataset(torch.randn(16, 3, 10, 10)))
    first, second = 2 * 3 * 6 * 3 * 3 * 10 * 10, 2 * 6 * 4 * 5 * 5 * 6 * 6
    assert per_sample(result) == 2 * first + 3 * second


def test_flops_of_grouped_and_transposed_convolutions_are_counted() -> None:
    model = nn.Sequential(nn.Conv2d(6, 12, 3, groups=3), nn.PReLU(), nn.ConvTranspose2d(12, 4, 2, stride=2, groups=2))
    _, result = fitted(model, data=TensorDataset(torch.randn(16, 6, 10, 10)))
    first, second = 2 * (6 // 3) * 12 * 3 * 3 * 8 * 8, 2 * 12 * (4 // 2) * 2 * 2 * 8 * 8
    assert per_sample(result) == 2 * first + 3 * second


@pytest.mark.parametrize("checkpointing", [None, "blocks"])
def test_flops_of_a_gpt_are_six_per_weight_and_token_and_its_attention(checkpointing: str | None) -> None:
    gpt = runpy.run_path(str(ROOT / "examples" / "gpt.py"), run_name="gpt")
    vocabulary, length, width, layers = 11, 32, 16, 2
    model = gpt["Gpt"](vocabulary, length, width=width, heads=2, layers=layers)
    tokens = torch.randint(vocabulary, (16, length))

    def loss_fn(model: nn.Module, batch: Any) -> Loss:
        loss = F.cross_entropy(model(batch[0]).flatten(0, 1), batch[0].flatten(), reduction="sum")
        return Loss(loss, weight=batch[0].numel())

    weights = sum(each.weight.numel() for each in model.modules() if isinstance(each, nn.Linear))
    _, result = fitted(model, loss_fn, TensorDataset(tokens), memory={"activation_checkpointing": checkpointing})
    assert weights == layers * 12 * width**2 + width * vocabulary
    # PaLM, appendix B: 6 N + 12 L H Q T per token.
    assert per_sample(result) == length * (6 * weights + 12 * layers * width * length)


class Recomputed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.reentrant = reentrant
        self.begin, self.inner = nn.Linear(WIDTH, 16), nn.Sequential(nn.Linear(16, 16), nn.Dropout(), nn.Linear(16, 4))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = checkpoint(self.inner, self.begin(x), use_reentrant=self.reentrant)
        return found


@pytest.mark.parametrize("reentrant", [False, True])
def test_flops_exclude_recomputation_by_the_model(reentrant: bool) -> None:
    _, result = fitted(Recomputed(reentrant))
    assert per_sample(result) == 2 * 2 * WIDTH * 16 + 3 * 2 * (16 * 16 + 16 * 4)


def test_peak_rate_is_that_of_the_dtype_of_most_products(said: list[str]) -> None:
    _, result = fitted(nn.Linear(WIDTH, 32), precision="bf16")
    assert per_sample(result, 2 * PEAK) == 2 * 2 * WIDTH * 32
    assert line(said) == (
        "mfu: 1.02e-06 GFLOP per sample, forward and backward; the peak rate of a device is 2 TFLOP/s in bf16"
    )
    _, result = fitted(nn.Linear(WIDTH, 32), precision="bf16-true")
    assert per_sample(result, 2 * PEAK) == 2 * 2 * WIDTH * 32


@pytest.mark.parametrize(
    ("precision", "dtype", "kind"),
    [
        ("fp8", torch.bfloat16, "fp8"),
        ("tf32", torch.float32, "tf32"),
        ("bf16", torch.bfloat16, "bf16"),
        ("fp32", torch.bfloat16, "bf16"),  # the model's own type
        ("bf16", torch.float32, "fp32"),
    ],
)
def test_peak_rate_dtype_is_that_of_the_precision_or_the_model(precision: Any, dtype: torch.dtype, kind: str) -> None:
    assert flops_of(World(0, 1, 0, 1, 0, torch.device("cpu")), precision=precision)._kind(dtype) == kind


def flops_of(world: World, **settings: Any) -> ModelFlops:
    context: Any = SimpleNamespace(config=TrainerConfig(**settings), world=world, heartbeat=HeartbeatWriter())
    return ModelFlops(context, evaluates_once=True)


def test_peak_rate_of_a_device_map_is_that_of_all_its_devices() -> None:
    gpus = (torch.device("cuda", 0), torch.device("cuda", 1))
    world = World(0, 4, 0, 4, 0, torch.device("cpu"), gpus)
    for parallel, devices in ({"strategy": "device_map"}, 8), ({"strategy": "ddp"}, 4):
        assert flops_of(world, parallel=parallel)._devices == devices


class Many(nn.Module):
    """With what a run has of states: buffers, random numbers, and functions that are sensitive to their order."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.SiLU(), nn.Dropout(), nn.Linear(16, 16), nn.Mish()
        )
        self.out = nn.Linear(16, 1)
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        found: Tensor = self.out(self.layers(x) + torch.randn(()))
        return found


def drawing(model: nn.Module, batch: Any) -> Tensor:
    return mean_square(model, batch) * (1 + random.random() + torch.rand(()))


@pytest.mark.parametrize("compiled", [None, pytest.param("model", marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # where torch 2.13 imports its compiler
def test_flop_count_leaves_the_run_bitwise_identical(compiled: str | None) -> None:
    ends, model, data = [], Many(), TensorDataset(torch.randn(16, WIDTH))
    for asked in (False, True):
        torch._dynamo.reset()
        begun = compilations()
        trainer, result = fitted(copy.deepcopy(model), drawing, data, mfu=asked, compile=compiled, max_steps=6)
        assert [row.mfu is not None for row in result.history] == [asked] * 6
        ends.append(
            {
                **trainer.model.state_dict(),
                **{f"{n} {k}": v for n, s in trainer.optimizer.state_dict()["state"].items() for k, v in s.items()},
                "losses": torch.tensor([row.loss for row in result.history]),
                "norms": torch.tensor([row.grad_norm for row in result.history]),
                "random": torch.random.get_rng_state(),
                "Python's": torch.tensor(random.getstate()[1]),
                "calls": torch.tensor(trainer.model.calls),
                "graphs": torch.tensor(compilations() - begun),
            }
        )
        assert not any(parameter.grad is not None for parameter in trainer.model.parameters())
    assert ends[0].keys() == ends[1].keys()
    assert [name for name in ends[0] if not torch.equal(ends[0][name], ends[1][name])] == []
    assert bool(ends[1]["graphs"]) == (compiled is not None)


def test_flop_count_calls_the_loss_function_only_in_steps() -> None:
    seen: list[bool] = []

    def loss_fn(model: nn.Module, batch: Any) -> Tensor:
        seen.append(_get_current_dispatch_mode() is not None)
        return mean_square(model, batch)

    fitted(nn.Linear(WIDTH, 1), loss_fn)
    assert seen == [True, False, False, False]


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.out = nn.LSTM(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.out(self.recurrent(x)[0])
        return found


class Bags(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bags, self.out = nn.EmbeddingBag(10, WIDTH), nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.out(self.bags(x.long().abs() % 10))
        return found


def test_flops_exclude_lookups() -> None:
    _, result = fitted(Bags())
    assert per_sample(result) == 3 * 2 * WIDTH * 2


class Masked(nn.Module):
    """Parameters and buffers in operations that are no products."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(SAMPLES, WIDTH))
        self.norm = nn.utils.parametrizations.weight_norm(nn.Linear(WIDTH, 2))
        self.register_buffer("mask", torch.tril(torch.ones(WIDTH, WIDTH)))

    def forward(self, x: Tensor) -> Tensor:
        mask: Any = self.mask
        square = self.out(x).unsqueeze(1).expand(-1, WIDTH, -1).masked_fill(mask == 0, float("-inf")).softmax(dim=-1)
        with torch.no_grad():
            mask.mul_(1.0).masked_fill_(mask == 0, 0.0).clamp_(0, 1)
        drawn = F.dropout(self.scale.cumsum(0)[: len(x)], 0.1).to(torch.float64).float()
        found: Tensor = self.norm(square.sum(1) * drawn) + self.scale.pow(2).sum().sqrt() + self.scale.std()
        return found


def test_flops_exclude_element_wise_operations_on_weights_and_buffers() -> None:
    _, result = fitted(Masked())
    assert per_sample(result) == 2 * 2 * WIDTH * WIDTH + 3 * 2 * WIDTH * 2


class Projecting(nn.Module):
    """A product of a matrix and a vector."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, 1)
        self.register_buffer("basis", torch.randn(WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        basis: Any = self.basis
        found: Tensor = self.out(x) + torch.mv(basis, x[0]).sum()
        return found


def test_flops_of_a_product_with_a_vector_are_two_per_entry_of_the_matrix() -> None:
    _, result = fitted(Projecting(), global_batch_size=1)
    assert per_sample(result) == 2 * 2 * WIDTH + 2 * WIDTH * WIDTH


class Doubled(nn.Module):
    """Computes a product in the forward pass that needs no gradient, and a gradient in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(WIDTH, 1, bias=False)
        self.frozen = nn.Linear(WIDTH, WIDTH, bias=False).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.frozen(x)
        found: Tensor = self.out(x)
        return found


def penalised(model: nn.Module, batch: Any) -> Tensor:
    x = batch[0].requires_grad_()
    y = model[0](x)
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return y.square().mean() + slope.square().mean()


def test_flops_include_products_without_gradients_and_gradients_in_the_loss() -> None:
    _, result = fitted(Doubled())
    assert per_sample(result) == 2 * WIDTH * WIDTH + 2 * 2 * WIDTH
    _, result = fitted(nn.Sequential(nn.Linear(WIDTH, 1, bias=False)), penalised)
    # y, its slope, and in the backward pass both gradients of each of the two products, except for that of a constant.
    assert per_sample(result) in range(4 * 2 * WIDTH, 6 * 2 * WIDTH + 1)


class Multiplying(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        torch.ones(64, 64) @ torch.ones(64, 64)
        return super().step(closure)


def test_flops_exclude_products_of_the_optimizer() -> None:
    _, result = fitted(nn.Linear(WIDTH, 32), optimizer=lambda parameters: Multiplying(parameters, lr=0.01))
    assert per_sample(result) == 2 * 2 * WIDTH * 32


def waiting(model: nn.Module, batch: Any) -> Tensor:
    loss = mean_square(model, batch)
    return loss * 2 if loss.item() > 1e9 else loss


other = nn.Linear(WIDTH, 1)


def of_another(model: nn.Module, batch: Any) -> Tensor:
    return mean_square(model, batch) + mean_square(other, batch)


def test_flops_of_loss_functions_that_read_values_or_use_other_modules_are_counted() -> None:
    _, result = fitted(nn.Linear(WIDTH, 1), waiting)
    assert per_sample(result) == 2 * 2 * WIDTH
    _, result = fitted(nn.Linear(WIDTH, 1), of_another)
    assert per_sample(result) == 2 * 2 * 2 * WIDTH


@pytest.mark.parametrize(
    ("model", "loss_fn", "reason"),
    [
        (Recurrent(), mean_square, "the FLOPs of aten.mkldnn_rnn_layer are not"),
        (
            nn.Bilinear(WIDTH, WIDTH, 2),
            lambda m, b: m(b[0], b[0]).mean(),
            "the FLOPs of aten._trilinear are not",
        ),
        (nn.LayerNorm(WIDTH), mean_square, "the model has no matrix products or convolutions"),
        (nn.Linear(WIDTH, 1).double(), lambda m, b: m(b[0].double()).mean(), "the peak rate of cpu in float64"),
    ],
)
def test_mfu_without_known_flops_is_none(said: list[str], model: nn.Module, loss_fn: Any, reason: str) -> None:
    _, result = fitted(model, loss_fn)
    assert [row.mfu for row in result.history] == [None] * 4
    assert line(said).startswith(f"mfu: not available: {reason}")
    assert not any("MFU" in each for each in said)


def test_mfu_on_a_device_that_is_not_in_the_table_is_none(said: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_flops, "TABLE", ())
    _, result = fitted(nn.Linear(WIDTH, 1))
    assert [row.mfu for row in result.history] == [None] * 4
    assert line(said) == "mfu: not available: the peak rate of cpu is not known"


def test_mfu_of_a_step_with_several_updates_is_none(said: list[str]) -> None:
    model = nn.ModuleDict({"a": nn.Linear(WIDTH, 1), "b": nn.Linear(WIDTH, 1)})
    updates = [
        Update(name, lambda m, b, n=name: m[n](b[0]).square().mean(), torch.optim.SGD(model[name].parameters(), lr=0.1))
        for name in ("a", "b")
    ]
    config = TrainerConfig(global_batch_size=SAMPLES, max_steps=2, log_every_steps=1, mfu=True)
    result = Trainer(model, updates=updates, config=config).fit(TensorDataset(torch.randn(16, WIDTH)))
    assert [row.mfu for row in result.history] == [None] * 2
    assert line(said).startswith("mfu: not available: a step has several updates")


def test_mfu_of_an_optimizer_that_evaluates_the_loss_repeatedly_is_none(said: list[str]) -> None:
    fitted(nn.Linear(WIDTH, 1), optimizer=torch.optim.LBFGS)
    assert line(said).startswith("mfu: not available: a step has several updates, or evaluates its loss several times")


def test_flop_count_accepts_batches_of_any_kind() -> None:
    def loss_fn(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        found: Tensor = model(batch.pop("x")["values"]).square().mean()
        return found

    data = [{"x": {"values": torch.randn(WIDTH)}} for _ in range(16)]
    _, result = fitted(nn.Linear(WIDTH, 32), loss_fn, data)
    assert per_sample(result) == 2 * 2 * WIDTH * 32


def test_mfu_is_in_log_lines_and_the_summary(said: list[str]) -> None:
    _, result = fitted(nn.Linear(WIDTH, 1))
    row = replace(result.history[0], mfu=0.4321)
    assert "samples/s  MFU 43.2%  data " in str(row)
    assert "MFU" not in str(replace(row, mfu=None))
    (summary,) = (each for each in said if each.startswith("done:"))
    assert "; MFU 0.0%; " in summary


def test_peak_rates_are_found_by_the_whole_device_name() -> None:
    found = {
        "NVIDIA H100 80GB HBM3": 989.4e12,
        "NVIDIA H100 PCIe": 756e12,
        "NVIDIA H200": 989.4e12,
        "NVIDIA A100-SXM4-80GB": 312e12,
        "A100-SXM4-40GB": 312e12,
        "NVIDIA L4": 121e12,
        "NVIDIA L40S": 362e12,
        "NVIDIA GeForce RTX 4090": 165.2e12,
    }
    for name, rate in found.items():
        assert model_flops.peak_rates(name)["bf16"] == rate
    assert "bf16" not in model_flops.peak_rates("Tesla T4")
    for name in ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "NVIDIA A10G", "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA L40"):
        assert not model_flops.peak_rates(name)
    assert all(each.source for each in model_flops.TABLE)
