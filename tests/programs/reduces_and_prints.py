"""Reduce over all ranks, and print rank, world size, sum and arguments."""

import os
import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
dist.monitored_barrier()
os.write(1, f"{dist.get_rank()} of {dist.get_world_size()}: {int(total)} {sys.argv[1:]}\n".encode())
dist.destroy_process_group()
