"""The precisions, on the device at hand; fp8 is in test_float8.py."""

from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import TensorDataset

from ddp_kit import LossError, Trainer, TrainerConfig
from ddp_kit.errors import ConfigError
from ddp_kit.model.precision import Precision
from ddp_kit.parallel.strategy import scale_gradients
from ddp_kit.torch_internals import join_overflow_flags
from tests.support.reads import Reads
from tests.support.toys import TensorEncoding

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("name", "product", "weights"),
    [
        ("fp32", torch.float32, torch.float32),
        ("bf16", torch.bfloat16, torch.float32),
        ("fp16", torch.float16, torch.float32),
        ("bf16-true", torch.bfloat16, torch.bfloat16),
    ],
)
def test_precision_computes_in_its_dtype(name: str, product: torch.dtype, weights: torch.dtype) -> None:
    model = nn.Linear(4, 4)
    parameter = model.weight
    precision = Precision(name, CPU)
    precision.prepare(model)
    with precision.forward():
        output = model(torch.ones(2, 4, dtype=precision.batch_dtype or torch.float32))
    assert output.dtype == product
    assert model.weight.dtype == weights
    assert model.weight is parameter, "an optimizer made before keeps its parameters"


@pytest.mark.parametrize("gathered", [False, True])
def test_precision_trains_a_weight_first_used_without_gradients(gathered: bool) -> None:
    model, x = nn.Linear(4, 1), torch.ones(2, 4)
    with Precision("bf16", CPU, gathered=gathered).forward():
        with torch.no_grad():
            model(x)
        model(x).sum().backward()
    assert model.weight.grad is not None


def test_precision_tf32_on_the_cpu_is_refused_with_an_alternative() -> None:
    with pytest.raises(ConfigError, match="precision='tf32' is not available on the CPU") as caught:
        Precision("tf32", CPU)
    assert "fp32" in caught.value.hint


def test_precision_fp16_scales_the_loss_and_unscales_gradients() -> None:
    weight = nn.Parameter(torch.tensor([2.0]))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    precision = Precision("fp16", CPU)
    loss = (weight * 3.0).sum()
    scaled = precision.scaled(loss)
    assert scaled > loss
    scaled.backward()
    precision.unscale(optimizer)
    assert weight.grad is not None
    assert weight.grad.item() == 3.0
    assert precision.step_optimizer(optimizer)
    assert weight.item() == 0.5


def test_precision_fp16_skips_the_step_of_an_overflow() -> None:
    weight = nn.Parameter(torch.tensor([2.0]))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    precision = Precision("fp16", CPU)
    precision.scaled((weight * float("inf")).sum()).backward()
    precision.unscale(optimizer)
    assert not precision.step_optimizer(optimizer)
    assert weight.item() == 2.0


FUSED = [
    kind for kind in vars(torch.optim).values() if isinstance(kind, type) and "fused" in signature(kind).parameters
]
SETTINGS: list[tuple[Any, dict[str, Any]]] = [(kind, {}) for kind in FUSED]
SETTINGS += [(torch.optim.SGD, {"momentum": 0.9, **more}) for more in ({}, {"dampening": 0.5}, {"nesterov": True})]


@pytest.mark.parametrize(("kind", "settings"), SETTINGS)
def test_fused_optimizer_skips_an_overflow_like_any_other(kind: Any, settings: dict[str, Any]) -> None:
    ends = []
    for fused in (False, True):
        weights = [nn.Parameter(torch.ones(1000)), nn.Parameter(torch.ones(()))]
        optimizer, precision = kind(weights, lr=0.1, fused=fused, **settings), Precision("fp16", CPU)
        for factor in (torch.inf, 1.0, torch.nan, 2.0):  # the first step, which creates the state, is skipped
            optimizer.zero_grad()
            garbage = [torch.full((1000,), 1e30) for _ in range(100)]
            del garbage  # so that uninitialised memory is not zero
            precision.scaled(sum((weight * factor).sum() for weight in weights)).backward()  # type: ignore[union-attr]
            precision.unscale(optimizer)
            precision.step_optimizer(optimizer, wait=False)
        assert precision.take_skipped_steps() == 2
        ends.append([*weights, *(value for weight in weights for value in optimizer.state[weight].values())])
    for one, other in zip(*ends, strict=True):
        assert torch.allclose(one, other)


@pytest.mark.parametrize(("flags", "joined"), [((0.0, 0.0), 0.0), ((0.0, 1.0), 1.0), ((1.0, 2.0), 1.0)])
def test_overflow_on_several_devices_and_ranks_is_one_flag(flags: tuple[float, float], joined: float) -> None:
    weight, scaler = nn.Parameter(torch.ones(2)), torch.amp.GradScaler("cpu")
    optimizer = torch.optim.AdamW([weight], fused=True)
    scaler.scale(weight.sum()).backward()
    scaler.unscale_(optimizer)
    found: dict[Any, Tensor] = scaler._found_inf_per_device(optimizer)
    found.update({CPU: torch.tensor([flags[0]]), torch.device("cpu", 1): torch.tensor(flags[1])})
    join_overflow_flags(scaler, optimizer)
    assert found == {CPU: joined}
    scaler.step(optimizer)
    assert torch.equal(weight, torch.ones(2)) == bool(joined)


def test_scale_gradients_does_not_round_the_factor_to_low_precision() -> None:
    parameter = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    parameter.grad = torch.full_like(parameter, 384.0)
    scale_gradients([parameter], torch.tensor(1.003, dtype=torch.float64))  # 1.0 in bfloat16
    assert parameter.grad.item() == torch.tensor(384.0 * 1.003).bfloat16().item() != 384.0


def test_scale_gradients_of_all_dtypes_by_a_tensor() -> None:
    parameters = [nn.Parameter(torch.ones(2, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16, torch.float64)]
    for parameter in parameters[:2]:
        parameter.grad = torch.full_like(parameter, 3.0)
    scale_gradients(parameters, torch.tensor(0.5, dtype=torch.float64))
    assert [None if one.grad is None else one.grad.tolist() for one in parameters] == [[1.5, 1.5], [1.5, 1.5], None]


def fp16_steps(gradients: list[float], *, wait: bool) -> tuple[Precision, nn.Parameter, list[bool]]:
    """Steps with these gradients, by the fused SGD."""
    weight = nn.Parameter(torch.tensor([8.0]))
    optimizer = torch.optim.SGD([weight], lr=1.0, fused=True)
    precision = Precision("fp16", CPU)
    told = []
    for gradient in gradients:
        weight.grad = None
        precision.scaled((weight * gradient).sum()).backward()
        precision.unscale(optimizer)
        told.append(precision.step_optimizer(optimizer, wait=wait))
    return precision, weight, told


def test_precision_fp16_reads_whether_a_step_counts_only_if_asked(reads: Reads) -> None:
    gradients = [1.0, float("inf"), 2.0, float("nan")]
    with reads:
        precision, weight, told = fp16_steps(gradients, wait=False)
    assert not reads.of
    assert all(told)
    assert weight.item() == 8.0 - 1.0 - 2.0
    assert precision.take_skipped_steps() == 2
    assert precision.take_skipped_steps() == 0
    precision, weight, told = fp16_steps(gradients, wait=True)
    assert told == [True, False, True, False]
    assert (weight.item(), precision.take_skipped_steps()) == (5.0, 0)


# --- bf16-true: buffers and inputs ----------------------------------------------------------------------------------


class Positional(nn.Module):
    """Adds a table to its input, which the loss function may get in two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.arange(1000.0).repeat(4, 1).T)
        self.norm, self.linear = nn.BatchNorm1d(4), nn.Linear(4, 1)
        self.as_table = True

    def forward(self, x: Tensor) -> Tensor:
        x = x + (self.table[: len(x)] if self.as_table else self.table[: len(x)].to(x.dtype))
        found: Tensor = self.linear(self.norm(x))
        return found


def mean_output(model: nn.Module, batch: Tensor) -> Tensor:
    found: Tensor = model(batch).float().mean()
    return found


def trained_one_step(
    model: nn.Module, train_data: object, loss_fn: object = mean_output, **settings: object
) -> Trainer:
    config = TrainerConfig(precision="bf16-true", global_batch_size=4, max_steps=1, **settings)
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, config)
    trainer.fit(train_data)
    return trainer


def test_precision_bf16_true_keeps_buffers_except_statistics_of_norms() -> None:
    model = Positional()
    model.as_table = False
    table = model.table
    trained_one_step(model, torch.randn(8, 4))
    assert model.table is table
    assert len(model.table.unique()) == 1000
    assert model.norm.running_mean.dtype == model.linear.weight.dtype == torch.bfloat16


def test_precision_bf16_true_converts_named_buffers() -> None:
    model = Positional()
    trained_one_step(model, torch.randn(8, 4), bf16_buffers=("tab*",))
    assert model.table.dtype == torch.bfloat16


def test_precision_with_an_unknown_buffer_name_suggests_the_nearest() -> None:
    with pytest.raises(
        ConfigError, match="bf16_buffers names 'tables', but the model Positional has no such"
    ) as caught:
        trained_one_step(Positional(), torch.randn(8, 4), bf16_buffers=("tables",))
    assert caught.value.hint == "did you mean 'table'?"


def test_precision_bf16_true_explains_an_error_of_mixed_dtypes() -> None:
    with pytest.raises(
        LossError, match=r"several dtypes: .* weights are bfloat16, and the buffers table keep"
    ) as caught:
        trained_one_step(Positional(), torch.randn(8, 4))
    assert "bf16_buffers" in caught.value.hint
    with pytest.raises(LossError, match="weights are bfloat16, and the batch keep"):
        trained_one_step(nn.Linear(4, 1), torch.randn(8, 4), bf16_inputs=False)


def test_precision_with_bf16_inputs_off_leaves_inputs_unchanged() -> None:
    seen: list[Tensor] = []

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        seen.append(batch[1])
        return mean_output(model, batch[0].bfloat16())

    positions = torch.arange(1000.0).expand(4, -1)
    trained_one_step(
        nn.Linear(4, 1), torch.utils.data.TensorDataset(torch.randn(4, 4), positions), loss_fn, bf16_inputs=False
    )
    assert torch.equal(seen[0], positions)


@pytest.mark.parametrize(
    ("values", "warns"),
    [
        (torch.arange(1000.0), True),
        (torch.arange(-300.0, 0), True),
        (torch.arange(1000), False),
        (torch.arange(256.0), False),
        (torch.arange(0, 1000, 4.0), False),  # bfloat16 has all of them
        (torch.rand(1000) * 200, False),
        (torch.tensor([float("inf"), float("nan"), 0.5]), False),
    ],
)
def test_precision_bf16_true_warns_once_of_rounded_whole_numbers(values: Tensor, warns: bool, said: list[str]) -> None:
    precision = Precision("bf16-true", CPU)
    for _ in range(2):
        precision.check_batch({"positions": values.expand(2, -1), "name": "x"})
    warnings = [line for line in said if "rounds whole numbers above 256" in line]
    assert len(warnings) == warns
    if len(values) == 1000 and warns:
        assert "in a float32 tensor of shape (2, 1000), 1000 different values become 507" in warnings[0]


def test_precision_bf16_true_checks_the_first_batch_for_whole_numbers(said: list[str]) -> None:
    trained_one_step(nn.Linear(4, 1), torch.arange(5001.0, 5033.0).view(8, 4))
    assert sum("rounds whole numbers" in line for line in said) == 1
    with pytest.raises(ConfigError, match="bf16_inputs = False needs precision = 'bf16-true', but precision = 'bf16'"):
        TrainerConfig(precision="bf16", bf16_inputs=False)


# --- Containers of bf16-true ------------------------------------------------------------------------------------------


class NamedDict(dict):  # type: ignore[type-arg]
    def to(self, device: Any) -> "NamedDict":
        return NamedDict({name: value.to(device) for name, value in self.items()})


@dataclass
class TokenSample:
    x: Tensor
    ids: Tensor


@dataclass
class Movable(TokenSample):
    def to(self, device: Any) -> "Movable":
        return replace(self, x=self.x.to(device), ids=self.ids.to(device))


class Graph:
    """An object whose tensors ddpkit cannot know."""

    def __init__(self, x: Tensor, ids: Tensor) -> None:
        self.x, self.ids = x, ids

    def to(self, device: Any) -> "Graph":
        return Graph(self.x.to(device), self.ids.to(device))


Pair = namedtuple("Pair", ["x", "ids"])


def feature(x: Tensor, ids: Tensor) -> Any:
    return pytest.importorskip("transformers").BatchFeature({"x": x, "ids": ids})


def encoding(x: Tensor, ids: Tensor) -> Any:
    return pytest.importorskip("transformers").BatchEncoding({"x": x, "ids": ids})


CONTAINERS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "dict": lambda x, ids: {"x": x, "ids": ids},
    "list": lambda x, ids: [x, ids],
    "tuple": lambda x, ids: (x, ids),
    "namedtuple": Pair,
    "dataclass": TokenSample,
    "UserDict": lambda x, ids: UserDict(x=x, ids=ids),
    "OrderedDict": lambda x, ids: OrderedDict(x=x, ids=ids),
    "TensorEncoding": lambda x, ids: TensorEncoding(x=x, ids=ids),
    "NamedDict": lambda x, ids: NamedDict(x=x, ids=ids),
    "Movable": Movable,  # type: ignore[dict-item]
    "BatchFeature": feature,
    "BatchEncoding": encoding,
    "nested": lambda x, ids: TensorEncoding(x=Movable(x, ids), ids=ids),
}


def pair_in(batch: Any) -> tuple[Tensor, Tensor]:
    if isinstance(batch, list | tuple):
        return batch[0], batch[1]
    if isinstance(batch, dict | UserDict):
        nested = isinstance(batch["x"], Movable)
        return pair_in(batch["x"]) if nested else (batch["x"], batch["ids"])
    return batch.x, batch.ids


@pytest.mark.parametrize("name", CONTAINERS)
def test_precision_bf16_true_converts_floats_in_containers_and_no_integers(name: str) -> None:
    given = [(torch.randn(4), torch.arange(300, 304)) for _ in range(8)]
    kinds: list[object] = []

    def collated(samples: list[Any]) -> Any:
        return CONTAINERS[name](*map(torch.stack, zip(*samples, strict=True)))

    def loss(model: nn.Module, batch: Any) -> Tensor:
        x, ids = pair_in(batch)
        kinds.append((type(batch), x.dtype, ids.dtype))
        return model(x).mean()

    trained_one_step(nn.Linear(4, 1), given, loss, data={"collate_fn": collated})
    assert kinds == [(type(collated(given[:1])), torch.bfloat16, torch.int64)]


def test_precision_bf16_true_converts_a_packed_sequence() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return model(batch)[1].mean()

    trained_one_step(nn.GRU(4, 1), [torch.randn(3, 4)] * 8, loss, data={"collate_fn": pack_sequence})


def test_precision_bf16_true_names_the_class_of_objects_that_it_cannot_convert() -> None:
    def graph(samples: list[Tensor]) -> Graph:
        return Graph(torch.stack(samples), torch.arange(4))

    def loss(model: nn.Module, batch: Graph) -> Tensor:
        return model(batch.x).mean()

    with pytest.raises(LossError, match="tensors in objects of the class Graph in the batch keep their dtype\n.*") as e:
        trained_one_step(nn.Linear(4, 1), torch.randn(8, 4), loss, data={"collate_fn": graph})
    assert "or in a function data.device_transform, which gets each batch" in e.value.hint

    def converted(batch: Graph) -> Graph:
        return Graph(batch.x.bfloat16(), batch.ids)

    trained_one_step(
        nn.Linear(4, 1), torch.randn(8, 4), loss, data={"collate_fn": graph, "device_transform": converted}
    )


def test_precision_bf16_true_checks_whole_numbers_inside_containers_with_a_method_to(said: list[str]) -> None:
    Precision("bf16-true", CPU).check_batch(TensorEncoding(x=torch.arange(1000.0)))
    assert sum("rounds whole numbers" in line for line in said) == 1


# --- Dtypes of weights ------------------------------------------------------------------------------------------------


DTYPES = [
    dtype
    for dtype in {each for each in vars(torch).values() if isinstance(each, torch.dtype)}
    if (dtype.is_floating_point and dtype.itemsize > 1) or dtype in (torch.complex64, torch.complex128)
]
IMAGINARY = "would discard the imaginary part of complex weights: 0.weight"
REFUSED = {
    ("fp16", torch.float16): "torch cannot do in float16, the dtype of 0.weight",
    ("fp16", torch.complex64): "torch cannot do in complex64, the dtype of 0.weight",
    ("fp16", torch.complex128): "torch cannot do in complex128, the dtype of 0.weight",
    ("bf16-true", torch.complex64): IMAGINARY,
    ("bf16-true", torch.complex128): IMAGINARY,
}


class Weighted(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((2, 1), 0.5, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.real if self.weight.is_complex() else self.weight
        return (x.float() @ weight.float()).to(x.dtype)


@pytest.mark.parametrize("dtype", sorted(DTYPES, key=str), ids=str)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16", "bf16-true"])
@pytest.mark.parametrize("frozen", [False, True])
def test_weights_of_each_dtype_train_or_are_refused_when_the_trainer_is_created(
    frozen: bool, precision: str, dtype: torch.dtype
) -> None:
    """Frozen weights may have any dtype, unless bf16-true would have to convert them."""
    torch.manual_seed(0)
    model = nn.Sequential(Weighted(dtype).requires_grad_(not frozen), nn.Linear(1, 1))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    config = TrainerConfig(precision=precision, global_batch_size=4, max_steps=2)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return model(batch[0]).float().square().mean()

    def make() -> Trainer:
        return Trainer(model, torch.optim.SGD(trained, lr=0.2), loss, config)

    message = REFUSED.get((precision, dtype))
    if message and (not frozen or precision == "bf16-true"):
        with pytest.raises(ConfigError, match=message):
            make()
    else:
        trainer, before = make(), [parameter.detach().clone() for parameter in trained]
        trainer.fit(TensorDataset(torch.ones(8, 2)))
        assert not all(torch.equal(one, other) for one, other in zip(before, trained, strict=True))
