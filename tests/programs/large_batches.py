"""Train on batches larger than /dev/shm. Argument: "own" for a DataLoader of the script, or "ours"."""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from ddp_kit import Trainer, TrainerConfig


class Large(Dataset):
    def __len__(self):
        return 16

    def __getitem__(self, index):
        return torch.full((300_000,), float(index))


data = Large()
if sys.argv[1] == "own":
    data = DataLoader(data, batch_size=4, num_workers=2, collate_fn=lambda samples: {"x": torch.stack(samples)})
model = nn.Linear(1, 1)
seen = []


def loss(model, batch):
    x = batch["x"] if isinstance(batch, dict) else batch
    seen.extend(x[:, 0].int().tolist())
    return model(x[:, :1]).square().mean()


config = TrainerConfig(micro_batch_size=4, data={"num_workers": 2})
Trainer(model, torch.optim.SGD(model.parameters(), lr=1e-6), loss, config).fit(data)
print(sorted(seen) == list(range(16)))
