"""Meet in a barrier, after attempts in which one rank after the other kills itself. Argument: the number of these."""

import os
import signal
import sys

import torch
import torch.distributed as dist
from say import say

dist.init_process_group("gloo")
attempt, total = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), torch.ones(1)
dist.all_reduce(total)
say("there", attempt, int(total.item()))
if attempt < int(sys.argv[1]):
    if dist.get_rank() == attempt % dist.get_world_size():
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()
dist.barrier()
dist.destroy_process_group()  # else a thread of gloo's that lets go of its last work may abort a cold one's end
