"""Train, and kill rank 1 after step 7."""

import os
import signal

import torch
from torch import nn

from ddp_kit import Trainer, TrainerConfig

model = nn.Linear(2, 1)
config = TrainerConfig(global_batch_size=4, epochs=100)
trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, batch: m(batch).square().mean(), config)
for step in trainer.steps(torch.ones(80, 2)):
    if step.number == 7 and trainer.world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
