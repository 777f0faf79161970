"""Make a Trainer on one rank, and on the others once it has logged that it waits. Argument: the rank that waits."""

import os
import sys
import time
from pathlib import Path

import torch
from loguru import logger

from ddp_kit import Trainer
from ddp_kit.distributed import barrier

barrier.SILENT_SECONDS = 0.01
logged = Path("logged")
if os.environ["RANK"] == sys.argv[1]:
    logger.add(lambda line: logged.touch())
else:
    while not logged.exists():
        time.sleep(0.01)
torch.manual_seed(0)
model = torch.nn.Linear(1, 1)
Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda model, batch: model(batch).mean())
