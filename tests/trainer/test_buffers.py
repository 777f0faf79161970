"""A pass with zero weight leaves the model's buffers as they were, and in place."""

import pytest
import torch
from torch import Tensor, nn

from ddp_kit.trainer.snapshots import buffers_exchanged


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("cos", torch.full((3,), 2.0))
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("same", self.mean)
        self.register_buffer("wide", torch.ones(1, 3).expand(10_000, 3))
        self.register_buffer("replaced", torch.zeros(1))
        self.register_buffer("none", None)

    def forward(self, x: Tensor) -> Tensor:
        self.mean.lerp_(x.detach().mean(0), 0.5)
        assert self.same is self.mean
        assert self.wide.untyped_storage().nbytes() < 1_000
        self.replaced = self.replaced + 1
        loss: Tensor = (self.norm(x * self.weight * self.cos) * self.mean * self.wide[: len(x)]).square().sum()
        return loss


def test_buffers_exchanged_keeps_buffers_and_serves_the_backward_pass() -> None:
    model, x = Buffered(), torch.randn(4, 3)
    before = {name: (each, each.clone()) for name, each in model.named_buffers(remove_duplicate=False)}
    with buffers_exchanged(model):
        loss = model(x)
    for name, each in model.named_buffers(remove_duplicate=False):
        assert each is before[name][0]
        assert torch.equal(each, before[name][1])
    loss.backward()
    expected = Buffered()
    expected(x).backward()
    assert torch.equal(model.weight.grad, expected.weight.grad)  # type: ignore[arg-type]


def test_buffers_exchanged_restores_buffers_after_an_error() -> None:
    model = Buffered()
    cos = model.cos
    with pytest.raises(RuntimeError, match="size"), buffers_exchanged(model):
        model(torch.randn(4, 7))
    assert model.cos is cos
