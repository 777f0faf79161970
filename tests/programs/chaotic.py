"""Run by chaos.py: trains with everything random, notes which samples made up each step, prints what it ends with.

chaotic.py FOLDER
"""

import json
import os
import random
import sys
import time
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import Dataset

from ddp_kit import EMA, Callback, Trainer, TrainerConfig

SAMPLES, EPOCHS, GLOBAL_BATCH = 44, 5, 8  # a short last batch, but no pass of a single sample: BatchNorm
PASS_SECONDS = 0.01

Batch = tuple[Tensor, Tensor, Tensor]


class NumberedNoisy(Dataset[Batch]):
    """Augmented at random, by both generators; says which sample is which."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Batch:
        x = torch.randn(4, generator=torch.Generator().manual_seed(index))
        return x + 0.1 * torch.randn(4) + random.random(), x.sum(0, keepdim=True), torch.tensor(index)


class Ledger(Callback):
    """A line per step and rank in a file: the last that tells of a step is what the run has come to."""

    def __init__(self, folder: Path, rank: int) -> None:
        self.file = os.open(folder / f"ledger-{rank}", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(self.file, b"\n")  # a line that a kill has cut off ends here
        self.used: list[int] = []

    def on_step(self, trainer: Any) -> None:
        line = json.dumps({"step": trainer.step, "used": self.used})
        os.write(self.file, f"{line}\n".encode())
        self.used.clear()


def main(folder: Path) -> None:
    torch.manual_seed(0)
    wide = nn.Linear(128, 128)  # large enough to be copied in the background
    model = nn.Sequential(nn.Linear(4, 128), nn.BatchNorm1d(128), nn.Dropout(0.2), wide, nn.Linear(128, 1))

    def loss_fn(model: nn.Module, batch: Batch) -> Tensor:
        ledger.used += batch[2].tolist()
        time.sleep(PASS_SECONDS)
        return F.mse_loss(model(batch[0]), batch[1])

    ledger = Ledger(folder, int(os.environ.get("RANK", "0")))
    ema = EMA(0.9)
    trainer = Trainer(
        model,
        lambda parameters: torch.optim.Adam(parameters, lr=0.01),
        loss_fn,
        TrainerConfig(
            epochs=EPOCHS,
            global_batch_size=GLOBAL_BATCH,
            accumulation_steps=2,
            max_grad_norm=1.0,
            data={"num_workers": 1},
            checkpoint={"dir": folder / "checkpoints", "every_steps": 3},
        ),
        scheduler=lambda optimizer: OneCycleLR(optimizer, 0.05, total_steps=60),
        callbacks=[ledger, ema],
    )
    result = trainer.fit(NumberedNoisy())
    if trainer.world.is_main:
        values = [value.clone() for value in model.state_dict().values()]
        ema.apply_to(model)
        bits = torch.cat([value.detach().double().flatten() for value in [*values, *model.parameters()]])
        print("ended", result.steps, result.samples, sha256(bits.numpy().tobytes()).hexdigest())


if __name__ == "__main__":
    main(Path(sys.argv[1]))
