"""Trains two steps and prints the bytes that this rank really has: weights, gradients and optimizer state, as JSON."""

import json
import os
import sys
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ddp_kit import Callback, Gradients, Trainer, TrainerConfig
from ddp_kit.memory import choose


class PlannedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(7, 26), nn.Tanh(), nn.Linear(26, 7))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.layers(x)
        return found


def partly_frozen_network() -> nn.Module:
    """No dimension divides by 3 or 4, and 26 alone by 2; a part is frozen."""
    model = nn.Sequential(nn.Linear(5, 7), *(PlannedBlock() for _ in range(9)), nn.Linear(7, 1))
    model[0].requires_grad_(requires_grad=False)
    return model


def squared_error(model: nn.Module, batch: Any) -> Tensor:
    return (model(batch[0]) - batch[1]).square().mean()


class GradientBytes(Callback):
    found = 0

    def on_gradients(self, trainer: Trainer, gradients: Gradients) -> None:
        tensors: Any = gradients.values()
        if not trainer._run.strategy.replaces_parameters:  # DDP reduces whole gradients
            tensors = [each.grad for each in trainer.model.parameters() if each.grad is not None]
        self.found = held(tensors)


def trainer_and_data(parallel: str, *callbacks: Callback) -> tuple[Trainer, TensorDataset]:
    torch.manual_seed(0)
    config = TrainerConfig(max_steps=2, global_batch_size=12, parallel=json.loads(parallel))
    trained = lambda parameters: torch.optim.AdamW([each for each in parameters if each.requires_grad])  # noqa: E731
    trainer = Trainer(partly_frozen_network(), trained, squared_error, config, callbacks=callbacks)
    return trainer, TensorDataset(torch.randn(24, 5), torch.randn(24, 1))


def held(tensors: Any) -> int:
    return sum(each.numel() * each.element_size() for each in tensors)


if __name__ == "__main__":
    if len(sys.argv) > 2:  # bytes of each rank's memory, for "auto"
        choose.device_memory = lambda _device: int(sys.argv[2])  # type: ignore[assignment]
    gradients = GradientBytes()
    trainer, data = trainer_and_data(sys.argv[1], gradients)
    strategy = trainer._run.strategy
    trainer.fit(data)
    local = strategy.local_parameters()
    if strategy.config.pipeline > 1:
        local = [strategy._optimizer_parameter(each) for each in trainer.model.parameters()]
    # ZeRO-1 pads its flat weights: what holds them counts, not the views. A pipeline frees what other stages hold.
    storages = [each.untyped_storage() for each in local if each.untyped_storage().nbytes() >= each.nbytes]
    weights = {storage.data_ptr(): storage.nbytes() for storage in storages}
    state = [leaf for each in trainer.optimizer.state.values() for leaf in each.values()]
    found = {"weights": sum(weights.values()), "gradients": gradients.found, "optimizer_state": held(state)}
    os.write(1, f"{json.dumps(found)}\n".encode())
