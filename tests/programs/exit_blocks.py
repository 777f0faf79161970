"""Fail on rank 1, whose exit then blocks; rank 0 waits for it in a collective.

Arguments: the timeout of the collective, in seconds; "catches" for an exception on rank 0 that is caught.
"""

import atexit
import ctypes
import sys
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from ddp_kit.uncaught import show_without_traceback


@record
def fail(message):
    raise ValueError(message)


dist.init_process_group("gloo")
rank = dist.get_rank()
dist.all_reduce(torch.ones(1))
show_without_traceback(rank)  # as a Trainer does
group = dist.new_group(timeout=timedelta(seconds=float(sys.argv[1])))
if rank == 1:
    atexit.register(ctypes.PyDLL(None).pause)  # blocks in C with the interpreter lock held, as a clean-up of NCCL may
    fail("no luck")
if "catches" in sys.argv:
    with suppress(ValueError):
        fail("caught")
dist.barrier(group=group)
