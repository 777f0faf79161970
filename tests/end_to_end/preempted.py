"""Run by test_preemption.py: trains, has a signal sent to itself or to its launcher, and prints what it ends with.

preempted.py FOLDER WHO SIGNAL SETTINGS: WHO is nobody, launcher or rank; SETTINGS is JSON for the TrainerConfig.
"""

import json
import os
import random
import signal
import sys
import time
from typing import Any

import psutil
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

from ddp_kit import Callback, Trainer, TrainerConfig

STEPS = 60


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Augmented at random."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(4, generator=torch.Generator().manual_seed(index))
        return x + random.random(), x.sum(0, keepdim=True)


class Disturbs(Callback):
    """After some steps of this process the last rank has its signal sent; from then on there is time to hear it."""

    def __init__(self, who: str, name: str) -> None:
        self.who, self.name, self.steps = who, name, 0

    def on_step(self, trainer: Any) -> None:
        self.steps += 1
        if self.steps == 5 and trainer.world.rank == trainer.world.world_size - 1 and self.who != "nobody":
            launcher = [each.pid for each in psutil.Process().parents() if "launch" in each.cmdline()]
            os.kill(launcher[0] if self.who == "launcher" else os.getpid(), signal.Signals[self.name])
        if self.steps >= 5 and self.name:
            time.sleep(0.2)


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.mse_loss(model(batch[0]), batch[1])


def main(folder: str, who: str, name: str, settings: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
    config = {"max_steps": STEPS, "global_batch_size": 8, "checkpoint": {"dir": folder}} | json.loads(settings)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    trainer = Trainer(model, optimizer, loss_fn, TrainerConfig(**config), callbacks=[Disturbs(who, name)])
    result = trainer.fit(Noisy())
    if trainer.world.is_main:
        bits = [value.flatten() for value in model.state_dict().values()]
        print("ended", result.steps, result.samples, torch.cat(bits).numpy().tobytes().hex())


if __name__ == "__main__":
    main(*sys.argv[1:])
