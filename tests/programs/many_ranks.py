"""Run by test_sockets.py as the only worker of a launcher: makes the connections of many ranks, and a barrier of them.

Prints the number of descriptors that the launcher has open.
"""

import os
import resource
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import torch
from torch.distributed import TCPStore

from ddp_kit.distributed import barrier
from ddp_kit.distributed.world import World

ranks = int(sys.argv[1])
launcher = int(os.environ["LAUNCHER"])
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
threading.stack_size(256 << 10)
port = int(os.environ["MASTER_PORT"])
stores = [TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(minutes=5)) for _ in range(ranks)]
all_barriers = [barrier._Barriers(store, rank, ranks) for rank, store in enumerate(stores)]


def arrive(rank: int) -> None:
    world = World(rank, ranks, 0, 1, 0, torch.device("cpu"))
    barrier._Wait(world, all_barriers[rank], "barrier/1", "fit()", "").until_all_arrived(300)


with ThreadPoolExecutor(ranks) as pool:
    for _ in pool.map(arrive, range(ranks)):
        pass
print(len([*Path(f"/proc/{launcher}/fd").iterdir()]), flush=True)
sys.stdout.flush()
os._exit(0)
