"""Train with a loss function that returns a string on rank 1 in step 3."""

import torch
from torch import nn

from ddp_kit import Trainer, TrainerConfig


def loss_fn(model, batch):
    loss = model(batch).mean()
    return "nothing" if trainer.world.rank == 1 and trainer.step == 2 else loss


torch.manual_seed(0)
model = nn.Linear(2, 1)
trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, TrainerConfig(global_batch_size=4))
trainer.fit(torch.randn(40, 2))
