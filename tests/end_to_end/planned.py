"""Trains two steps and prints the bytes that this rank really has: weights, gradients and optimizer state, as JSON."""

import json
import os
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ddp_kit import Trainer, TrainerConfig


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 7))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.layers(x)
        return found


def network() -> nn.Module:
    """No dimension divides by 2 or 3; a part is frozen."""
    model = nn.Sequential(nn.Linear(5, 7), Block(), Block(), Block(), nn.Linear(7, 1))
    model[0].requires_grad_(requires_grad=False)
    return model


def squares(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


def made(strategy: str) -> tuple[Trainer, TensorDataset]:
    torch.manual_seed(0)
    config = TrainerConfig(max_steps=2, global_batch_size=12, parallel=strategy)
    trained = lambda parameters: torch.optim.AdamW([each for each in parameters if each.requires_grad])  # noqa: E731
    return Trainer(network(), trained, squares, config), TensorDataset(torch.randn(24, 5), torch.randn(24, 1))


def held(tensors: Any) -> int:
    return sum(each.numel() * each.element_size() for each in tensors)


if __name__ == "__main__":
    trainer, data = made(sys.argv[1])
    gradients = [0]

    def note(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        found = [each.grad for group in optimizer.param_groups for each in group["params"] if each.grad is not None]
        if sys.argv[1] != "fsdp":  # the optimizer has shards, and DDP reduces whole gradients
            found = [each.grad for each in trainer.model.parameters() if each.grad is not None]
        gradients[0] = held(found)

    trainer.optimizer.register_step_pre_hook(note)
    trainer.fit(data)
    strategy = trainer._parts.strategy
    # ZeRO-1 pads its flat weights: what holds them counts, not the views.
    weights = {
        each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in strategy.local_parameters()
    }
    state = [leaf for each in trainer.optimizer.state.values() for leaf in each.values()]
    found = {"weights": sum(weights.values()), "gradients": gradients[0], "optimizer_state": held(state)}
    os.write(1, f"{json.dumps(found)}\n".encode())
