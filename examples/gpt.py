"""Train a small character-level GPT on the source code of Python's standard library.

ddpkit launch --nproc-per-node 2 examples/gpt.py
ddpkit launch --nproc-per-node 2 examples/gpt.py --parallel fsdp
"""

import argparse
import math
import sysconfig
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, OneCycleLR
from torch.utils.data import Dataset, random_split

from ddp_kit import Loss, Trainer, TrainerConfig

IGNORED = -100  # cross_entropy's default ignore_index
MODULES = """
argparse ast collections/__init__ dataclasses difflib doctest inspect logging/__init__ optparse pathlib
pickle random shutil subprocess tarfile textwrap threading tokenize traceback zipfile
"""


class Lines(Dataset[tuple[Tensor, Tensor]]):
    """Blocks of source code, such as functions, as sequences of characters, padded to `length`.

    Padding has no target, so samples have different numbers of tokens with a target.
    """

    def __init__(self, text: str, length: int) -> None:
        letters = sorted(set(text))
        number = {letter: index for index, letter in enumerate(letters)}
        self.vocabulary = len(letters)
        self.length = length
        pieces = [piece for block in text.split("\n\n") for piece in _cut(block + "\n", length + 1)]
        self.samples = [torch.tensor([number[letter] for letter in piece]) for piece in pieces if len(piece) > 1]

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        sample = self.samples[index]
        missing = self.length + 1 - len(sample)
        return F.pad(sample[:-1], (0, missing)), F.pad(sample[1:], (0, missing), value=IGNORED)


def _cut(block: str, length: int) -> list[str]:
    return [block[start : start + length] for start in range(0, len(block), length)]


def load(length: int) -> Lines:
    library = Path(sysconfig.get_path("stdlib"))
    files = [library / f"{name}.py" for name in MODULES.split()]
    text = "\n\n".join(file.read_text(encoding="utf-8") for file in files if file.exists())
    return Lines("".join(letter if letter.isascii() else "?" for letter in text), length)


def unigram_entropy(data: Lines) -> float:
    """The cross-entropy, in nats per character, of a model that knows only the frequency of each character."""
    counts = torch.bincount(torch.cat(data.samples), minlength=data.vocabulary).double()
    shares = counts[counts > 0] / counts.sum()
    return -(shares * shares.log()).sum().item()


class Block(nn.Module):
    """A pre-norm transformer block: causal self-attention, then an MLP, each with a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.output = nn.Linear(width, width)
        self.network = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        samples, length, width = x.shape
        parts = self.query_key_value(self.norm1(x)).view(samples, length, 3, self.heads, width // self.heads)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.output(attended.transpose(1, 2).reshape(samples, length, width))
        result: Tensor = x + self.network(self.norm2(x))
        return result


class Gpt(nn.Module):
    def __init__(self, vocabulary: int, length: int, width: int = 96, heads: int = 4, layers: int = 3) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(length, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.logits = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        logits: Tensor = self.logits(self.norm(self.blocks(x)))
        return logits


def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
    """The summed loss of the characters with a target, with their number as the weight, so that all count equally."""
    tokens, targets = batch
    logits = model(tokens).flatten(0, 1)
    loss = F.cross_entropy(logits.float(), targets.flatten(), reduction="sum", ignore_index=IGNORED)
    return Loss(loss, weight=(targets != IGNORED).sum())


def warm_up_and_down(optimizer: torch.optim.Optimizer, steps: int, peak: float) -> LRScheduler:
    return OneCycleLR(optimizer, max_lr=peak, total_steps=steps + 1, pct_start=0.1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--parallel", default="ddp", choices=["ddp", "zero1", "fsdp"], help="the parallel strategy")
    arguments = parser.parse_args()

    torch.manual_seed(0)
    data = load(length=96)
    train_data, test_data = random_split(data, [0.98, 0.02], generator=torch.Generator().manual_seed(0))
    bf16 = torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)
    config = TrainerConfig(
        max_steps=arguments.steps,
        global_batch_size=64,
        accumulation_steps=2,
        precision="bf16" if bf16 else "fp32",
        max_grad_norm=1.0,
        parallel=arguments.parallel,
        log_every_steps=25,
    )
    trainer = Trainer(
        Gpt(data.vocabulary, data.length),
        lambda parameters: torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.01),
        loss_fn,
        config,
        scheduler=lambda optimizer: warm_up_and_down(optimizer, arguments.steps, peak=3e-3),
    )
    result = trainer.fit(train_data, test_data)
    if trainer.world.is_main:
        print(f"loss on unseen text: {result.metrics['loss']:.3f} nats per character")
        print(f"loss of a model that knows only character frequencies: {unigram_entropy(data):.3f}")
        print(f"ratio of their perplexities: {math.exp(unigram_entropy(data) - result.metrics['loss']):.1f}")


if __name__ == "__main__":
    main()
