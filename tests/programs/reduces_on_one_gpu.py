"""Reduce a tensor on GPU 0 over gloo, and print the sum."""

import torch
import torch.distributed as dist
from say import say

dist.init_process_group("gloo")
total = torch.full((1 << 16,), dist.get_rank() + 1.0, device="cuda:0")
dist.all_reduce(total)
say("total", total.unique().tolist())
dist.destroy_process_group()
