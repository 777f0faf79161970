"""Networks, optimizers, losses and callbacks of several programs, which import it as their neighbour `toys`."""

import hashlib
import os
import random
import signal
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from ddp_kit import Callback
from ddp_kit.state_values import Piece


class ResidualBlock(nn.Module):
    """x + down(activation(up(norm(x))))."""

    def __init__(
        self,
        width: int,
        inner: int,
        norm: Callable[[int], nn.Module] = nn.Identity,
        activation: Callable[[Tensor], Tensor] = torch.tanh,
    ) -> None:
        super().__init__()
        self.norm, self.up, self.down = norm(width), nn.Linear(width, inner), nn.Linear(inner, width)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.down(self.activation(self.up(self.norm(x))))
        return out


def small_network(dtype: torch.dtype = torch.float64) -> nn.Module:
    """From 3 values to 1, with the same weights in each call."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).to(dtype)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def momentum_sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9)


def mean_squared_error(model: nn.Module, batch: Any) -> Tensor:
    """Of the outputs for batch[0] and the targets batch[1]."""
    return F.mse_loss(model(batch[0]), batch[1])


def flat(tensors: Iterable[Tensor]) -> Tensor:
    """The values of all tensors in one."""
    return torch.cat([each.detach().flatten() for each in tensors])


def digest_of(tensors: Iterable[Any]) -> str:
    """A hash of the values of tensors and pieces."""
    values = [(each.tensor if isinstance(each, Piece) else each).cpu().double() for each in tensors]
    return hashlib.sha256(flat(values).numpy()).hexdigest()


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Four values and their sum, augmented at random by both generators."""

    def __init__(self, samples: int) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(4, generator=torch.Generator().manual_seed(index))
        return x + 0.1 * torch.randn(4) + random.random(), x.sum(0, keepdim=True)


class KillsLastRank(Callback):
    """Kills the last rank with SIGKILL after a step; 0: never."""

    def __init__(self, after: int) -> None:
        self.after = after

    def on_step(self, trainer: Any) -> None:
        if trainer.step == self.after and trainer.world.rank == trainer.world.world_size - 1:
            os.kill(os.getpid(), signal.SIGKILL)
