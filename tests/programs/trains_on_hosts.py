"""Train, note each step of each rank in a file, and pause after step 5 until the file "continue" exists."""

import os
import time
from pathlib import Path

import torch
from torch import nn

from ddp_kit import Callback, Trainer, TrainerConfig


class Notes(Callback):
    def on_step(self, trainer):
        world = trainer.world
        rows.write(f"{os.environ['TORCHELASTIC_RESTART_COUNT']} {world.world_size} {trainer.step} {world.rank}\n")
        while trainer.step == 5 and not Path("continue").exists():
            time.sleep(0.05)


torch.manual_seed(0)  # all ranks build the same dataset
model = nn.Linear(1000, 250)  # a megabyte of gradients
config = TrainerConfig(max_steps=8, global_batch_size=8)
optimizer = torch.optim.SGD(model.parameters())
trainer = Trainer(model, optimizer, lambda model, x: model(x).square().mean(), config, callbacks=[Notes()])
with Path(f"{os.uname().nodename}-{os.environ['LOCAL_RANK']}.rows").open("a", buffering=1) as rows:
    trainer.fit(list(torch.randn(64, 1000)))
