"""A backward pass in two parts gives the gradients of an undivided one."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ddp_kit.parallel.stages import backward_to_input


class Layer(nn.Module):
    """Nodes with several outputs, and weights in several places."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.both, self.out = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(4, 4)

    def forward(self, x: Tensor, tone: Tensor) -> Tensor:
        one, other = self.both(self.norm(x)).chunk(2, -1)
        y: Tensor = x + self.out(one.sigmoid() * other) * self.out.weight.sum() + tone
        return y


class Stage(nn.Module):
    def __init__(self, run: Callable[..., Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.tone, self.unused = nn.ModuleList([Layer(), Layer()]), nn.Linear(4, 4), nn.Linear(1, 1)
        self.run = run
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        tone = self.tone(torch.ones(4, dtype=x.dtype))
        for layer in (self.layers[0], self.layers[1], self.layers[0]):
            x = self.run(layer, x, tone)
        return x


def plain(layer: nn.Module, x: Tensor, tone: Tensor) -> Tensor:
    y: Tensor = layer(x, tone)
    return y


def checkpointed(layer: nn.Module, x: Tensor, tone: Tensor) -> Tensor:
    y: Tensor = checkpoint(layer, x, tone, use_reentrant=False)
    return y


@pytest.mark.parametrize("run", [plain, checkpointed])
@pytest.mark.parametrize("loss", [True, False])
@pytest.mark.parametrize("trained", [True, False])
def test_both_parts_together_are_the_whole(run: Callable[..., Tensor], loss: bool, trained: bool) -> None:
    stage, x = Stage(run), torch.linspace(-1, 1, 8, dtype=torch.float64).reshape(2, 4).requires_grad_(trained)
    output = stage(x).square().sum() if loss else stage(x)
    gradient = None if loss else torch.cos(output.detach())
    torch.autograd.backward(output, gradient, retain_graph=True)
    leaves = [x, *stage.parameters()]
    expected = [each.grad for each in leaves]
    for each in leaves:
        each.grad = None
    rest = backward_to_input(output, gradient, x)
    assert all(each.grad is None for each in stage.parameters())
    assert (x.grad is not None) == trained
    rest()
    for each, value in zip(leaves, expected, strict=True):
        assert (each.grad is None) == (value is None)
        if value is not None:
            torch.testing.assert_close(each.grad, value, rtol=1e-12, atol=1e-12)


def test_a_stage_that_passes_on_what_it_received() -> None:
    x, gradient = torch.ones(2, requires_grad=True), torch.tensor([2.0, 3.0])
    backward_to_input(x, gradient, x)()
    assert x.grad is not None
    assert torch.equal(x.grad, gradient)


def test_a_loss_that_does_not_depend_on_what_was_received() -> None:
    x, weight = torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)
    backward_to_input(weight.sum(), None, x)()
    assert x.grad is None
    assert weight.grad is not None


def test_gradients_of_broadcast_weights_do_not_share_memory_with_what_the_stage_before_gets() -> None:
    # With one sample, the gradient of `place` is a view of the gradient of `x`.
    place, other = (nn.Parameter(torch.randn(3, 4)) for _ in range(2))
    x = torch.randn(1, 3, 4, requires_grad=True)
    backward_to_weights = backward_to_input((x + place[None] + other[None]).square().sum(), None, x)
    assert x.grad is not None
    expected = x.grad.clone()
    backward_to_weights()
    for weight in (place, other):
        assert weight.grad is not None
        assert torch.equal(weight.grad, expected[0])
        weight.grad += 1  # as the next pass does
        assert torch.equal(x.grad, expected)
    assert torch.equal(other.grad, expected[0] + 1)
