"""The precisions, on the device at hand; fp8 is in test_float8.py."""

import pytest
import torch
from reads import Reads
from torch import nn

from ddp_kit.errors import ConfigError
from ddp_kit.parallel.strategy import scale_gradients
from ddp_kit.precision import Precision

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
def test_each_precision_computes_in_its_type(name: str, product: torch.dtype, weights: torch.dtype) -> None:
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
def test_a_weight_that_was_used_without_gradients_first_is_trained(gathered: bool) -> None:
    model, x = nn.Linear(4, 1), torch.ones(2, 4)
    with Precision("bf16", CPU, gathered=gathered).forward():
        with torch.no_grad():
            model(x)
        model(x).sum().backward()
    assert model.weight.grad is not None


def test_tf32_on_the_cpu_is_refused_with_what_to_use() -> None:
    with pytest.raises(ConfigError, match="precision='tf32' is not available on the CPU") as caught:
        Precision("tf32", CPU)
    assert "fp32" in caught.value.hint


def test_fp16_scales_the_loss_and_gives_true_gradients() -> None:
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
    assert precision.apply(optimizer)
    assert weight.item() == 0.5


def test_an_fp16_overflow_leaves_the_step_out() -> None:
    weight = nn.Parameter(torch.tensor([2.0]))
    optimizer = torch.optim.SGD([weight], lr=0.5)
    precision = Precision("fp16", CPU)
    precision.scaled((weight * float("inf")).sum()).backward()
    precision.unscale(optimizer)
    assert not precision.apply(optimizer)
    assert weight.item() == 2.0


def test_the_factor_of_low_precision_gradients_is_not_rounded_itself() -> None:
    parameter = nn.Parameter(torch.ones(1, dtype=torch.bfloat16))
    parameter.grad = torch.full_like(parameter, 384.0)
    scale_gradients([parameter], torch.tensor(1.003, dtype=torch.float64))  # 1.0 in bfloat16
    assert parameter.grad.item() == torch.tensor(384.0 * 1.003).bfloat16().item() != 384.0


def test_gradients_of_all_types_are_scaled_by_a_tensor() -> None:
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
        told.append(precision.apply(optimizer, wait=wait))
    return precision, weight, told


def test_fp16_does_not_read_whether_a_step_counts_unless_that_is_asked_for(reads: Reads) -> None:
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
