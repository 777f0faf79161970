"""Train with and without compressed gradients, and print the losses."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from ddp_kit import ConfigError, Trainer, TrainerConfig

x = torch.randn(64, 4, generator=torch.Generator().manual_seed(0))
for compression in (None, "fp16"):
    torch.manual_seed(0)
    trainer = Trainer(
        nn.Linear(4, 1),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
        TrainerConfig(epochs=2, global_batch_size=8, parallel={"compression": compression}),
    )
    print("sent", compression, trainer.fit(TensorDataset(x, x.sum(1, keepdim=True))).loss)
try:
    Trainer(nn.Linear(4, 1), torch.optim.Adam, print, TrainerConfig(parallel={"compression": "bf16"}))
except ConfigError as error:
    print("refused", error.message)
