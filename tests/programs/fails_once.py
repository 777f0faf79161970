"""Train, and fail on rank 1 after step 11 of the first attempt. Argument: "save" to save checkpoints."""

import os
import sys
import time
from pathlib import Path

import torch
from torch import nn

from ddp_kit import Callback, Trainer, TrainerConfig


class Trouble(Callback):
    def on_step(self, trainer):
        if trainer.step == 11 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and trainer.world.rank == 1:
            while not list(Path().glob("**/samples-0.jsonl")):
                time.sleep(0.05)
            raise RuntimeError("boom")


saves = {"dir": "run", "every_steps": 5} if "save" in sys.argv else {}
model = nn.Linear(2, 1)
config = TrainerConfig(max_steps=20, global_batch_size=4, log_every_steps=2, eval_every_steps=10, checkpoint=saves)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
trainer = Trainer(model, optimizer, lambda m, batch: m(batch).square().mean(), config, callbacks=[Trouble()])
trainer.fit(torch.ones(80, 2), torch.ones(8, 2))
