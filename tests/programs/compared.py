"""Trains 40 steps of 8 samples, and saves: compared.py FOLDER [SETTING=VALUE ...].

Settings: seed, decay (the factor of the learning rate after step 20), changed (the index of a sample with other
values), fails_after (the step after which rank 1 fails in the first attempt).
"""

import sys

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset

from ddp_kit import Trainer, TrainerConfig

settings = {"seed": 0.0, "decay": 1.0, "changed": -1.0, "fails_after": -1.0}
settings |= {name: float(value) for name, _, value in (word.partition("=") for word in sys.argv[2:])}

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
x = torch.randn(320, 8)
y = x.sum(dim=1, keepdim=True)
if settings["changed"] >= 0:
    y[int(settings["changed"])] += 1
config = TrainerConfig(
    seed=int(settings["seed"]),
    max_steps=40,
    global_batch_size=8,
    log_every_steps=10,
    checkpoint={"dir": sys.argv[1], "every_steps": 15},
)
trainer = Trainer(
    model,
    optimizer,
    lambda module, batch: F.mse_loss(module(batch[0]), batch[1]),
    config,
    scheduler=LambdaLR(optimizer, lambda step: min((step + 1) / 20, 1) * (settings["decay"] if step >= 20 else 1)),
)
first_attempt = trainer.step == 0
for step in trainer.steps(TensorDataset(x, y)):
    if step.number == settings["fails_after"] and first_attempt and trainer.world.rank == 1:
        raise RuntimeError("boom")
