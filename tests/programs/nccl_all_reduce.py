"""Reduce a tensor and the gradients of DDP over NCCL."""

import os

import torch
import torch.distributed as dist
from say import say
from torch import nn
from torch.nn.parallel import DistributedDataParallel

device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
torch.cuda.set_device(device)
dist.init_process_group("nccl", device_id=device)
total = torch.ones(1 << 20, device=device)
dist.all_reduce(total)
model = DistributedDataParallel(nn.Linear(4, 4).to(device), device_ids=[device.index])
model(torch.ones(2, 4, device=device)).sum().backward()
say("reduced", total.sum().item() / (1 << 20), model.module.weight.grad.abs().sum().item() > 0)
dist.destroy_process_group()
