"""What a strategy inherits, and which one a configuration gets."""

import pytest
import torch
from torch import Tensor, nn

from ddp_kit import ConfigError
from ddp_kit.config.settings import STRATEGIES, ParallelConfig
from ddp_kit.distributed.world import World
from ddp_kit.parallel import SingleRank, strategy_for
from ddp_kit.parallel.ddp import DdpStrategy


def world(rank: int = 0, size: int = 1) -> World:
    return World(rank, size, rank, size, 0, torch.device("cpu"))


class Passes:
    """Squares of the weights, times the number of the pass; says what is called."""

    def __init__(self, model: nn.Linear, count: int) -> None:
        self._model = model
        self.count = count
        self.called: list[str] = []

    def forward(self, number: int) -> Tensor:
        self.called.append(f"forward {number}")
        return self._model.weight.square().sum() * (number + 1)

    def before_reduction(self, loss: Tensor) -> None:
        self.called.append("reduction")

    def after_backward(self) -> None:
        self.called.append("after")


def made(model: nn.Module) -> SingleRank:
    strategy = SingleRank(world(), ParallelConfig())
    strategy.check(model)
    strategy.setup(model)
    return strategy


def test_every_strategy_of_the_configuration_can_be_imported() -> None:
    assert strategy_for(ParallelConfig(), world(), recoverable=True).recoverable
    found = strategy_for(ParallelConfig(), world(1, 2), recoverable=False)
    assert type(found) is DdpStrategy
    assert (found.data_rank, found.data_ranks, list(map(list, found.replicas))) == (1, 2, [[0, 1]])
    for name in STRATEGIES:
        assert strategy_for(ParallelConfig(strategy=name), world(1, 2), recoverable=False).data_ranks == 2


def test_one_rank_needs_no_strategy() -> None:
    assert type(strategy_for(ParallelConfig(), world(), recoverable=False)) is SingleRank


def test_passes_add_up_and_the_last_one_reduces() -> None:
    model = nn.Linear(2, 1)
    strategy, passes = made(model), Passes(model, 3)
    strategy.run_passes(passes)
    assert model.weight.grad is not None
    torch.testing.assert_close(model.weight.grad, 2 * (1 + 2 + 3) * model.weight.detach())
    assert passes.called == [
        *("forward 0", "after"),
        *("forward 1", "after"),
        *("forward 2", "reduction", "after"),
    ]


def test_gradients_are_scaled_measured_and_clipped() -> None:
    model = nn.Linear(2, 1, bias=False)
    strategy = made(model)
    model.weight.grad = torch.tensor([[3.0, 4.0]])
    strategy.scale_gradients(torch.tensor(2.0, dtype=torch.float64))
    norm = strategy.grad_norm()
    assert norm.item() == pytest.approx(10.0)
    strategy.clip_grad_norm(5.0, norm)
    assert model.weight.grad.tolist()[0] == pytest.approx([3.0, 4.0], abs=1e-5)
    strategy.clip_grad_value(3.5)
    assert model.weight.grad.tolist()[0] == pytest.approx([3.0, 3.5], abs=1e-5)


def test_a_model_in_which_nothing_learns_is_refused() -> None:
    with pytest.raises(ConfigError, match="no parameter that requires grad"):
        made(nn.Linear(2, 1).requires_grad_(False))


def test_sync_batch_norm_cannot_be_recovered_from_running_out_of_memory() -> None:
    with pytest.raises(ConfigError, match="SyncBatchNorm"):
        made(nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2))).check_recoverable()
