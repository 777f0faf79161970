"""Train a model that uses one of its blocks in the first micro-batch of a step only, and print losses and norms.

Arguments: parallel as JSON; what becomes of the block in the other micro-batches: "omitted", or "unused" (it is called,
without an effect on the output).
"""

import json
import sys

import torch
from say import say
from torch import nn
from toys import sgd

from ddp_kit import Trainer, TrainerConfig
from ddp_kit.parallel import fsdp

fsdp.whole_gradients_fit = lambda gradients, memory: False
parallel, case = json.loads(sys.argv[1]), sys.argv[2]


class TanhBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x):
        return x + torch.tanh(self.inner(x))


class OmitsBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(TanhBlock() for _ in range(3))
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        for number, block in enumerate(self.blocks):
            if number != 1 or self.calls % 3 == 1:  # only in the first of three micro-batches
                x = block(x)
            elif case == "unused":
                block(x)
        return x


torch.manual_seed(0)
x = torch.randn(48, 4, dtype=torch.float64)
config = TrainerConfig(
    global_batch_size=24,
    accumulation_steps=3,
    max_steps=4,
    log_every_steps=1,
    data={"shuffle": False},
    parallel=parallel,
)
trainer = Trainer(OmitsBlock().double(), sgd, lambda model, x: model(x).square().mean(), config)
history = trainer.fit(x).history
if trainer.world.is_main:
    say(*(f"{value:.12f}" for row in history for value in (row.loss, row.grad_norm)))
