"""Expanded buffers, and parameters without values, under each strategy: saved and resumed.

odd_tensors.py FOLDER
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ddp_kit import ConfigError, Trainer, TrainerConfig

DATA = TensorDataset(torch.ones(64, 4))


class Expanded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        self.register_buffer("extra", torch.zeros(1).expand(2))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layers(x)
        return found


class WithoutValues(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.rows = nn.Parameter(torch.ones(0, 3))
        self.columns = nn.Parameter(torch.ones(3, 0))

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.rows.sum() + self.columns.sum()


def train_to_step(folder: Path, steps: int, kind: type[nn.Module], parallel: Any) -> Trainer:
    torch.manual_seed(0)
    config = TrainerConfig(
        max_steps=steps, global_batch_size=8, parallel=parallel, checkpoint={"dir": folder, "save": "blocking"}
    )
    trainer = Trainer(
        kind(), lambda each: torch.optim.AdamW(each), lambda model, batch: model(batch[0]).square().mean(), config
    )
    for step in trainer.steps(DATA):
        if kind is Expanded:
            trainer.model.extra[:1] = float(step.number)  # type: ignore[index, operator]
    return trainer


folder = Path(sys.argv[1])
for name, parallel in {
    "ddp": "ddp",
    "zero1": "zero1",
    "fsdp": "fsdp",
    "pipeline": {"pipeline": 2, "pipeline_stages": ["layers.1"]},
}.items():
    train_to_step(folder / name, 2, Expanded, parallel)
    for steps in (3, 4):
        model: Any = train_to_step(folder / name, steps, Expanded, parallel).model
    print(f"{name} expanded: {model.extra.tolist()} {model.extra.stride() == (0,)}", flush=True)
    if name == "pipeline":
        continue
    try:
        for steps in (2, 4):
            ended = train_to_step(folder / f"{name} without", steps, WithoutValues, parallel).step
    except ConfigError as error:
        ended = error.message
    print(f"{name} without values: {ended}", flush=True)
