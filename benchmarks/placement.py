"""The cost of placement: a step of the Trainer, compared with a loop by hand with the same calls of torch.

    python benchmarks/placement.py --rounds 5          # on the CPU with gloo, or on two GPUs

A small GPT at 2 ranks, without clipping and accumulation. Both ways train in the same processes, a few steps in turn;
the figures are medians over the rounds of each round's median step.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import count, islice
from typing import Any

import torch
import torch.nn.functional as F
from exactness import PLAN, by_samples
from report import machine, table, write_section
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler

from ddp_kit import Trainer, TrainerConfig

RANKS, TURNS, TURN = 2, 9, 6
STEPS = TURNS * TURN
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
        max_steps=STEPS, micro_batch_size=SAMPLES, log_every_steps=STEPS, parallel=parallel, verify_ranks="off"
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
    from torch.distributed.tensor import DTensor
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
    elif name == "tensor 2":  # one call of a foreach kernel takes either whole or split parameters
        split = {each: isinstance(each, DTensor) for each in model.parameters()}
        optimizer = adamw([{"params": [each for each in split if split[each] is kind]} for kind in (True, False)])
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


def worker(name: str) -> None:
    """Print the medians of both ways' steps in milliseconds, measured in turns of TURN steps in the same processes."""
    torch.manual_seed(0)
    ways = {"by hand": by_hand(name), "ddpkit": with_trainer(name)}
    times: dict[str, list[float]] = {way: [] for way in ways}
    for turn in range(TURNS):
        for way, steps in ways.items():
            last = time.perf_counter()
            for _ in islice(steps, TURN):
                if torch.cuda.is_available():
                    torch.cuda.synchronize()
                now = time.perf_counter()
                if turn:  # the first turn warms up
                    times[way].append(now - last)
                last = now
    print("medians", json.dumps({way: 1000 * statistics.median(each) for way, each in times.items()}), flush=True)


def measured(name: str) -> dict[str, float]:
    """The medians of the slower rank."""
    command = [sys.executable, "-m", "ddp_kit", "launch", "--nproc-per-node", str(RANKS), __file__, "--worker", name]
    job = subprocess.run(command, capture_output=True, text=True, check=True)
    ranks = [json.loads(line.partition("medians ")[2]) for line in job.stdout.splitlines() if "medians " in line]
    return {way: max(rank[way] for rank in ranks) for way in ranks[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--worker")
    asked = parser.parse_args()
    if asked.worker:
        worker(asked.worker)
        return
    found: dict[str, list[dict[str, float]]] = {name: [] for name in PLACEMENTS}
    for _ in range(asked.rounds):
        for name, rounds in found.items():
            rounds.append(measured(name))
    rows = []
    for name, rounds in found.items():
        hand, ours = (statistics.median(each[way] for each in rounds) for way in ("by hand", "ddpkit"))
        ratios = [each["ddpkit"] / each["by hand"] for each in rounds]
        spread = f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})"
        rows.append((name, f"{hand:.2f}", f"{ours:.2f}", spread))
    shown = table(("placement", "by hand, ms", "ddpkit, ms", "ddpkit / by hand"), rows)
    header = f"`python benchmarks/placement.py --rounds {asked.rounds}` on {machine(('torch', 'ddpkit'))}. Medians."
    print(shown)
    write_section("placement", f"{header}\n\n{shown}")


if __name__ == "__main__":
    main()
