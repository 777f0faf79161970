"""What every peer of train.py trains: the same models, samples, optimizers and losses, and the watch on their steps."""

import os
import resource
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.utils.data import Dataset, TensorDataset

CUDA = torch.cuda.is_available()
WARM_UP, TAIL = 20, 3
"""Optimizer steps before and after the measured ones; the end of a run does not count."""
BLOCKS = 10


class Block(nn.Module):
    """A layer of a GPT: causal attention, then an MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.before(x)).chunk(3, -1)
        )
        seen = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).flatten(2))
        return x + self.mlp(self.between(x))


class GPT(nn.Module):
    """Tokens to logits."""

    def __init__(self, words: int, length: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.length, self.width, self.layers = length, width, layers
        self.tokens, self.places = nn.Embedding(words, width), nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.last, self.head = nn.LayerNorm(width), nn.Linear(width, words, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.last(self.blocks(self.tokens(tokens) + self.places(places))))

    def token_flops(self) -> float:
        """Of forward and backward, per token: 6 N + 12 L T d (the PaLM paper, appendix B); N has no embeddings."""
        looked_up = self.tokens.weight.numel() + self.places.weight.numel()
        weights = sum(parameter.numel() for parameter in self.parameters()) - looked_up
        return 6 * weights + 12 * self.layers * self.length * self.width


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))


def small_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def conv_net() -> nn.Module:
    layers: list[nn.Module] = []
    for fewer, more in ((3, 16), (16, 32), (32, 64)):
        layers += [nn.Conv2d(fewer, more, 3, padding=1, bias=False), nn.BatchNorm2d(more), nn.ReLU(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(256, 10))


def gpt() -> nn.Module:
    if CUDA:  # one that fills the GPU: the large one trains in some 40 GiB
        large = torch.cuda.get_device_properties(0).total_memory > 60 * 1024**3
        return GPT(words=32768, length=1024, width=2048 if large else 1024, layers=12, heads=16)
    return GPT(words=256, length=64, width=128, layers=4, heads=4)


def sgd(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return SGD(parameters, lr=0.01, momentum=0.9, fused=True)


def adamw(parameters: Iterable[nn.Parameter]) -> Optimizer:
    return AdamW(parameters, lr=3e-4, fused=True)


def vectors(count: int) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 16), torch.randint(4, (count,))


def wider_vectors(count: int) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 64), torch.randint(10, (count,))


def images(count: int) -> tuple[Tensor, Tensor]:
    return torch.randn(count, 3, 16, 16), torch.randint(10, (count,))


def texts(count: int) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(32768, (count, 1025)) if CUDA else torch.randint(256, (count, 65))
    return tokens[:, :-1], tokens[:, 1:]


class Samples(Dataset[Any]):
    """A user's own class, sample by sample."""

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self.inputs, self.targets = inputs, targets

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.inputs[index], self.targets[index]


class Batches(Samples):
    """One that cuts out whole batches, so that samples cost next to nothing; together with `as_it_is`."""

    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        return self.inputs[indices], self.targets[indices]


def as_it_is(batch: Any) -> Any:
    return batch


@dataclass(frozen=True)
class Case:
    """What is trained, and for how long."""

    name: str
    model: Callable[[], nn.Module]
    samples: Callable[[int], tuple[Tensor, Tensor]]
    batch: int
    """Samples of a rank in one pass."""
    steps: int
    """Optimizer steps measured, without accumulation."""
    optimizer: Callable[[Iterable[nn.Parameter]], Optimizer] = sgd
    clip: float | None = None
    bf16: bool = False
    dataset: Callable[[Tensor, Tensor], Dataset[Any]] = TensorDataset
    accumulations: Sequence[int] = (1, 4)
    turns: int = 1
    """It is measured in every so manieth round."""


CASES = {
    "mlp": Case("tiny MLP", mlp, vectors, batch=8, steps=3000),
    "own": Case("tiny MLP, own Dataset", mlp, vectors, batch=8, steps=3000, dataset=Samples, accumulations=[1]),
    "batches": Case("tiny MLP, whole batches", mlp, vectors, batch=8, steps=3000, dataset=Batches, accumulations=[1]),
    "small": Case("small MLP", small_mlp, wider_vectors, batch=32, steps=1500, optimizer=adamw, accumulations=[1]),
    "conv": Case("conv net", conv_net, images, batch=8, steps=500, turns=2),
    "gpt": Case(
        "GPT",
        gpt,
        texts,
        batch=8 if CUDA else 4,
        steps=40 if CUDA else 100,
        optimizer=adamw,
        clip=1.0,
        bf16=CUDA,
        dataset=Batches if CUDA else TensorDataset,  # on a GPU the same way of fetching for all
        turns=2,
    ),
}


@dataclass
class Run:
    """One peer's turn at a case."""

    case: Case
    ranks: int
    accumulation: int
    steps: int
    """Optimizer steps measured."""
    folder: Path
    log_every_steps: int
    watch: Callable[..., None] = field(default=lambda *_: None)
    """Told of each optimizer step, by the optimizer itself: at the same price for every peer."""

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.total = WARM_UP + self.steps + TAIL
        # One epoch holds the whole run, and what a loader reads ahead.
        count = (self.total + 10) * self.accumulation * self.ranks * self.case.batch
        self.dataset = self.case.dataset(*self.case.samples(count))
        self.model = self.case.model()

    @property
    def collate(self) -> Callable[[Any], Any] | None:
        """None: the usual one."""
        return as_it_is if self.case.dataset is Batches else None

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> Optimizer:
        made = self.case.optimizer(parameters)
        made.register_step_post_hook(self.watch)
        return made


def loss_of(model: nn.Module, inputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(model(inputs).flatten(0, -2), targets.flatten())


class Stopwatch:
    """The time of every block of steps; a run is BLOCKS of them, with one log point in each."""

    def __init__(self, each: int) -> None:
        self._each, self._next, self._done = each, WARM_UP, 0
        self._last = WARM_UP + BLOCKS * each
        self._times: list[tuple[float, float]] = []
        self._proportional = 0.0

    def __call__(self, *_: Any) -> None:
        self._done += 1
        if self._done == self._next:
            if CUDA:
                torch.cuda.synchronize()
            self._times.append((time.perf_counter(), time.process_time()))
            if self._done < self._last:
                self._next += self._each
            else:
                self._proportional = _pss()

    def found(self) -> dict[str, Any]:
        """Seconds of a step in each block, and the processor's; memory in MB: the peak, and PSS after the blocks."""
        walls, cpus = (
            [(after - before) / self._each for before, after in pairwise(clock)]
            for clock in zip(*self._times, strict=True)
        )
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
        return {"blocks": walls, "cpu": cpus, "peak": peak, "proportional": self._proportional}


def _pss() -> float:
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) * 1024 / 1e6


def own_core() -> None:
    """Keep this rank, and the threads it starts from now on, on a core of its own; where a GPU computes, do nothing."""
    cores, local_rank = sorted(os.sched_getaffinity(0)), int(os.environ["LOCAL_RANK"])
    if not CUDA and local_rank < len(cores):
        os.sched_setaffinity(0, {cores[local_rank]})
