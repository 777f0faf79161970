"""The range test finds a rate that works, and leaves everything as it was."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR

from ddp_kit import ConfigError, Trainer, TrainerConfig
from tests.support.toys import adam, regression_data, sgd, small_network, trainer_for

DATA = regression_data(256, 4)


def noisy_network() -> nn.Module:
    return small_network(4, 8, nn.BatchNorm1d(8), nn.Dropout(0.1))


noisy_trainer = partial(
    trainer_for, model=noisy_network, optimizer=sgd(0.01), global_batch_size=16, epochs=3, log_every_steps=1
)


def test_find_learning_rate_suggests_a_rate_where_the_loss_falls() -> None:
    found = noisy_trainer().find_learning_rate(DATA)
    assert found.suggestion is not None
    assert 1e-4 < found.suggestion < 1
    assert len(found.rates) == len(found.losses) <= 100
    assert found.rates[0] == pytest.approx(1e-7)
    assert list(found.rates) == sorted(found.rates)


def test_find_learning_rate_ends_where_the_loss_diverges() -> None:
    found = noisy_trainer().find_learning_rate(DATA, end=1e6)
    assert found.rates[-1] < 1e5


@pytest.mark.parametrize("optimizer", [sgd(0.01), adam(0.01)], ids=["SGD", "Adam"])
def test_find_learning_rate_does_not_change_later_training(optimizer: Any) -> None:
    def schedule(optimizer: torch.optim.Optimizer) -> OneCycleLR:
        return OneCycleLR(optimizer, max_lr=0.05, total_steps=60)

    plain, tried = noisy_trainer(optimizer=optimizer, scheduler=schedule), None
    result = plain.fit(DATA)
    tried = noisy_trainer(optimizer=optimizer, scheduler=schedule)
    tried.find_learning_rate(DATA, steps=30)
    again = tried.fit(DATA)
    assert [row.loss for row in again.history] == [row.loss for row in result.history]
    for ours, theirs in zip(tried.model.state_dict().values(), plain.model.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)


def test_find_learning_rate_continues_past_the_end_of_the_scheduler() -> None:
    trainer = noisy_trainer(scheduler=lambda optimizer: OneCycleLR(optimizer, max_lr=0.05, total_steps=20))
    found = trainer.find_learning_rate(DATA, end=0.01, steps=40)
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
    found = trainer.find_learning_rate(DATA, end=1.0, steps=20)
    assert trainer.batch_plan.micro_batch == 8
    assert len(found.rates) == 20


@pytest.mark.parametrize("given", [{"start": 0.0}, {"start": 2.0, "end": 1.0}, {"steps": 1}])
def test_find_learning_rate_with_an_invalid_range_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="find_learning_rate got"):
        noisy_trainer().find_learning_rate(DATA, **given)
