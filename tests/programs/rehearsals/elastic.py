"""The loop of PyTorch's elastic example: a checkpoint per epoch, and restarts at the beginning of an epoch."""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=12)
parser.add_argument("--lr", type=float, default=0.1)
parser.add_argument("--checkpoint-file", type=Path, required=True)
args = parser.parse_args()


class State:
    """What a checkpoint holds."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.epoch = -1
        self.model, self.optimizer = model, optimizer

    def capture_snapshot(self) -> dict:
        return {
            "epoch": self.epoch,
            "state_dict": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
        }

    def apply_snapshot(self, saved: dict) -> None:
        self.epoch = saved["epoch"]
        self.model.load_state_dict(saved["state_dict"])
        self.optimizer.load_state_dict(saved["optimizer"])

    def save(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        torch.save(self.capture_snapshot(), file.with_suffix(".tmp"))
        file.with_suffix(".tmp").replace(file)


def adjust_learning_rate(optimizer: torch.optim.Optimizer, epoch: int) -> None:
    for group in optimizer.param_groups:
        group["lr"] = args.lr * 0.5 ** (epoch // 2)


dist.init_process_group("gloo")
torch.manual_seed(0)
x = torch.randn(160, 5)
data = TensorDataset(x, x.prod(dim=1, keepdim=True))
model = DistributedDataParallel(nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1)))
optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4)
sampler = DistributedSampler(data)
train_loader = DataLoader(data, batch_size=10, sampler=sampler, num_workers=1)
val_loader = DataLoader(data, batch_size=40)
state = State(model, optimizer)
if args.checkpoint_file.exists():
    state.apply_snapshot(torch.load(args.checkpoint_file))
for epoch in range(state.epoch + 1, args.epochs):
    state.epoch = epoch
    sampler.set_epoch(epoch)
    adjust_learning_rate(optimizer, epoch)
    model.train()
    for inputs, targets in train_loader:
        loss = nn.functional.mse_loss(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.no_grad():
        losses = [nn.functional.mse_loss(model.module(inputs), targets) for inputs, targets in val_loader]
    if dist.get_rank() == 0:
        print(f"epoch {epoch}: {sum(losses).item():.3f}")
        state.save(args.checkpoint_file)
dist.barrier()
dist.destroy_process_group()
