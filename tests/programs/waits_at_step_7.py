"""Train, and wait after step 7 until the file "go" exists."""

import time
from pathlib import Path

import torch
from torch import nn

from ddp_kit import Trainer, TrainerConfig

model = nn.Linear(2, 1)
config = TrainerConfig(max_steps=20, global_batch_size=4, log_every_steps=5, checkpoint={"dir": "run"})
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
trainer = Trainer(model, optimizer, lambda m, batch: m(batch).square().mean(), config)
for step in trainer.steps(torch.ones(80, 2)):
    if step.number == 7:
        Path("at-7").touch()
        while not Path("go").exists():
            time.sleep(0.05)
