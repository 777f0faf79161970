"""Train slowly, for a known cause, until a file exists. Arguments: the cause, and the file."""

import os
import sys
import time
from itertools import count
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

from ddp_kit import Trainer, TrainerConfig
from ddp_kit.trainer import build, timing

CAUSE, end = sys.argv[1], Path(sys.argv[2])
# All sleep for much longer than they compute, however busy the cores are: so the cause alone stands out.
SLEEPS = {"straggler": 0.1 * int(os.environ["RANK"]), "data": 0.0, "synchronisation": 0.04}


class SlowSamples(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        if CAUSE == "data":
            time.sleep(0.02)
        return torch.ones(3)


class Gpu:  # a stand-in on the host's clock, which finishes its work when the host waits for it
    def __init__(self):
        self.numbers, self.recorded, self.finished = count(1), 0, 0

    def wait(self):
        self.finished = self.recorded

    def has_finished(self):
        return self.finished == self.recorded


class Event:
    def record(self):
        self.number, self.time = next(gpu.numbers), time.perf_counter()
        gpu.recorded = self.number

    def query(self):
        return self.number <= gpu.finished

    def elapsed_time(self, other):
        return 1000 * (other.time - self.time)


def loss_fn(model, batch):
    time.sleep(SLEEPS[CAUSE])
    loss = model(batch).square().mean()
    if CAUSE == "synchronisation":
        gpu.wait()  # loss.item()
    return loss


gpu = Gpu()
if CAUSE == "synchronisation":
    build.step_clock = lambda device: timing.DeviceClock(Event, gpu.has_finished)
model = nn.Linear(3, 3)
config = TrainerConfig(global_batch_size=4, log_every_steps=10, max_steps=10**6, checkpoint={"dir": "run"})
trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.01), loss_fn, config)
for step in trainer.steps(SlowSamples()):
    if step.number % 10 == 0 and end.exists():
        trainer.stop()
