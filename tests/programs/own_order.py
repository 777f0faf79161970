"""Run by test_own_order.py in 1 to 3 processes: samplers over the whole dataset, which know nothing of ranks.

Each rank compares its weights with those of one process that takes each global batch at once.
"""

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler, TensorDataset

from ddp_kit import Trainer, TrainerConfig, scheduler_steps

X = torch.randn(20, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
DATA = TensorDataset(X, X.sum(dim=1).tanh())


class Order(Sampler[int]):
    """Some samples several times, in another order in each epoch."""

    epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return 17

    def __iter__(self) -> Iterator[int]:
        generator = torch.Generator().manual_seed(self.epoch)
        return iter(torch.randint(20, (17,), generator=generator).tolist())


class Batches(Sampler[list[int]]):
    """Batches of 1 to 7 samples: fewer than there are ranks, too."""

    def __init__(self, order: Order) -> None:
        self.sampler = order

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[list[int]]:
        indices = [*self.sampler]
        return (indices[start:end] for start, end in ((0, 1), (1, 6), (6, 13), (13, 15), (15, 17)))


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    return ((model(batch[0]).squeeze(1) - batch[1]) ** 2).mean()


def by_hand(loader: DataLoader[Any], order: Order) -> list[Tensor]:
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(2):
        order.set_epoch(epoch)
        for batch in loader:
            optimizer.zero_grad()
            loss_fn(model, batch).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return [*model.parameters()]


def apart(steps: int, expected: list[Tensor], **settings: Any) -> float:
    config = TrainerConfig(epochs=2, **settings)
    assert scheduler_steps(config, DATA) == 2 * steps
    trainer = Trainer(network(), lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9), loss_fn, config)
    assert trainer.fit(DATA).steps == 2 * steps
    weights = trainer.model.parameters()
    return max((one - other).abs().max().item() for one, other in zip(weights, expected, strict=True))


if __name__ == "__main__":
    order = Order()
    expected = by_hand(DataLoader(DATA, batch_size=6, sampler=order), order)
    largest = max(
        apart(3, expected, global_batch_size=6, data={"sampler": Order()}),
        apart(3, expected, global_batch_size=6, accumulation_steps=2, data={"sampler": Order(), "num_workers": 1}),
    )
    expected = by_hand(DataLoader(DATA, batch_sampler=Batches(order)), order)
    for settings in ({}, {"micro_batch_size": 2}, {"accumulation_steps": 2}):
        largest = max(largest, apart(5, expected, data={"batch_sampler": Batches(Order())}, **settings))
    assert largest < 1e-12, largest
    sys.stdout.write(f"{largest:.1e}\n")
