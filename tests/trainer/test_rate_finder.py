"""The range test finds a rate that works, and leaves everything as it was."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import TensorDataset

from ddp_kit import ConfigError, Trainer, TrainerConfig


def data(samples: int = 256) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, 4, generator=generator)
    return TensorDataset(x, x.sum(dim=1, keepdim=True))


def trainer_for(optimizer: Any = torch.optim.SGD, **options: Any) -> Trainer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 1))

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return F.mse_loss(model(batch[0]), batch[1])

    config = TrainerConfig(global_batch_size=16, epochs=3, log_every_steps=1)
    return Trainer(model, lambda parameters: optimizer(parameters, lr=0.01), loss, config, **options)


def test_find_learning_rate_suggests_a_rate_where_the_loss_falls() -> None:
    found = trainer_for().find_learning_rate(data())
    assert found.suggestion is not None
    assert 1e-4 < found.suggestion < 1
    assert len(found.rates) == len(found.losses) <= 100
    assert found.rates[0] == pytest.approx(1e-7)
    assert list(found.rates) == sorted(found.rates)


def test_find_learning_rate_ends_where_the_loss_diverges() -> None:
    found = trainer_for().find_learning_rate(data(), end=1e6)
    assert found.rates[-1] < 1e5


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam])
def test_find_learning_rate_does_not_change_later_training(optimizer: Any) -> None:
    def schedule(optimizer: torch.optim.Optimizer) -> OneCycleLR:
        return OneCycleLR(optimizer, max_lr=0.05, total_steps=60)

    plain, tried = trainer_for(optimizer, scheduler=schedule), None
    result = plain.fit(data())
    tried = trainer_for(optimizer, scheduler=schedule)
    tried.find_learning_rate(data(), steps=30)
    again = tried.fit(data())
    assert [row.loss for row in again.history] == [row.loss for row in result.history]
    for ours, theirs in zip(tried.model.state_dict().values(), plain.model.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)


def test_find_learning_rate_continues_past_the_end_of_the_scheduler() -> None:
    trainer = trainer_for(scheduler=lambda optimizer: OneCycleLR(optimizer, max_lr=0.05, total_steps=20))
    found = trainer.find_learning_rate(data(), end=0.01, steps=40)
    assert len(found.rates) == 40
    assert trainer.scheduler is not None
    assert trainer.scheduler.last_epoch == 0


def test_find_learning_rate_without_memory_halves_the_micro_batch_and_restarts() -> None:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        if trainer.optimizer.param_groups[0]["lr"] > 0.1 and len(batch[0]) > 8:
            raise torch.OutOfMemoryError("CUDA out of memory (a pretence)")
        return F.mse_loss(model(batch[0]), batch[1])

    torch.manual_seed(0)
    config = TrainerConfig(global_batch_size=16, micro_batch_size="auto")
    trainer = Trainer(nn.Linear(4, 1), lambda parameters: torch.optim.SGD(parameters, lr=0.01), loss, config)
    found = trainer.find_learning_rate(data(), end=1.0, steps=20)
    assert trainer.batch_plan.micro_batch == 8
    assert len(found.rates) == 20


@pytest.mark.parametrize("given", [{"start": 0.0}, {"start": 2.0, "end": 1.0}, {"steps": 1}])
def test_find_learning_rate_with_an_invalid_range_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="find_learning_rate got"):
        trainer_for().find_learning_rate(data(), **given)
