"""The script that launch.py launches: joins its peers and leaves a mark, `ATTEMPT.RANK` with the time and the pid.

`python launch_worker.py FOLDER once|train|idle [cuda]`: end there; continue with one all_reduce after the other; or do
without any. The last two end with a file `stop` in FOLDER. With `cuda` the tensors are on GPUs, over NCCL where each
rank has its own, else over gloo.
"""

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

folder, then = Path(sys.argv[1]), sys.argv[2]
# For one process `accelerate launch --cpu` starts plain Python.
alone = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
if "RANK" not in os.environ:
    os.environ.update(alone)

device, backend = torch.device("cpu"), "gloo"
if "cuda" in sys.argv[3:]:
    gpus = torch.cuda.device_count()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]) % gpus)
    torch.cuda.set_device(device)
    backend = "nccl" if int(os.environ["WORLD_SIZE"]) <= gpus else "gloo"
dist.init_process_group(backend, timeout=timedelta(seconds=60), device_id=device if backend == "nccl" else None)
if then != "idle":
    one = torch.ones(1, device=device)
    dist.all_reduce(one)
    one.item()  # on a GPU it is computed by now
moment = time.monotonic()  # one clock for all processes of this machine

mark = folder / f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}.{os.environ['RANK']}"
new = mark.with_suffix(f"{mark.suffix}-{os.getpid()}")
new.write_text(f"{moment} {os.getpid()}")
new.rename(mark)  # seen whole or not at all

stop = folder / "stop"
while then == "train":
    stopped = torch.tensor([float(stop.exists())], device=device)
    dist.all_reduce(stopped)
    if stopped.item() > 0:  # seen by all ranks in the same step
        break
    time.sleep(0.02)
while then == "idle" and not stop.exists():
    time.sleep(0.05)
dist.destroy_process_group()
