"""Train 4 steps, and save in each second one. Argument: the checkpoint folder."""

import sys

import torch

from ddp_kit import Trainer, TrainerConfig

Trainer(
    torch.nn.Linear(1, 1),
    lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    lambda model, batch: model(batch).square().mean(),
    TrainerConfig(global_batch_size=4, max_steps=4, checkpoint={"dir": sys.argv[1], "every_steps": 2}),
).fit([torch.ones(1)] * 16)
