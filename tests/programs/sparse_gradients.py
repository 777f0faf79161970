"""Train an embedding with sparse gradients, and print the loss and the weights on each rank."""

import torch
from say import say
from torch import nn
from torch.utils.data import TensorDataset

from ddp_kit import Trainer, TrainerConfig

torch.manual_seed(0)
data = TensorDataset(torch.arange(9) % 5, torch.randn(9, 1))
model = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 1))
trainer = Trainer(
    model,
    torch.optim.SGD(model.parameters(), lr=0.1),
    lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
    TrainerConfig(epochs=2, global_batch_size=4),
)
result = trainer.fit(data)
say(trainer.world.rank, result.loss, *nn.utils.parameters_to_vector(model.parameters()).tolist())
