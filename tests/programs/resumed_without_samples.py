"""Resume runs after each of their steps, although a rank has no samples in some of them: FOLDER STRATEGY.

Prints one line per kind of data: its name, the steps of the run, and those from which a resume ends with other weights.
"""

import sys
from pathlib import Path

import torch
from say import say
from torch import nn
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from ddp_kit import Trainer, TrainerConfig
from ddp_kit.env import from_env

folder, strategy = Path(sys.argv[1]), sys.argv[2]
LENGTHS = (2, 9)  # of the ranks' streams
RANK = from_env().rank


def noisy(number):
    return torch.full((4,), number / 100) + torch.randn(4)


class NineSamples(Dataset):
    """Its epochs end with a step of one sample."""

    def __len__(self):
        return 9

    def __getitem__(self, index):
        return noisy(index)


class UnequalStream(IterableDataset):
    def __iter__(self):
        info = get_worker_info()
        first, workers = (0, 1) if info is None else (info.id, info.num_workers)
        return (noisy(number + 100 * RANK) for number in range(first, LENGTHS[RANK], workers))


class StreamWithState(IterableDataset):
    """Continues after `load_state_dict`, like the streams of the datasets library; begins anew in the next epoch."""

    def __init__(self):
        self.at, self.start, self.epoch = 0, None, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def state_dict(self):
        return {"at": self.at, "epoch": self.epoch}

    def load_state_dict(self, state):
        self.start = state

    def __iter__(self):
        info = get_worker_info()
        first, workers = (0, 1) if info is None else (info.id, info.num_workers)
        begin = first
        if self.start is not None and self.start["epoch"] == self.epoch:
            begin = self.start["at"]
        for number in range(begin, LENGTHS[RANK], workers):
            self.at = number + workers
            yield noisy(number + 100 * RANK)


def steps_and_predictions(data, workers, saved, resume=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    config = TrainerConfig(
        epochs=2,
        global_batch_size=4,
        parallel=strategy,
        data={"num_workers": workers},
        checkpoint={"dir": saved, "every_steps": 1, "keep_last": 99, "resume": resume, "save": "blocking"},
        sanity_check="off",
    )
    trainer = Trainer(model, lambda p: torch.optim.SGD(p, lr=0.05), lambda model, x: model(x).square().mean(), config)
    result = trainer.fit(data())
    return result.steps, trainer.predict(torch.eye(4))


for data, workers in (
    (NineSamples, 0),
    (NineSamples, 1),
    (UnequalStream, 0),
    (UnequalStream, 2),
    (StreamWithState, 0),
    (StreamWithState, 1),
    (StreamWithState, 2),
):
    name = f"{data.__name__} {workers}"
    steps, whole = steps_and_predictions(data, workers, folder / name)
    differ = []
    for step in range(1, steps):
        _, resumed = steps_and_predictions(data, workers, folder / f"{name} {step}", folder / name / f"step-{step:08d}")
        if not torch.equal(resumed, whole):
            differ.append(step)
    say(f"case {name}: {steps} steps, differ {differ}")
