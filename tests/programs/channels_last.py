"""Train a channels-last model with Adagrad under three strategies, and print the losses."""

import json

import torch
from say import say
from torch import nn

from ddp_kit import Trainer, TrainerConfig

found = {}
for parallel in ("ddp", "zero1", "fsdp"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 4, 2), nn.Flatten(), nn.Linear(4, 3)).double()
    model = model.to(memory_format=torch.channels_last)

    def adagrad(parameters):
        return torch.optim.Adagrad(parameters, lr=0.1, initial_accumulator_value=0.1)

    def loss(model, x):
        return model(x).square().mean()

    config = TrainerConfig(max_steps=5, global_batch_size=4, log_every_steps=1, parallel=parallel)
    trainer = Trainer(model, adagrad, loss, config)
    found[parallel] = [row.loss for row in trainer.fit(torch.randn(16, 2, 2, 2, dtype=torch.float64)).history]
if trainer.world.is_main:
    say("found", json.dumps(found))
