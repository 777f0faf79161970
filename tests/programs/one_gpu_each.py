"""Join with one visible GPU per process. Argument: "own" if each process sees another GPU."""

import os
import sys
from unittest import mock

import fake_cuda
import torch.distributed as dist
from say import say

from ddp_kit.distributed import world

uuid = "GPU-" + (os.environ["LOCAL_RANK"] if sys.argv[1] == "own" else "0")
nccl = mock.patch.object(dist, "is_nccl_available", return_value=True)
with fake_cuda.visible_gpus(1, uuid=uuid), nccl, mock.patch.object(dist, "init_process_group") as init:
    found = world.join()
say(found.local_rank, found.device, init.call_args.args[0], init.call_args.kwargs["device_id"])
