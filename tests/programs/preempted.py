"""Run by test_preemption.py: trains, has a signal sent to itself or to its launcher, and prints what it ends with.

preempted.py FOLDER WHO SIGNAL SETTINGS: WHO is nobody, saver, launcher, rank, sanity (the last rank gets it while fit
evaluates one batch before the first step), end (in on_fit_end), or evaluation: then it is sent to the
launcher in the second evaluation of the process, which from then on takes longer than anyone waits. With saver each
save takes a second. SETTINGS is JSON for the TrainerConfig; with eval_every_steps each evaluation changes the learning
rate.
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

from ddp_kit import Callback, Trainer, TrainerConfig, World

STEPS = 60


class ShiftedSamples(Dataset[tuple[Tensor, Tensor]]):
    """Augmented at random."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x = torch.randn(4, generator=torch.Generator().manual_seed(index))
        return x + random.random(), x.sum(0, keepdim=True)


class Disturbs(Callback):
    """After some steps of this process the last rank has its signal sent; from then on there is time to hear it."""

    def __init__(self, who: str, name: str) -> None:
        self.who, self.name, self.steps, self.evaluations = who, name, 0, 0

    def on_step(self, trainer: Any) -> None:
        self.steps += 1
        if self.steps == 5 and self.who in ("launcher", "rank"):
            self.send(trainer.world)
        if self.steps >= 5 and self.name and self.who not in ("evaluation", "end"):
            time.sleep(0.2)

    def on_fit_end(self, trainer: Any, result: Any) -> None:
        if self.who == "end":
            self.send(trainer.world)

    def on_evaluate_start(self, trainer: Any) -> None:
        self.evaluations += 1
        random.random()  # its own draws are done once, too

    def on_evaluate(self, trainer: Any, metrics: dict[str, float]) -> None:
        for group in trainer.optimizer.param_groups:
            group["lr"] /= 1 + metrics["loss"]

    def state_dict(self) -> dict[str, Any]:
        time.sleep(self.who == "saver")
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass

    def send(self, world: World) -> None:
        if world.rank == world.world_size - 1:
            launcher = [each.pid for each in psutil.Process().parents() if "launch" in each.cmdline()]
            os.kill(launcher[0] if self.who in ("launcher", "evaluation") else os.getpid(), signal.Signals[self.name])


class Evaluated(ShiftedSamples):
    """Takes its time once the signal is sent."""

    def __init__(self, disturbs: Disturbs, world: World) -> None:
        self.disturbs, self.world, self.slow = disturbs, world, False

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index >= 100 and self.disturbs.who == "evaluation" and self.disturbs.evaluations == 2 and not self.slow:
            self.slow = True
            self.disturbs.send(self.world)
        time.sleep(0.2 * self.slow)
        return super().__getitem__(index)


def main(folder: str, who: str, name: str, settings: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.2), nn.Linear(8, 1))
    config = {"max_steps": STEPS, "global_batch_size": 8, "checkpoint": {"dir": folder}} | json.loads(settings)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    disturbs = Disturbs(who, name)

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        if who == "sanity" and trainer.step == 0 and not model.training:
            disturbs.send(trainer.world)
        return F.mse_loss(model(batch[0]), batch[1])

    trainer = Trainer(model, optimizer, loss_fn, TrainerConfig(**config), callbacks=[disturbs])
    result = trainer.fit(ShiftedSamples(), Evaluated(disturbs, trainer.world) if "eval_every_steps" in config else None)
    if trainer.world.is_main:
        bits = [value.flatten() for value in model.state_dict().values()]
        print("ended", result.steps, result.samples, torch.cat(bits).numpy().tobytes().hex())


if __name__ == "__main__":
    main(*sys.argv[1:])
