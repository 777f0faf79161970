"""Run by test_restarts.py: one rank dies in training, where the other cannot hear that it is told to stop."""

import os
import signal
import sys
from typing import Any

import torch
from torch import Tensor, nn

from ddp_kit import Trainer, TrainerConfig


def loss_fn(model: nn.Module, batch: Tensor) -> Tensor:
    if trainer.step == 3 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        if trainer.world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})  # as in a collective of NCCL
        signal.sigwait({signal.SIGUSR2})
    loss: Any = model(batch).mean()
    return loss


model = nn.Linear(2, 1)
config = TrainerConfig(max_steps=6, global_batch_size=4, checkpoint={"dir": sys.argv[1], "every_steps": 1})
trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, config)
print("ended after step", trainer.fit(torch.ones(40, 2)).steps)
