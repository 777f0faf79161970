"""A loss module whose buffer differs between ranks, and that holds the model; saved and resumed under each strategy.

loss_modules.py FOLDER
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from ddp_kit import Trainer, TrainerConfig
from ddp_kit.env import from_env

DATA = TensorDataset(torch.randn(40, 4, generator=torch.Generator().manual_seed(0)))


class Task(nn.Module):
    """Adds rank + 1 to a buffer in each pass, and 1 to another."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net
        self.register_buffer("own", torch.zeros(()))
        self.register_buffer("same", torch.zeros(()))

    def compute(self, model: Any, batch: Any) -> torch.Tensor:
        self.own += from_env().rank + 1
        self.same += 1
        return model(batch[0]).square().mean()


for parallel in ("ddp", "zero1", "fsdp"):
    for steps in (2, 5):
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        task = Task(model)
        config = TrainerConfig(
            max_steps=steps,
            global_batch_size=8,
            parallel=parallel,
            checkpoint={"dir": Path(sys.argv[1]) / parallel, "save": "blocking"},
        )
        Trainer(model, lambda each: torch.optim.SGD(each, lr=0.1), task.compute, config).fit(DATA)
    print(f"{parallel} {from_env().rank}: {int(task.own)} and {int(task.same)}", flush=True)
