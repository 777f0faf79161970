"""Means kept as (sum, weight), and what a user's function may return."""

import math
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ddp_kit.errors import LossError
from ddp_kit.metrics import Loss, Mean, MetricObject, checked, reduced
from ddp_kit.trainer.context import LoggedValues

CPU = torch.device("cpu")


def test_mean_weights_every_batch_by_its_samples() -> None:
    mean = Mean(CPU)
    mean.add(torch.tensor(1.0), samples=3)
    mean.add(torch.tensor(5.0), samples=1)
    assert reduced([mean]) == [2.0]


def test_mean_weights_a_loss_by_its_own_weight() -> None:
    mean = Mean(CPU)
    mean.add(Loss(torch.tensor(6.0), weight=2), samples=1)
    mean.add(Loss(torch.tensor([4.0]), weight=torch.tensor([3])), samples=1)
    assert reduced([mean]) == [2.0]


def test_mean_of_numbers_makes_no_tensor_of_each() -> None:
    class Calls(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.count += 1
            return func(*args, **(kwargs or {}))

    logged = LoggedValues(CPU)
    logged.add({"mixed": torch.tensor(6.0)})
    with Calls() as calls:
        for number in range(4):
            logged.add({"number": number, "mixed": 1.0})
    assert calls.count == 1, "the sum of tensors of a new name"
    means = logged.take()
    assert reduced([means["number"], means["mixed"]]) == [1.5, 2.0]


def test_mean_over_nothing_is_nan() -> None:
    assert math.isnan(reduced([Mean(CPU)])[0])


def test_mean_does_not_lose_small_values() -> None:
    mean = Mean(CPU)
    mean.add(torch.tensor(2.0**30), samples=1)
    for _ in range(64):
        mean.add(torch.tensor(1.0), samples=1)
    assert reduced([mean]) == [(2.0**30 + 64) / 65]


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (None, "returned None"),
        (3.5, "returned a float"),
        ((torch.tensor(1.0), 2), "returned a tuple"),
        (torch.ones(4), "a tensor of shape (4,), not a scalar"),
        (Loss(torch.ones(2, 3), weight=6), "a tensor of shape (2, 3), not a scalar"),
        (Loss(torch.tensor(1.0), weight=torch.ones(2)), "a Loss whose weight is a tensor of shape (2,)"),
        (Loss(torch.tensor(1.0), weight="many"), "a Loss whose weight is a str"),
    ],
)
def test_checked_refuses_invalid_losses_with_their_shape_or_type(value: object, said: str) -> None:
    with pytest.raises(LossError) as caught:
        checked(value, "the loss function")
    assert said in caught.value.message
    assert caught.value.hint


class Computes:
    """A metric object with this value."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def reset(self) -> None:
        pass

    def update(self, *given: Any) -> None:
        pass

    def compute(self) -> Any:
        return self.value


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (0.5, {"m": 0.5}),
        (torch.tensor([3]), {"m": 3.0}),
        (torch.tensor([1.0, 2.0]), {"m.0": 1.0, "m.1": 2.0}),
        ({"a": torch.tensor([1.0, 2.0]), "b": True}, {"m.a.0": 1.0, "m.a.1": 2.0, "m.b": 1.0}),
        ((torch.tensor([1.0, 2.0]), [torch.tensor(3.0)]), {"m.0.0": 1.0, "m.0.1": 2.0, "m.1.0": 3.0}),
    ],
)
def test_metric_object_values_of_any_nesting_are_named(value: Any, named: dict[str, float]) -> None:
    metric = MetricObject("m", Computes(value), None)
    metric.start(CPU)
    assert metric.values() == named


def test_metric_object_value_that_is_not_a_number_raises_error() -> None:
    metric = MetricObject("m", Computes({"a": "text"}), None)
    metric.start(CPU)
    with pytest.raises(LossError, match=r"of metric 'm.a' returned a str, which is not supported"):
        metric.values()
