"""Time steps in which rank 1 computes its gradients late. Arguments: a file to meet at, and its timeout."""

import json
import sys
from datetime import timedelta
from time import perf_counter

import torch
import torch.distributed as dist
from say import say
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_kit.distributed.world import join
from ddp_kit.trainer import timing


class Loud(timing.StepClock):
    marks = []

    def end(self, phase):
        super().end(phase)
        self.marks.append((phase, self._last))
        if rank == 0 and phase == timing.BACKWARD and self.last_pass:
            store.set(f"computed {step}", "yes")


rank = join().rank
store = dist.FileStore(sys.argv[1], 2)
store.set_timeout(timedelta(seconds=float(sys.argv[2])))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 1))
x = torch.ones(4, 8)
placed = DistributedDataParallel(model, gradient_as_bucket_view=True)
timing._SECONDS_BETWEEN_WATCHED = 0.0
clock = Loud()
began = []
for step in range(3):
    clock.start()
    clock.last_pass = False
    with placed.no_sync():
        placed(x).sum().backward()
    clock.end(timing.BACKWARD)
    clock.last_pass = True
    loss = placed(x).sum()
    if rank == 1:
        store.wait([f"computed {step}"])  # the other rank has computed its gradients: it waits for ours
    began.append(perf_counter())
    phase = clock.watch(loss)
    loss.backward()
    clock.end(phase)
times = clock.read(1.0)
say(json.dumps({"rank": rank, "began": began, "marks": clock.marks, "communication": times.communication}))
