"""A small real run to be watched."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ddp_kit import Callback, Trainer, TrainerConfig

Build = Callable[..., Trainer]


def _data(samples: int, seed: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 3, generator=generator, dtype=torch.float64)
    return TensorDataset(x, x.sum(dim=1, keepdim=True))


def _loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


@pytest.fixture
def train_data() -> TensorDataset:
    """16 samples: 4 steps per epoch with a global batch of 4."""
    return _data(16, seed=0)


@pytest.fixture
def eval_data() -> TensorDataset:
    return _data(8, seed=1)


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1)).double()


@pytest.fixture
def build(model: nn.Module) -> Build:
    """A Trainer with these callbacks: 2 epochs of 4 steps, a log point every 2 steps."""

    def make(*callbacks: Callback, network: nn.Module = model, loss: Any = _loss, **settings: Any) -> Trainer:
        config = TrainerConfig(**{"epochs": 2, "global_batch_size": 4, "log_every_steps": 2, **settings})
        return Trainer(
            network,
            lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
            loss,
            config,
            metrics={"absolute": lambda output, batch: (output - batch[1]).abs().mean()},
            callbacks=callbacks,
        )

    return make
