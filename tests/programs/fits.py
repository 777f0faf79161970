"""Train for an epoch, and print a line on each rank. Argument: "evaluate", or "fit" to evaluate in a second fit."""

import sys

import torch
from loguru import logger
from say import say
from torch import nn

from ddp_kit import Trainer, TrainerConfig

model = nn.Linear(2, 1)
config = TrainerConfig(global_batch_size=4, log_every_steps=5)
trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, batch: m(batch).square().mean(), config)
trainer.fit(torch.ones(80, 2))
logger.info("of the user's own")
say(f"done on rank {trainer.world.rank}")
if "evaluate" in sys.argv:
    trainer.evaluate(torch.ones(84, 2))
if "fit" in sys.argv:
    trainer.fit(torch.ones(80, 2), torch.ones(84, 2))
