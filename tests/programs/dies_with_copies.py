"""Run by test_end_in_store.py: in the first job, rank 0 is killed as soon as there is a copy in memory.

dies_with_copies.py FOLDER_OR_URL
"""

import os
import signal
import sys
import time

import torch
from torch import nn
from torch.utils.data import TensorDataset
from toys import digest_of

from ddp_kit import Callback, Trainer, TrainerConfig
from ddp_kit.checkpoint.format import checkpoints


class Killed(Callback):
    def __init__(self) -> None:
        self.is_first_job = False

    def on_step(self, trainer: Trainer) -> None:
        self.is_first_job = self.is_first_job or trainer.step == 1
        kept = trainer._run.checkpoints.copies
        if not self.is_first_job or kept is None:
            return
        time.sleep(0.01)
        kept._note_end(wait=True)
        if os.environ["RANK"] == "0" and any(found.whole for found in checkpoints(kept._folder)):
            os.kill(os.getpid(), signal.SIGKILL)


torch.manual_seed(0)
model = nn.Linear(3, 2)
trainer = Trainer(
    model,
    torch.optim.Adam(model.parameters()),
    lambda model, batch: model(batch[0]).square().mean(),
    TrainerConfig(
        max_steps=1000,
        global_batch_size=4,
        checkpoint={"dir": sys.argv[1], "every_steps": 10_000, "memory_seconds": 0.05},
    ),
    callbacks=[Killed()],
)
trainer.fit(TensorDataset(torch.randn(40, 3)))
if os.environ["RANK"] == "0":
    print(f"ended with {digest_of(trainer.model.state_dict().values())}")
