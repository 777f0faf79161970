"""Run by test_streams.py: trains on streams of unequal lengths, writes what each rank saw and what became of it."""

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset, get_worker_info
from toys import flat, momentum_sgd, small_network

from ddp_kit import DataConfig, Loss, Trainer, TrainerConfig


class UnequalStream(IterableDataset[tuple[Tensor, Tensor]]):
    """As many samples as `lengths` says for this rank; divided over DataLoader workers, other ones in each epoch."""

    def __init__(self, rank: int, lengths: list[int]) -> None:
        self.first, self.length, self.epoch = 1000 * rank, lengths[rank], 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        info = get_worker_info()
        begin, step = (0, 1) if info is None else (info.id, info.num_workers)
        for number in range(begin, self.length, step):
            yield sample(10_000 * self.epoch + self.first + number)


def sample(number: int) -> tuple[Tensor, Tensor]:
    x = torch.tensor([number % 7, number % 11, number % 13], dtype=torch.float64) / 10
    return torch.tensor(number), x


def weights_of(numbers: Tensor) -> Tensor:
    return (numbers % 4).double()


def train_on_streams(case: dict[str, Any]) -> dict[str, Any]:
    passes: list[tuple[int, list[int]]] = []
    model = small_network()

    def loss_fn(placed: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor | Loss:
        numbers, x = batch
        passes.append((trainer.step, numbers.tolist()))
        losses = placed(x).squeeze(1) ** 2
        if case["weighted"]:
            weights = weights_of(numbers)
            return Loss((losses * weights).sum(), weight=weights.sum())
        return losses.mean()

    config = TrainerConfig(
        epochs=case["epochs"],
        max_steps=case["max_steps"],
        global_batch_size=case["global_batch"],
        accumulation_steps=case["accumulation"],
        max_grad_norm=0.5,
        log_every_steps=2,
        data=DataConfig(num_workers=case["workers"]),
    )
    trainer = Trainer(model, momentum_sgd, loss_fn, config)
    data = UnequalStream(trainer.world.rank, case["lengths"])
    samples = 0
    if case["left_after"]:
        for step in trainer.steps(data):
            samples += step.samples
            if step.number == case["left_after"]:
                break
        for step in trainer.steps(data):
            samples += step.samples
    else:
        samples = trainer.fit(data).samples
    return {
        "weights": flat(model.parameters()).tolist(),
        "passes": passes,
        "steps": trainer.step,
        "samples": samples,
    }


if __name__ == "__main__":
    file, folder = map(Path, sys.argv[1:])
    results = [train_on_streams(case) for case in json.loads(file.read_text())]
    (folder / f"rank{os.environ['RANK']}.json").write_text(json.dumps(results))
