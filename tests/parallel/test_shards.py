"""Which optimizers can be given shards."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from ddp_kit import ConfigError
from ddp_kit.parallel.shards import check_elementwise


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.randn(3, 2)), nn.Parameter(torch.randn(4))]


@pytest.mark.parametrize(
    "make",
    [
        lambda parameters: torch.optim.AdamW(parameters, lr=1e-3, amsgrad=True),
        lambda parameters: torch.optim.Adam([{"params": parameters, "weight_decay": 0.1}], fused=True),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True),
        lambda parameters: torch.optim.RMSprop(parameters),
        lambda parameters: torch.optim.Adagrad(parameters),
    ],
)
def test_optimizers_that_update_each_value_by_itself_can_be_sharded(make: Callable[[Any], Any]) -> None:
    optimizer, before = make(parameters()), torch.get_rng_state()
    check_elementwise(optimizer)
    assert torch.equal(torch.get_rng_state(), before)


class NormedByTensor(torch.optim.SGD):
    """Divides each gradient by the norm of its tensor, as LAMB and LARS do."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for each in group["params"]:
                each.grad /= each.grad.norm()
        super().step(closure)


def test_an_optimizer_that_looks_at_the_whole_tensor_is_refused() -> None:
    with pytest.raises(ConfigError, match="NormedByTensor cannot be sharded: its update of a value depends on"):
        check_elementwise(NormedByTensor(parameters(), lr=0.1))
    with pytest.raises(ConfigError, match="Adafactor cannot be sharded"):
        check_elementwise(torch.optim.Adafactor(parameters()))
