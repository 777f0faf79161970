"""Train with a plain mean as the loss, on batches whose first sample is None and left out by the collate function."""

import torch
from torch import Tensor

from ddp_kit import Trainer, TrainerConfig


def without_none(samples: list[Tensor | None]) -> Tensor:
    return torch.stack([sample for sample in samples if sample is not None])


model = torch.nn.Linear(1, 1)
config = TrainerConfig(
    global_batch_size=8, data={"collate_fn": without_none, "shuffle": False, "compare_items": 0}, sanity_check="off"
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
samples = [None if index % 4 == 0 else torch.ones(1) for index in range(16)]
Trainer(model, optimizer, lambda model, batch: model(batch).square().mean(), config).fit(samples)
