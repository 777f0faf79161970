"""Join a process group that the script has made. MEETING: its file."""

import os

import torch.distributed as dist
from say import say

from ddp_kit.distributed import world

rank = int(os.environ.pop("RANK"))
os.environ.pop("WORLD_SIZE")
dist.init_process_group("gloo", init_method="file://" + os.environ["MEETING"], rank=rank, world_size=2)
found = world.join()
say(found.rank, found.world_size, found.is_main)
