"""Train a model with a buffer that changes its shape. Arguments: the strategy; "one" or "both" ranks."""

import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset
from toys import sgd

from ddp_kit import Callback, Trainer, TrainerConfig


class GrowsTable(Callback):
    def on_step(self, trainer):
        if trainer.step == 2 and (trainer.world.rank == 1 or sys.argv[2] == "both"):
            trainer.model[0].table = torch.zeros(3 + trainer.world.rank, 2)


torch.manual_seed(0)


class CountingBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("table", torch.zeros(2, 2))

    def forward(self, x):
        self.table += 1.0
        return self.layer(x)


model = nn.Sequential(CountingBlock(), CountingBlock())
parallel = {"pipeline": 2} if sys.argv[1] == "pipeline" else sys.argv[1]
config = TrainerConfig(max_steps=6, global_batch_size=8, parallel=parallel)


trainer = Trainer(model, sgd, lambda model, batch: model(batch[0]).square().mean(), config, callbacks=[GrowsTable()])
trainer.fit(TensorDataset(torch.randn(64, 4)))
