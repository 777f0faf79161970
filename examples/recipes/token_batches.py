"""Batches of sequences of similar length, with a token budget: little padding, and all tokens have equal weight.

ddpkit launch --nproc-per-node 2 examples/recipes/token_batches.py
"""

import os

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

from ddp_kit import Loss, TokenBatchSampler, Trainer, TrainerConfig

LETTERS, IGNORED = 8, -100
PASSES = 6  # micro-batches per optimizer step, over all ranks
Sample = tuple[Tensor, Tensor]


class Sums(Dataset[Sample]):
    """Synthetic sequences of 3 to 40 numbers; the target at each position is the parity of their sum so far."""

    def __init__(self, samples: int, seed: int = 0) -> None:
        draw = torch.Generator().manual_seed(seed)
        self.lengths: list[int] = (3 + 37 * torch.rand(samples, generator=draw) ** 3).long().tolist()
        self.numbers = [torch.randint(LETTERS, (length,), generator=draw) for length in self.lengths]

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> Sample:
        return self.numbers[index], self.numbers[index].cumsum(0) % 2


def collate(samples: list[Sample]) -> Sample:
    numbers, targets = zip(*samples, strict=True)
    padded = pad_sequence(list(targets), batch_first=True, padding_value=IGNORED)
    return pad_sequence(list(numbers), batch_first=True), padded


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(LETTERS, 16)
        self.memory = nn.GRU(16, 32, batch_first=True)
        self.output = nn.Linear(32, 2)

    def forward(self, numbers: Tensor) -> Tensor:
        logits: Tensor = self.output(self.memory(self.embedding(numbers))[0])
        return logits


def loss_fn(model: nn.Module, batch: Sample) -> Loss:
    numbers, targets = batch
    loss = F.cross_entropy(model(numbers).flatten(0, 1), targets.flatten(), ignore_index=IGNORED, reduction="sum")
    return Loss(loss, weight=(targets != IGNORED).sum())


def main() -> None:
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    config = TrainerConfig.from_command_line(epochs=6, accumulation_steps=max(1, PASSES // ranks), log_every_steps=25)
    torch.manual_seed(0)
    trainer = Trainer(Tagger(), lambda parameters: torch.optim.AdamW(parameters, lr=0.01), loss_fn, config)
    train_data, test_data = Sums(2000), Sums(300, seed=1)
    batches = TokenBatchSampler(train_data.lengths, tokens=256)
    trainer.fit(DataLoader(train_data, batch_sampler=batches, collate_fn=collate))
    batches = TokenBatchSampler(test_data.lengths, tokens=256, shuffle=False)
    metrics = trainer.evaluate(DataLoader(test_data, batch_sampler=batches, collate_fn=collate))
    if trainer.world.is_main:
        print(f"loss per number on unseen sequences: {metrics['loss']:.8f}")


if __name__ == "__main__":
    main()
