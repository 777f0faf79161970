"""Which code may get at a tensor's memory unseen: as far as a reader of names can tell."""

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddp_kit.trainer.steady import SteadyState, reaches_memory

elsewhere = ModuleType("elsewhere")
exec("def clip(model): model.weight.data.clamp_(-1, 1)", vars(elsewhere))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.inner = nn.Linear(4, 4)
        self.weight.data.fill_(2.0)  # no pass runs this

    def forward(self, x: Tensor) -> Tensor:
        return self.project(self.inner(x)) * self.scale

    def project(self, x: Tensor) -> Tensor:
        return x

    @property
    def scale(self) -> Tensor:
        return self.weight

    def clip(self) -> None:
        self.weight.data.clamp_(-1, 1)


class InForward(Net):
    def forward(self, x: Tensor) -> Tensor:
        self.weight.data.clamp_(-1, 1)
        return super().forward(x)


class InMethod(Net):
    def project(self, x: Tensor) -> Tensor:
        self.weight.numpy()[:] = 0
        return x


class InProperty(Net):
    @property
    def scale(self) -> Tensor:
        return self.weight.data


def loss(model: Any, batch: Any) -> Any:
    return model(batch).sum()


def clip(model: Any) -> None:
    model.weight.data.clamp_(-1, 1)


def by_a_method(model: Any, batch: Any) -> Any:
    model.clip()
    return loss(model, batch)


def by_a_function(model: Any, batch: Any) -> Any:
    clip(model)
    return loss(model, batch)


def by_a_module(model: Any, batch: Any) -> Any:
    elsewhere.clip(model)
    return loss(model, batch)


def by_a_closure() -> Callable[..., Any]:
    clip_all, again = partial(clip), None

    def inner(model: Any, batch: Any) -> Any:
        clip_all(model)
        return (again or loss)(model, batch)

    return inner


def by_a_lambda(model: Any, batch: Any) -> Any:
    return [loss(each, batch) for each in map(lambda each: each.weight.data or each, [model])]  # noqa: C417


class ByAnObject:
    def __call__(self, model: Any, batch: Any) -> Any:
        return by_a_function(model, batch)

    def method(self, model: Any, batch: Any) -> Any:
        return by_a_function(model, batch)


def with_hook(register: str, of: Callable[[Net], Any] = lambda net: net.inner) -> Net:
    net = Net()
    getattr(of(net), register)(lambda *_: clip(net))
    return net


@pytest.mark.parametrize(
    "loss_fn",
    [
        by_a_method,
        by_a_function,
        by_a_module,
        by_a_closure(),
        by_a_lambda,
        partial(by_a_function),
        ByAnObject(),
        ByAnObject().method,
    ],
)
def test_a_loss_function_that_writes_to_the_data_is_found(loss_fn: Callable[..., Any]) -> None:
    assert reaches_memory(Net(), loss_fn)


@pytest.mark.parametrize(
    "model",
    [
        InForward(),
        InMethod(),
        InProperty(),
        nn.Sequential(InForward()),
        with_hook("register_forward_hook"),
        with_hook("register_forward_pre_hook"),
        with_hook("register_full_backward_hook"),
        with_hook("register_hook", lambda net: net.weight),
        with_hook("register_post_accumulate_grad_hook", lambda net: net.weight),
    ],
)
def test_so_is_a_model(model: nn.Module) -> None:
    assert reaches_memory(model, loss)
    assert SteadyState(model, torch.optim.SGD(model.parameters()), loss).tensors() == []


@pytest.mark.parametrize(
    "model",
    [Net(), nn.TransformerEncoderLayer(8, 2), nn.LSTM(3, 4), nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))],
)
def test_what_only_makes_weights_does_not_count(model: nn.Module) -> None:
    assert not reaches_memory(model, loss)


def test_what_is_trained_and_the_optimizer_s_own_is_steady() -> None:
    model = Net()
    model.inner.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    model.weight.grad = torch.ones(4)
    optimizer.step()
    first, second = SteadyState(model, optimizer, loss).tensors()
    assert first is model.weight
    assert second is optimizer.state[model.weight]["momentum_buffer"]
