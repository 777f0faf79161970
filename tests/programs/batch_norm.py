"""Train and evaluate a model with batch normalisation, and print on each rank the metric and its own model's loss."""

import torch
from say import say
from torch import nn

from ddp_kit import Trainer, TrainerConfig

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Linear(2, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
trainer = Trainer(model, optimizer, lambda model, batch: model(batch).mean(), TrainerConfig(global_batch_size=8))
data = torch.randn(40, 2)
result = trainer.fit(data, data)
say(trainer.world.rank, result.metrics["loss"], model.eval()(data).mean().item())
