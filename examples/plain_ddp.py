"""A plain DDP script that does not use ddpkit: scripts for torchrun also run under `ddpkit launch`.

ddpkit launch --nproc-per-node 2 examples/plain_ddp.py
"""

import os
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    dist.init_process_group("nccl" if gpu else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(rank)  # different data on every rank; DDP broadcasts rank 0's weights
    model = DistributedDataParallel(nn.Linear(10, 1).to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(200):
        x = torch.randn(32, 10, device=device)
        loss = F.mse_loss(model(x), x.sum(dim=1, keepdim=True))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    total = loss.detach().clone()
    dist.all_reduce(total)
    if rank == 0:
        print(f"{world_size} ranks, mean loss {total.item() / world_size:.2e}")
    if not gpu:
        # After a collective, gloo's threads still need the GIL for a moment. A process that exits before that aborts or
        # hangs (torch 2.13, pytorch/pytorch pull request 179291).
        time.sleep(0.1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
