"""Your own training loop with `Trainer.steps`. This one stops when the loss no longer falls.

ddpkit launch --nproc-per-node 2 examples/imperative.py
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ddp_kit import Trainer, TrainerConfig


def make_data(samples: int = 2000) -> TensorDataset:
    """Points on a noisy sine curve."""
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(samples, 1, generator=generator) * 6 - 3
    return TensorDataset(x, torch.sin(x) + 0.1 * torch.randn(samples, 1, generator=generator))


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    return F.mse_loss(model(x), y)


def main() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(1, 64), nn.Tanh(), nn.Linear(64, 1))
    data = make_data()
    config = TrainerConfig(global_batch_size=100, epochs=100, log_every_steps=20)
    trainer = Trainer(model, lambda parameters: torch.optim.Adam(parameters, lr=0.01), loss_fn, config)

    before = float("inf")
    for step in trainer.steps(data):
        if step.log is None:
            continue
        if trainer.world.is_main:
            print(f"step {step.number}: loss {step.log.loss:.4f}")
        if step.log.loss > 0.95 * before and step.log.loss < 0.02:
            break  # a log row is the same on all ranks, so all of them stop here
        before = step.log.loss
    metrics = trainer.evaluate(data)
    if trainer.world.is_main:
        print(f"stopped after {trainer.step} steps with loss {metrics['loss']:.4f}; the variance of the noise is 0.01")


if __name__ == "__main__":
    main()
