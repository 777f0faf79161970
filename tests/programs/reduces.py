"""Reduce ten times over gloo; before the sixth, a rank may end. Arguments: the rank, or "all"; how it ends.

How: "error" raises an exception, "exit" leaves at once with exit code 0, a number is an exit code of sys.exit. Without
arguments, none ends.
"""

import os
import sys

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
who, how = sys.argv[1:] or (None, None)
ends = who == "all" or who == str(dist.get_rank())
total = torch.ones(1)
for step in range(10):
    if ends and step == 5:
        if how == "error":
            raise ValueError("no luck")
        if how == "exit":
            os._exit(0)
        sys.exit(int(how))
    dist.all_reduce(total)
