"""Train with DataLoader workers on every kind of data. Argument: the expected TMPDIR."""

import sys
import tempfile

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from ddp_kit import Trainer, TrainerConfig


class EightSamples(Dataset):
    def __len__(self):
        return 8

    def __getitem__(self, index):
        return torch.full((3,), float(index))


class EightStreamed(IterableDataset):
    def __iter__(self):
        return (torch.full((3,), float(index)) for index in range(8))

    def state_dict(self):
        return {"at": torch.zeros(1)}

    def load_state_dict(self, state):
        pass


def train_on(data):
    model, seen = nn.Linear(3, 1), []

    def loss(model, batch):
        x = batch[0] if isinstance(batch, list) else batch
        seen.extend(x[:, 0].int().tolist())
        return model(x).square().mean()

    config = TrainerConfig(micro_batch_size=4, data={"num_workers": 1})
    Trainer(model, torch.optim.SGD(model.parameters(), lr=1e-6), loss, config).fit(data)
    print(sorted(seen) == list(range(8)))


assert tempfile.gettempdir() == sys.argv[1]
train_on(EightSamples())
train_on(TensorDataset(torch.arange(8.0).reshape(8, 1).expand(8, 3)))
train_on(DataLoader(EightSamples(), batch_size=4, num_workers=1, collate_fn=lambda samples: torch.stack(samples)))
train_on(EightStreamed())
