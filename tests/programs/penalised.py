"""Train a pipeline with a loss that uses the weights of all stages."""

import torch
from torch import nn

from ddp_kit import Trainer, TrainerConfig

torch.manual_seed(0)


class Penalised(nn.Sequential):
    pass


model = Penalised(*(nn.Sequential(nn.Linear(2, 2), nn.Tanh()) for _ in range(4)))


def loss_fn(model, batch):
    return model(batch[0]).square().mean() + 0.1 * sum(each.square().sum() for each in model.parameters())


config = TrainerConfig(max_steps=3, global_batch_size=4, parallel={"pipeline": 2})
data = torch.utils.data.TensorDataset(torch.randn(12, 2))
Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, config).fit(data)
