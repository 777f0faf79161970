"""Train and evaluate, with an offline run of Weights & Biases in this folder."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from ddp_kit import Trainer, TrainerConfig, WandbLogger

x = torch.ones(16, 3)
data = TensorDataset(x, x.sum(dim=1, keepdim=True))
model = nn.Linear(3, 1)
trainer = Trainer(
    model,
    torch.optim.SGD(model.parameters(), lr=0.01),
    lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
    TrainerConfig(global_batch_size=4, log_every_steps=2),
    callbacks=[WandbLogger("ours", mode="offline", dir=".", config={"note": "by hand"})],
)
trainer.fit(data, data)
trainer.evaluate(data)
