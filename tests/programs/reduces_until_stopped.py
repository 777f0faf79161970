"""Reduce over gloo until a file exists. Arguments: a file or pipe for the process id of each rank; that file."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
Path(sys.argv[1]).write_text(f"{os.getpid()}\n")
while True:
    total[0] = Path(sys.argv[2]).exists()
    dist.all_reduce(total)
    if total[0] > 0:
        break
dist.destroy_process_group()
