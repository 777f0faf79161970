"""Run by test_augmented.py: trains on samples that are changed at random; writes what this rank made of each."""

import json
import os
import random
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from ddp_kit import DataConfig, Trainer, TrainerConfig


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        drawn = [random.random(), torch.rand(()).item(), np.random.rand()]
        return torch.tensor(index), torch.tensor(drawn, dtype=torch.float64)


def augmented_samples(workers: int, own_loader: bool) -> dict[str, Any]:
    seen: list[tuple[int, int, list[float]]] = []
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 1), nn.Dropout(0.5)).double()

    def loss_fn(placed: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        seen.extend((trainer.epoch, *pair) for pair in zip(batch[0].tolist(), batch[1].tolist(), strict=True))
        return placed(batch[1]).mean()

    config = TrainerConfig(
        epochs=2,
        global_batch_size=6,
        accumulation_steps=2,
        seed=3,
        data=DataConfig(seed_samples=True, num_workers=workers),
    )
    trainer = Trainer(model, lambda parameters: torch.optim.SGD(parameters, lr=0.1), loss_fn, config)
    data: Any = Augmented()
    if own_loader:
        size = trainer.batch_plan.micro_batch
        data = DataLoader(data, batch_size=size, shuffle=True, num_workers=workers)
    for step in trainer.steps(data):
        if step.number == 5:
            break  # in the middle of the second epoch
    trainer.fit(data)
    return {f"{epoch} {index}": drawn for epoch, index, drawn in seen}


if __name__ == "__main__":
    found = [augmented_samples(workers, own_loader) for workers in (0, 1, 2) for own_loader in (False, True)]
    Path(sys.argv[1], f"rank{os.environ['RANK']}.json").write_text(json.dumps(found))
