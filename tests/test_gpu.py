"""What only a GPU can show."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ddp_kit import DataConfig, Loss, Trainer, TrainerConfig
from ddp_kit.loader import on_device

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU; there is none on this machine")


def data(samples: int = 4096) -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, 16, generator=generator)
    return TensorDataset(x, x.sum(dim=1, keepdim=True))


def mean_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def weighted_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
    return Loss(F.mse_loss(model(batch[0]), batch[1], reduction="sum"), weight=(batch[1] > -9).sum())


def trainer_for(loss: Any = mean_loss, **settings: Any) -> Trainer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 1))
    config = TrainerConfig(global_batch_size=64, **settings)
    return Trainer(model, lambda parameters: torch.optim.SGD(parameters, lr=0.05), loss, config)


def test_batches_copied_ahead_arrive_whole() -> None:
    device = torch.device("cuda", 0)
    batches = [torch.full((1 << 20,), float(number)).pin_memory() for number in range(20)]
    for number, batch in enumerate(on_device(batches, device, None, ahead=3)):
        assert batch.device == device
        assert bool((batch == number).all())


@pytest.mark.parametrize("loss", [mean_loss, weighted_loss])
def test_the_host_does_not_wait_for_the_device_between_log_points(loss: Any) -> None:
    trainer = trainer_for(loss, accumulation_steps=2, max_grad_norm=1.0, log_every=50, precision="bf16")
    steps = trainer.steps(data())
    for _ in range(3):  # the first steps allocate
        next(steps)
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            next(steps)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("precision", ["fp32", "tf32", "bf16", "fp16", "bf16-true"])
def test_every_precision_learns(precision: str) -> None:
    trainer = trainer_for(precision=precision, epochs=4, data=DataConfig(prefetch_batches=2))
    result = trainer.fit(data())
    assert result.history[-1].loss < result.history[0].loss / 4


def test_copying_ahead_changes_nothing() -> None:
    losses = [trainer_for(data=DataConfig(prefetch_batches=ahead)).fit(data()).loss for ahead in (0, 1, 5)]
    assert losses[0] == losses[1] == losses[2]


def test_nor_at_log_points_and_no_row_is_lost() -> None:
    trainer = trainer_for(log_every=5, max_steps=40)
    seen = []
    steps = trainer.steps(data())
    for _ in range(6):
        seen.append(next(steps))
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(30):  # the last one is no log point: the end of a run waits
            seen.append(next(steps))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    seen.extend(steps)
    assert [step.log.step for step in seen if step.log is not None] == [5, 10, 15, 20, 25, 30, 40]
    assert trainer_for(log_every=5, max_steps=40).fit(data()).history[-2].step == 35


def test_the_phases_are_measured_on_the_device() -> None:
    times = trainer_for(log_every=10, epochs=2).fit(data()).history[-1].times
    assert times.forward > 0
    assert times.backward > 0
    assert times.optimizer > 0
