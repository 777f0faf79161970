"""What a strategy inherits, and which one a configuration gets."""

import pytest
import torch
from torch import nn

from ddp_kit import ConfigError
from ddp_kit.config.settings import STRATEGIES, ParallelConfig
from ddp_kit.parallel import Options, SingleRank, strategy_for
from ddp_kit.parallel.ddp import DdpStrategy
from tests.support.toys import world_of_cpus


def set_up_strategy(model: nn.Module, options: Options = Options()) -> SingleRank:  # noqa: B008
    strategy = SingleRank(world_of_cpus(), ParallelConfig(), options)
    strategy.check(model)
    strategy.setup(model)
    return strategy


def test_strategy_for_every_name_of_the_configuration_exists() -> None:
    found = strategy_for(ParallelConfig(), world_of_cpus(1, 2))
    assert type(found) is DdpStrategy
    assert (found.data_rank, found.data_ranks, list(map(list, found.replicas))) == (1, 2, [[0, 1]])
    for name in STRATEGIES:
        assert strategy_for(ParallelConfig(strategy=name), world_of_cpus(1, 2)).data_ranks == 2


def test_strategy_for_one_rank_is_single_rank() -> None:
    assert type(strategy_for(ParallelConfig(), world_of_cpus())) is SingleRank


def test_strategy_without_reduction_adds_up_the_gradients_of_passes() -> None:
    model = nn.Linear(2, 1)
    strategy = set_up_strategy(model)
    strategy.begin_step()
    for number in (1, 2, 3):
        with strategy.accumulating(last=number == 3):
            strategy.backward(strategy.call(lambda model, factor: model.weight.square().sum() * factor, number))
    strategy.finish_reduction()
    assert model.weight.grad is not None
    torch.testing.assert_close(model.weight.grad, 2 * (1 + 2 + 3) * model.weight.detach())


def test_strategy_measures_the_norm_of_updated_parameters() -> None:
    model = nn.Linear(2, 1, bias=False)
    strategy = set_up_strategy(model)
    model.weight.grad = torch.tensor([[3.0, 4.0]])
    assert strategy.grad_norm().item() == pytest.approx(5.0)
    assert strategy.grad_norms().tolist() == pytest.approx([5.0])


def test_strategy_refuses_a_model_without_trainable_parameters() -> None:
    with pytest.raises(ConfigError, match="no parameter that requires grad"):
        set_up_strategy(nn.Linear(2, 1).requires_grad_(False))


def test_auto_micro_batch_size_with_sync_batch_norm_is_refused() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2))
    set_up_strategy(model)
    with pytest.raises(ConfigError, match="SyncBatchNorm"):
        set_up_strategy(model, Options(recoverable=True))
