"""Reduce 20 times, then call another function on each rank.

Arguments: the functions of ranks 0 and 1, "end", "work", "regex" or "pause"; the seconds that `work` takes.
"""

import os
import sys
import time

import torch
import torch.distributed as dist
import ways_to_hang

from ddp_kit.heartbeat import HeartbeatField, heartbeat_memory


def end():
    pass


def work():
    began = time.monotonic()
    while time.monotonic() < began + float(sys.argv[3]):
        time.sleep(0.01)
    print("worked")


dist.init_process_group("gloo")
for _ in range(19):
    dist.all_reduce(torch.ones(1))
# The last one is not counted before the rank is in its function.
while heartbeat_memory()[HeartbeatField.COLLECTIVES] < 19:
    time.sleep(0.01)
dist.all_reduce(torch.ones(1))
functions = {"end": end, "work": work, "regex": ways_to_hang.regex, "pause": ways_to_hang.pause}
functions[sys.argv[1 + int(os.environ["RANK"])]]()
