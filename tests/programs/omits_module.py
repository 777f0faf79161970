"""Train a model that omits one of its blocks on some ranks, from some pass on.

Arguments: the strategy; "each" rank omits another block, "one" rank (1) omits one, or "all" the same one; the number of
passes before that; the seconds before the barrier says that it waits, and the timeout of fsdp.
"""

import os
import sys

import torch
from say import say
from torch import nn

from ddp_kit import Callback, Trainer, TrainerConfig
from ddp_kit.distributed import barrier
from ddp_kit.parallel import fsdp

strategy, who, since = sys.argv[1], sys.argv[2], int(sys.argv[3])
barrier.SILENT_SECONDS, fsdp.TIMEOUT_SECONDS = map(float, sys.argv[4:])
rank = int(os.environ["RANK"])
omitted = {"each": 1 + rank, "one": 2 if rank else None, "all": 1}[who]


class OmitsModule(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.Tanh()) for _ in range(3))
        self.passes = 0

    def forward(self, x):
        self.passes += self.training
        for number, block in enumerate(self.blocks):
            if self.passes <= since or number != omitted:
                x = block(x)
        return x.mean()


class Say(Callback):
    def on_step(self, trainer):
        say(f"step {trainer.step}")


torch.manual_seed(0)
parallel = {"strategy": strategy} | ({"bucket_mb": 1e-5} if strategy == "ddp" else {})
config = TrainerConfig(global_batch_size=8, accumulation_steps=2, max_steps=2, parallel=parallel)
trainer = Trainer(
    OmitsModule(),
    lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    lambda model, x: model(x),
    config,
    callbacks=[Say()],
)
trainer.fit(torch.randn(40, 2))
