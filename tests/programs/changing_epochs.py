"""Train on datasets and samplers whose length changes with the epoch, and print lengths, steps and weights."""

import torch
from say import say
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, Dataset, Sampler

from ddp_kit import Trainer, TrainerConfig, scheduler_steps

DATA = torch.randn(32, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


class Changing:
    def __init__(self, lengths):
        self.lengths, self.epoch = lengths, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __len__(self):
        return self.lengths[self.epoch]


class ChangingSamples(Changing, Dataset):
    def __getitem__(self, index):
        assert index < len(self)
        return DATA[index]


class Order(Changing, Sampler):
    def __iter__(self):
        return iter(torch.randperm(32)[: len(self)].tolist())


class ChangingBatches(Changing, BatchSampler):
    def __init__(self, lengths):
        Changing.__init__(self, lengths)

    def __iter__(self):
        yield from torch.randperm(32)[: 4 * len(self)].reshape(-1, 4).tolist()


def train_epochs(data, **settings):
    torch.manual_seed(0)
    model = nn.Linear(3, 1).double()
    seen = {}

    def loss_fn(model, batch):
        seen[trainer.epoch] = seen.get(trainer.epoch, 0) + len(batch)
        return model(batch).square().mean()

    config = TrainerConfig(epochs=3, log_every_steps=1, **settings)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def schedule(optimizer):
        return torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=scheduler_steps(config, data))

    trainer = Trainer(model, optimizer, loss_fn, config, scheduler=None if isinstance(data, Dataset) else schedule)
    result = trainer.fit(data)
    every = torch.tensor([seen.get(epoch, 0) for epoch in range(3)])
    if trainer.world.world_size > 1:
        torch.distributed.all_reduce(every)
    assert not any(row.loss != row.loss for row in result.history)
    if trainer.world.is_main:
        weights = nn.utils.parameters_to_vector(model.parameters()).tolist()
        say(*every.tolist(), result.steps, trainer.total_steps, *weights)
    return trainer.world.world_size


ranks = train_epochs(ChangingSamples([8, 12, 16]), global_batch_size=4)
for sizes in ([16, 24, 32], [32, 9, 3]):
    train_epochs(ChangingSamples(sizes), global_batch_size=8)
    train_epochs(DataLoader(DATA, batch_size=8 // ranks, sampler=Order(sizes)))
for batches in ([2, 3, 4], [8, 3, 1]):
    train_epochs(DataLoader(DATA, batch_sampler=ChangingBatches(batches)), accumulation_steps=2 // ranks)
