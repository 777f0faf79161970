"""Train on a dataset that grows after an epoch, except on rank 0."""

import torch
from torch import nn

from ddp_kit import Trainer, TrainerConfig

torch.manual_seed(0)
model, data = nn.Linear(3, 1), [*torch.randn(8, 3)]
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
config = TrainerConfig(epochs=3, global_batch_size=4)
trainer = Trainer(model, optimizer, lambda model, batch: model(batch).mean(), config)
for step in trainer.steps(data):
    if step.ends_epoch:
        data += [*torch.randn(4 * trainer.world.rank, 3)]
