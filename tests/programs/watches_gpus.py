"""Watch the GPUs of ranks: `watches_gpus.py RANKS PIDS`, both in JSON. Each line of the input is a check; print all."""

import json
import sys
from dataclasses import asdict

from ddp_kit.health.gpu_errors import GpuErrors

ranks, pids = map(json.loads, sys.argv[1:])
errors = GpuErrors(ranks, {int(rank): pid for rank, pid in pids.items()})
with errors.watched() as check:
    print("watching", flush=True)
    for _ in sys.stdin:
        check()
        print("checked", flush=True)
print(json.dumps([asdict(error) for error in errors.found]))
