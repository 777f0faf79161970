"""Train with a plain mean as the loss, on batches whose first sample the collate function omits."""

import torch

from ddp_kit import Trainer, TrainerConfig

model = torch.nn.Linear(1, 1)
config = TrainerConfig(global_batch_size=8, data={"collate_fn": lambda samples: torch.stack(samples[1:])})
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
Trainer(model, optimizer, lambda model, batch: model(batch).square().mean(), config).fit([torch.ones(1)] * 16)
