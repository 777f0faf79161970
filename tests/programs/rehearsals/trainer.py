"""A Trainer whose global batch does not depend on the number of ranks, with a fixed folder for its checkpoints."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from ddp_kit import Trainer, TrainerConfig

torch.manual_seed(0)
x = torch.randn(240, 5)
trainer = Trainer(
    nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 1)),
    lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
    TrainerConfig(epochs=4, global_batch_size=12, checkpoint={"dir": "run", "every_steps": 7}),
)
trainer.fit(TensorDataset(x, x.prod(dim=1, keepdim=True)))
