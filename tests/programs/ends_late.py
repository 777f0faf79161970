"""Call all_ranks_end on three ranks, with rank 2 "late" or "together" with the others (argument)."""

import sys
import time
from pathlib import Path

import torch.distributed as dist
from say import say

from ddp_kit.distributed import world

rank = world.join().rank


def wait_for_ended(number):
    while len([*Path().glob("ended.*")]) < number:
        time.sleep(0.01)


late = sys.argv[1] == "late"
if late and rank == 2:
    wait_for_ended(2)
all_end = world.all_ranks_end(3, seconds=0.1 if late else 1000)
say(rank, all_end, dist.is_initialized())
Path(f"ended.{rank}").touch()
