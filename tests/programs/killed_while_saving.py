"""Run by test_resume.py: killed while its second save is being written, once. Arguments: folder, MiB of the model."""

import os
import signal
import sys
from typing import Any

import torch
from torch.utils.data import TensorDataset

from ddp_kit import Callback, Trainer, TrainerConfig


class DiesWriting(Callback):
    """At the fifth step; from the fourth on, nothing is written."""

    def on_step(self, trainer: Any) -> None:
        saver = trainer._run.checkpoints._disk.saver
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and trainer.step == 4:
            saver.wait()
            os.kill(saver._writer.pid, signal.SIGSTOP)
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" and trainer.step == 5:
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    x = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
    model = torch.nn.Linear(4, 1)
    model.register_buffer("ballast", torch.zeros(int(sys.argv[2]) << 18))
    Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        lambda model, batch: model(batch[0]).square().mean(),
        TrainerConfig(global_batch_size=4, max_steps=6, checkpoint={"dir": sys.argv[1], "every_steps": 2}),
        callbacks=[DiesWriting()],
    ).fit(TensorDataset(x))
