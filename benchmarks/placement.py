"""What placement costs: a step of the Trainer beside one of a loop by hand with the same calls of torch.

    python benchmarks/placement.py --rounds 5          # on the CPU with gloo, or on two GPUs

A small GPT at 2 ranks, without clipping and accumulation. Each round starts both ways of each placement; the figures
are medians over the rounds of each run's median step.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from itertools import count, islice
from typing import Any

import torch
import torch.nn.functional as F
from exactness import PLAN, by_samples
from report import machine, table, write_section
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from ddp_kit import Trainer, TrainerConfig

RANKS, STEPS, WARM_UP = 2, 40, 10
WORDS, WIDTH, HEADS, LENGTH, BLOCKS, SAMPLES = 1000, 192, 4, 64, 4, 8
PLACEMENTS: dict[str, Any] = {
    "ddp": "ddp",
    "zero1": "zero1",
    "fsdp": "fsdp",
    "tensor 2": {"tensor": 2, "tensor_plan": PLAN},
}


class Block(nn.Module):
    """A transformer's layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm1(x)
        heads = [
            part.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for part in (self.query(normed), self.key(normed), self.value(normed))
        ]
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Model(nn.Module):
    """A small GPT."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


def data() -> list[tuple[Tensor, Tensor, Tensor]]:
    tokens = torch.randint(WORDS, (SAMPLES * RANKS * 4, LENGTH))
    return [(each, each, each) for each in tokens]


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-3, foreach=True)


def with_trainer(name: str) -> Iterator[None]:
    """Steps of the Trainer."""
    parallel = PLACEMENTS[name]
    config = TrainerConfig(
        max_steps=STEPS, micro_batch_size=SAMPLES, log_every=STEPS, parallel=parallel, verify_ranks="off"
    )
    trainer = Trainer(Model(), adamw, by_samples, config)
    for _ in trainer.steps(data()):
        yield


def by_hand(name: str) -> Iterator[None]:
    """The same with torch alone."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    from torch.nn.parallel import DistributedDataParallel

    gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if gpu else "gloo")
    device = torch.device("cuda", dist.get_rank()) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    model: Any = Model().to(device)
    if name == "fsdp":
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
    elif name == "tensor 2":
        styles = {"column": ColwiseParallel(), "row": RowwiseParallel()}
        plan = {pattern: styles[kind] for pattern, kind in PLAN.items()}
        parallelize_module(model, init_device_mesh(device.type, (RANKS,)), plan)
    else:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True)
    if name == "zero1":
        optimizer: Any = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-3, foreach=True)
    else:
        optimizer = adamw(model.parameters())
    samples: Any = data()
    order = None if name == "tensor 2" else DistributedSampler(samples)
    batches = DataLoader(samples, SAMPLES, sampler=order, shuffle=order is None)
    for batch in islice((batch for _ in count() for batch in batches), STEPS):
        optimizer.zero_grad()
        by_samples(model, [each.to(device) for each in batch]).backward()
        optimizer.step()
        yield
    dist.destroy_process_group()


def worker(way: str, name: str) -> None:
    """Print the median of the steps, in milliseconds, on rank 0."""
    torch.manual_seed(0)
    ways: dict[str, Callable[[str], Iterator[None]]] = {"ddpkit": with_trainer, "by hand": by_hand}
    times, last = [], time.perf_counter()
    for _ in ways[way](name):
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        now = time.perf_counter()
        times.append(now - last)
        last = now
    print("median", json.dumps(1000 * statistics.median(times[WARM_UP:])), flush=True)


def measured(way: str, name: str) -> float:
    command = [sys.executable, "-m", "ddp_kit", "launch", "--nproc-per-node", str(RANKS), __file__, "--worker"]
    job = subprocess.run([*command, way, name], capture_output=True, text=True, check=True)
    return max(float(line.rpartition("median ")[2]) for line in job.stdout.splitlines() if "median " in line)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--worker", nargs=2)
    asked = parser.parse_args()
    if asked.worker:
        worker(*asked.worker)
        return
    found: dict[tuple[str, str], list[float]] = {}
    for _ in range(asked.rounds):
        for name in PLACEMENTS:
            for way in ("by hand", "ddpkit"):
                found.setdefault((name, way), []).append(measured(way, name))
    rows = []
    for name in PLACEMENTS:
        hand, ours = (statistics.median(found[name, way]) for way in ("by hand", "ddpkit"))
        rows.append((name, f"{hand:.2f}", f"{ours:.2f}", f"{ours / hand:.3f}"))
    shown = table(("placement", "by hand, ms", "ddpkit, ms", "ddpkit / by hand"), rows)
    header = f"`python benchmarks/placement.py --rounds {asked.rounds}` on {machine(('torch', 'ddpkit'))}. Medians."
    print(shown)
    write_section("placement", f"{header}\n\n{shown}")


if __name__ == "__main__":
    main()
