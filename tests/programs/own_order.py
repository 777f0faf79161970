"""Run by test_own_order.py in 1 to 3 processes: samplers over the whole dataset, which know nothing of ranks.

Each rank compares its weights with those of one process that takes each global batch at once.
"""

import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Sampler, TensorDataset
from toys import momentum_sgd, small_network

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


class UnevenBatches(Sampler[list[int]]):
    """Batches of 1 to 7 samples: fewer than there are ranks, too."""

    def __init__(self, order: Order) -> None:
        self.sampler = order

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[list[int]]:
        indices = [*self.sampler]
        return (indices[start:end] for start, end in ((0, 1), (1, 6), (6, 13), (13, 15), (15, 17)))


def loss_fn(model: nn.Module, batch: Any) -> Tensor:
    return ((model(batch[0]).squeeze(1) - batch[1]) ** 2).mean()


def parameters_by_hand(loader: DataLoader[Any], order: Order) -> list[Tensor]:
    model = small_network()
    optimizer = momentum_sgd(model.parameters())
    for epoch in range(2):
        order.set_epoch(epoch)
        for batch in loader:
            optimizer.zero_grad()
            loss_fn(model, batch).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return [*model.parameters()]


def largest_difference(steps: int, expected: list[Tensor], **settings: Any) -> float:
    config = TrainerConfig(epochs=2, **settings)
    assert scheduler_steps(config, DATA) == 2 * steps
    trainer = Trainer(small_network(), momentum_sgd, loss_fn, config)
    assert trainer.fit(DATA).steps == 2 * steps
    weights = trainer.model.parameters()
    return max((one - other).abs().max().item() for one, other in zip(weights, expected, strict=True))


if __name__ == "__main__":
    order = Order()
    expected = parameters_by_hand(DataLoader(DATA, batch_size=6, sampler=order), order)
    largest = max(
        largest_difference(3, expected, global_batch_size=6, data={"sampler": Order()}),
        largest_difference(
            3, expected, global_batch_size=6, accumulation_steps=2, data={"sampler": Order(), "num_workers": 1}
        ),
    )
    expected = parameters_by_hand(DataLoader(DATA, batch_sampler=UnevenBatches(order)), order)
    for settings in ({}, {"micro_batch_size": 2}, {"accumulation_steps": 2}):
        largest = max(
            largest, largest_difference(5, expected, data={"batch_sampler": UnevenBatches(Order())}, **settings)
        )
    assert largest < 1e-12, largest
    sys.stdout.write(f"{largest:.1e}\n")
