"""Reduce 40 times without a Trainer, and sleep on rank 1 in place of the 31st. Argument: the timeout of gloo."""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from ways_to_hang import sleep

RANK = int(os.environ["RANK"])


def work(step):
    if RANK == 1 and step == 30:
        sleep()
    else:
        dist.all_reduce(torch.ones(1))


# The timeout may be short: the process group is created once the other rank has done its imports, too.
Path(f"imported.{RANK}").touch()
while not Path(f"imported.{1 - RANK}").exists():
    time.sleep(0.01)
dist.init_process_group("gloo", timeout=timedelta(seconds=float(sys.argv[1])))
for step in range(40):
    work(step)
print("done")
