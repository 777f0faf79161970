"""Run by test_restarts.py: trains twelve steps, saves after each, and fails where it is told to.

restarted.py FOLDER kills|nan|crashes
"""

import os
import signal
import sys
from typing import Any

import torch
from torch import Tensor, nn

from ddp_kit import Callback, Trainer, TrainerConfig

FOLDER, FAULT = sys.argv[1:]
ATTEMPT = int(os.environ["TORCHELASTIC_RESTART_COUNT"])


class Fails(Callback):
    """On rank 1: killed three times, each time three steps later; or an error of another name each time."""

    def on_step(self, trainer: Any) -> None:
        if trainer.world.rank == 1 and FAULT == "kills" and trainer.step == 3 * (ATTEMPT + 1) < 12:
            os.kill(os.getpid(), signal.SIGKILL)
        if trainer.world.rank == 1 and FAULT == "crashes" and trainer.step == 6:
            raise ValueError("abcdefgh"[ATTEMPT])


def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
    loss = model(batch).square().mean()
    return loss * float("nan") if FAULT == "nan" and trainer.step == 5 else loss


torch.manual_seed(0)
model = nn.Linear(2, 1)
trainer = Trainer(
    model,
    torch.optim.SGD(model.parameters(), lr=0.01),
    loss_fn,
    TrainerConfig(
        max_steps=12,
        global_batch_size=4,
        log_every_steps=1,
        checkpoint={"dir": FOLDER, "every_steps": 1, "save": "blocking"},
    ),
    callbacks=[Fails()],
)
trainer.fit(torch.ones(80, 2))
