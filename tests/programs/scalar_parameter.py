"""Train a model with a scalar, resume it, and move it between ddp and zero1. Arguments: names of optimizers."""

import json
import sys

import torch
from say import say
from torch import nn

from ddp_kit import Trainer, TrainerConfig


class ScaledLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.scale = nn.Linear(4, 3), nn.Parameter(torch.tensor(2.6))

    def forward(self, x):
        return self.up(x) * self.scale.exp()


def trainer_with_scalar(parallel, folder, steps=6):
    torch.manual_seed(0)

    def optimizer(parameters):
        return getattr(torch.optim, name)(parameters, lr=0.01)

    config = TrainerConfig(
        max_steps=steps,
        global_batch_size=8,
        max_grad_norm=0.5,
        log_every_steps=1,
        parallel=parallel,
        checkpoint={"dir": f"{name}/{folder}", "every_steps": 3},
    )
    return Trainer(ScaledLayer().double(), optimizer, lambda model, x: model(x).square().mean(), config)


data = torch.randn(32, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
for name in sys.argv[1:]:
    norms = {
        parallel: [row.grad_norm for row in trainer_with_scalar(parallel, parallel).fit(data).history]
        for parallel in ("ddp", "zero1")
    }
    trainer_with_scalar("zero1", "resumed", steps=3).fit(data)
    trainer_with_scalar("zero1", "resumed").fit(data)
    for before, after in (("ddp", "zero1"), ("zero1", "ddp")):
        moved = trainer_with_scalar(after, f"{before}-{after}")
        moved.resume(f"{name}/{before}/step-00000003")
        moved.save()
        moved.fit(data)
    if moved.world.is_main:
        say("norms", json.dumps(norms))
