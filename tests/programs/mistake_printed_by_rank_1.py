"""Make a mistake in a setting on two ranks: rank 1 prints it and does not exit, then rank 0 finds it."""

import atexit
import os
import time
from pathlib import Path

from ddp_kit import TrainerConfig

printed = Path("printed")
if os.environ["RANK"] == "1":
    atexit.register(lambda: (printed.touch(), time.sleep(600)))
while os.environ["RANK"] == "0" and not printed.exists():
    time.sleep(0.01)
TrainerConfig(log_every_steps=0)
