"""Fail on three ranks: rank 0 exits a second after all have printed, the others wait to be terminated."""

import atexit
import os
import time
from pathlib import Path

import torch.distributed as dist


def exit_slowly():
    Path(f"printed.{rank}").touch()
    while rank > 0 or len([*Path().glob("printed.*")]) < 3:
        time.sleep(0.01)
    time.sleep(1)
    os._exit(1)


dist.init_process_group("gloo")
rank = dist.get_rank()
print("before")
dist.barrier()
atexit.register(exit_slowly)
raise ValueError("no luck")
