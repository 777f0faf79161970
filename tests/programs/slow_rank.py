"""Train with a slow rank 1 until a file exists. Argument: the file."""

import sys
import time
from pathlib import Path

import torch
from torch.utils.data import TensorDataset

from ddp_kit import Trainer, TrainerConfig


def loss_fn(model, batch):
    time.sleep(0.02 * trainer.world.rank)  # rank 1 is slow
    return model(batch[0]).square().mean()


model = torch.nn.Linear(3, 1)
config = TrainerConfig(global_batch_size=4, log_every_steps=5, max_steps=10**6, checkpoint={"dir": "run"})
trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.01), loss_fn, config)
for step in trainer.steps(TensorDataset(torch.ones(64, 3))):
    if step.number % 5 == 0:
        ends = torch.tensor(int(Path(sys.argv[1]).exists()))
        torch.distributed.broadcast(ends, 0)  # all ranks stop at the same step
        if ends:
            trainer.stop()
