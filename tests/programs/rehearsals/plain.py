"""A plain DDP loop that resumes exactly, and flags that each plant one fault in how it resumes.

It has everything that a checkpoint must contain: momentum, a schedule, a gradient scaler, accumulation over the ends of
epochs, dropout, BatchNorm statistics of each rank, and an average of the weights. Arguments: FOLDER [FAULT].
"""

import random
import sys
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

ACCUMULATED, SAVED_EVERY, EPOCHS, BATCHES, BATCH = 2, 7, 6, 15, 4

folder, fault = Path(sys.argv[1]), (sys.argv[2] if len(sys.argv) > 2 else "")
dist.init_process_group("gloo")
rank, ranks = dist.get_rank(), dist.get_world_size()
np.random.seed(rank)  # Python's generator is not seeded, as in most scripts
torch.manual_seed(0)
x = torch.randn(BATCHES * BATCH * ranks, 6)
data = TensorDataset(x, x.sum(dim=1, keepdim=True))
sampler = DistributedSampler(data, shuffle=True)
loader = DataLoader(data, BATCH, sampler=sampler)
net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 1))
model = DistributedDataParallel(net, broadcast_buffers=False)
average = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=5, gamma=0.5)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=4)
torch.manual_seed(100 + rank)
step = micro = first_epoch = first_batch = 0


def random_states() -> tuple[object, ...]:
    return random.getstate(), np.random.get_state(), torch.get_rng_state()


def set_random_states(states: tuple) -> None:
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


def files(of_rank: int) -> list[Path]:
    return sorted(folder.glob(f"step-???-rank-{of_rank}.pt"))


def load(path: Path) -> dict:
    return torch.load(path, weights_only=False)


states = None
if files(rank):
    saved = load(files(rank)[-1])
    weights = saved
    if fault == "batch_norm":
        weights = load(files(0)[-1])
    if fault == "other_file" and rank == 1:
        weights = load(files(rank)[-2])
    net.load_state_dict(weights["net"])
    if fault == "average":
        average.module.load_state_dict(saved["net"])
    else:
        average.load_state_dict(saved["average"])
    if fault != "optimizer":
        optimizer.load_state_dict(saved["optimizer"])
    if fault == "scheduler":
        optimizer.param_groups[0]["lr"] = 0.01
    else:
        scheduler.load_state_dict(saved["scheduler"])
    if fault != "scaler":
        scaler.load_state_dict(saved["scaler"])
    if fault != "seed":
        states = saved["random"]
    step = saved["step"]
    if fault != "position":
        first_epoch, first_batch = saved["epoch"], saved["batch"]
    micro = first_batch if fault == "accumulation" else saved["micro"]
    if fault == "partial_epoch":
        first_batch = 0
        micro = step * ACCUMULATED

for epoch in range(first_epoch, EPOCHS):
    if fault != "set_epoch":
        sampler.set_epoch(epoch)
    for batch, (inputs, targets) in enumerate(loader):
        if epoch == first_epoch and batch < first_batch:
            continue
        if states is not None:  # after the loader has drawn its seed
            set_random_states(states)
            states = None
        micro += 1
        is_last = micro % ACCUMULATED == 0
        loss = nn.functional.mse_loss(model(inputs), targets) / ACCUMULATED
        scaler.scale(loss).backward()
        if not is_last:
            continue
        before = {name: tensor.clone() for name, tensor in net.state_dict().items()}
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        optimizer.zero_grad()
        average.update_parameters(net)
        step += 1
        if step % SAVED_EVERY == 0:
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"step-{step:03}-rank-{rank}.pt"
            content = {
                "net": before if fault == "before_step" else net.state_dict(),
                "average": average.state_dict(),
                "optimizer": optimizer.state_dict(),
                "scheduler": scheduler.state_dict(),
                "scaler": scaler.state_dict(),
                "random": random_states(),
                "step": step,
                "micro": micro,
                "epoch": epoch,
                "batch": batch + 1,
            }
            torch.save(content, path.with_suffix(".tmp"))
            path.with_suffix(".tmp").replace(path)
            dist.barrier()
if rank == 0:
    print("trained", step)
dist.barrier()
dist.destroy_process_group()
