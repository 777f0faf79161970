"""Run by test_exact.py in 1, 2 and 3 processes: trains small models in float64 and prints what rank 0 ends with."""

import json
import sys
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ddp_kit import DataConfig, Loss, Trainer, TrainerConfig


def network(buffers: bool) -> nn.Module:
    torch.manual_seed(1)
    layers = [nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)]
    model = nn.Sequential(*layers).double()
    if buffers:
        model.register_buffer("counter", torch.zeros(1))
    return model


def mean_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def token_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
    """A weight per sample that differs, down to nothing for whole micro-batches."""
    x, y = batch
    weights = (x[:, 0] * 3).round().clamp(min=0)
    return Loss(((model(x) - y).squeeze(1) ** 2 * weights).sum(), weight=weights.sum())


def run(case: dict[str, Any]) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(case["samples"], 3, generator=generator, dtype=torch.float64)
    data = TensorDataset(x, torch.randn(case["samples"], 1, generator=generator, dtype=torch.float64))
    config = TrainerConfig(
        epochs=2,
        global_batch_size=case["global_batch"],
        accumulation_steps=case["accumulation"],
        max_grad_norm=case["clip"],
        log_every=2,
        data=DataConfig(num_workers=case["workers"]),
    )
    optimizers = {"sgd": lambda p: torch.optim.SGD(p, lr=0.05, momentum=0.9), "adam": lambda p: torch.optim.Adam(p)}
    trainer = Trainer(
        network(case["buffers"]),
        optimizers[case["optimizer"]],
        token_loss if case["weighted"] else mean_loss,
        config,
        metrics={"error": lambda output, batch: (output - batch[1]).abs().mean()},
    )
    result = trainer.fit(data, data)
    return {
        "weights": torch.cat([parameter.flatten() for parameter in trainer.model.parameters()]).tolist(),
        "losses": [row.loss for row in result.history],
        "metrics": [result.metrics[name] for name in sorted(result.metrics)],
        "counts": [result.steps, result.samples],
        "main": trainer.world.is_main,
    }


if __name__ == "__main__":
    results = [run(case) for case in json.loads(sys.argv[1])]
    if results[0]["main"]:
        print(json.dumps(results))
