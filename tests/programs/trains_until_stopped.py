"""Reduce over all ranks until the file "stop" exists, note each step in a file, and end as "NAME.fault" says.

Arguments: the pause after a step and the timeout of gloo, in seconds.
"""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

step_seconds, timeout = map(float, sys.argv[1:])
dist.init_process_group("gloo", timeout=timedelta(seconds=timeout))  # gloo's own is half an hour
name = f"{os.uname().nodename}-{os.environ['LOCAL_RANK']}"
attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
fault, stop = Path(name + ".fault"), Path("stop")
step = 0
with Path(name + ".rows").open("a", buffering=1) as rows:
    while True:
        total = torch.tensor([1.0, stop.exists()])
        dist.all_reduce(total)
        rows.write(f"{attempt} {total[0]:.0f} {step} {rank}\n")
        if total[1] > 0:  # seen by all ranks in the same step
            break
        if fault.exists():
            code = int(fault.read_text())
            fault.unlink()
            if code < 0:
                os.kill(os.getpid(), -code)
            os._exit(code)  # at once: with its threads alive, torch may abort while Python ends
        step += 1
        time.sleep(step_seconds)
dist.destroy_process_group()
