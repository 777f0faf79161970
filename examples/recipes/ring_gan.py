"""A GAN that generates points on a ring: two models, each with its own loss and optimizer.

ddpkit launch --nproc-per-node 2 examples/recipes/ring_gan.py
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from ddp_kit import Trainer, TrainerConfig, Update

NOISE = 4
Batch = tuple[Tensor, Tensor]


class Ring(Dataset[Batch]):
    """Points close to the unit circle, each with noise for the generator; the noise is new in each epoch."""

    def __init__(self, samples: int) -> None:
        draw = torch.Generator().manual_seed(0)
        angle = 2 * math.pi * torch.rand(samples, generator=draw)
        self.points = torch.stack([angle.cos(), angle.sin()], 1) + 0.02 * torch.randn(samples, 2, generator=draw)

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> Batch:
        return self.points[index], torch.randn(NOISE)


def network(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 64), nn.SiLU(), nn.Linear(64, 64), nn.SiLU(), nn.Linear(64, outputs))


def build() -> nn.ModuleDict:
    torch.manual_seed(0)
    return nn.ModuleDict({"generator": network(NOISE, 2), "critic": network(2, 1)})


def critic_loss(model: nn.ModuleDict, batch: Batch) -> Tensor:
    real, noise = batch
    fake = model["generator"](noise)  # no detach: this update trains the critic alone
    return (F.softplus(-model["critic"](real)) + F.softplus(model["critic"](fake))).mean()


def generator_loss(model: nn.ModuleDict, batch: Batch) -> Tensor:
    return F.softplus(-model["critic"](model["generator"](batch[1]))).mean()


def main() -> None:
    config = TrainerConfig.from_command_line(
        max_steps=600,
        global_batch_size=64,
        data={"seed_samples": True},  # the noise of a sample is the same at any number of ranks
        log_every_steps=50,
    )
    model = build()
    critic = torch.optim.Adam(model["critic"].parameters(), lr=4e-3, betas=(0.0, 0.9))
    generator = torch.optim.Adam(model["generator"].parameters(), lr=1e-3, betas=(0.0, 0.9))
    updates = [Update("critic", critic_loss, critic), Update("generator", generator_loss, generator)]
    trainer = Trainer(model, updates=updates, config=config)
    trainer.fit(Ring(2048))
    with torch.no_grad():
        noise = torch.randn(1000, NOISE, generator=torch.Generator().manual_seed(1))
        radius = model["generator"](noise.to(trainer.world.device)).norm(dim=1)
    if trainer.world.is_main:
        print(f"mean distance of generated points from the ring: {(radius - 1).abs().mean():.8f}")


if __name__ == "__main__":
    main()
