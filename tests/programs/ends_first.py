"""Run by test_control.py as each of two ranks: rank 0, which serves the store, ends while rank 1 waits."""

import sys
from datetime import timedelta

from torch.distributed import TCPStore

from ddp_kit.distributed.control import Control

rank, port = map(int, sys.argv[1:])
store = TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False, timeout=timedelta(minutes=5))
control = Control(store, rank, 2, lambda _: None)
if rank == 0:
    print(store.port, flush=True)
    control.announce("name")
assert control.wait("name", None) == ""
if rank == 0:
    sys.stdin.readline()  # until rank 1 has received it, too
else:
    print("received", flush=True)
    control.wait("another name", None)
    sys.stdin.readline()  # until rank 0 and its store have ended
    print(control.rank_0_ended)
