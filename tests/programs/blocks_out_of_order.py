"""Train a pipeline whose model calls its blocks in a given order. Argument: the order, such as 102345."""

import sys

import torch
from torch import nn

from ddp_kit import Trainer, TrainerConfig

torch.manual_seed(0)


class OrderedBlocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.Tanh()) for _ in range(6))

    def forward(self, x):
        for number in map(int, sys.argv[1]):
            x = self.blocks[number](x)
        return x


model = OrderedBlocks()
config = TrainerConfig(max_steps=3, global_batch_size=4, parallel={"pipeline": 3})
data = torch.utils.data.TensorDataset(torch.randn(12, 2))
Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, b: m(b[0]).square().mean(), config).fit(data)
