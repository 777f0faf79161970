"""Train with a loss that first calls the model without gradients, under ddp and fsdp. Argument: the precision."""

import sys

import torch
from say import say
from torch import nn

from ddp_kit import Trainer, TrainerConfig


def loss_fn(model, x):
    with torch.no_grad():
        target = model(x)
    return (model(x) - target + 1).square().mean()


for parallel in ("ddp", "fsdp"):
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4)) for _ in range(2)]
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(*blocks), nn.Linear(4, 1))
    config = TrainerConfig(global_batch_size=8, max_steps=3, parallel=parallel, precision=sys.argv[1])
    trainer = Trainer(model, lambda parameters: torch.optim.SGD(parameters, lr=0.5), loss_fn, config)
    trainer.fit(torch.ones(24, 4))
    output = trainer.predict(torch.ones(8, 4))
    if trainer.world.is_main:
        say(output.float().mean().item())
