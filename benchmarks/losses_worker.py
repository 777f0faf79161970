"""The script that losses.py launches: trains with steps of 10 ms, and notes each step of rank 0 in FOLDER/steps.

`python losses_worker.py FOLDER SETTINGS`, with the settings of the checkpoints as JSON.
"""

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from ddp_kit import Callback, Trainer, TrainerConfig

STEP_SECONDS = 0.01
ATTEMPT = sum(int(os.environ.get(name, 0)) for name in ("TORCHELASTIC_RESTART_COUNT", "DDPKIT_NODE_CHANGES"))


class Steps(Callback):
    """Notes the attempt, the step and its time."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_step(self, trainer: Any) -> None:
        time.sleep(STEP_SECONDS)
        if trainer.world.rank == 0:
            with self._path.open("a") as file:
                file.write(f"{ATTEMPT} {trainer.step} {time.monotonic()}\n")


def main(folder: Path, settings: dict[str, Any]) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 1))
    x = torch.randn(4096, 64)
    config = TrainerConfig(
        max_steps=100_000, global_batch_size=16, checkpoint={"dir": folder / "run", **settings}, log_every_steps=1000
    )
    trainer = Trainer(
        model,
        torch.optim.Adam(model.parameters()),
        lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
        config,
        callbacks=[Steps(folder / "steps")],
    )
    trainer.fit(TensorDataset(x, x.sum(dim=1, keepdim=True)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), json.loads(sys.argv[2]))
