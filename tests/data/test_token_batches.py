"""Batches by tokens."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset

from ddp_kit import DataError, Loss, TokenBatchSampler, Trainer, TrainerConfig


@given(st.lists(st.integers(1, 20), min_size=1, max_size=60), st.integers(20, 80), st.integers(0, 5))
def test_token_batches_have_each_sample_once_within_the_limit(lengths: list[int], tokens: int, epoch: int) -> None:
    sampler = TokenBatchSampler(lengths, tokens)
    sampler.set_epoch(epoch)
    batches = [*sampler]
    assert sorted(index for batch in batches for index in batch) == [*range(len(lengths))]
    assert all(len(batch) * max(lengths[index] for index in batch) <= tokens for batch in batches)
    assert len(batches) == len(sampler)
    assert batches == [*sampler]


def test_token_batches_vary_by_epoch() -> None:
    sampler = TokenBatchSampler([3, 4] * 20, 12)
    first = [*sampler]
    sampler.set_epoch(1)
    assert [*sampler] != first
    plain = TokenBatchSampler([4, 2, 2, 3], 6, shuffle=False)
    assert [*plain] == [[1, 2], [3], [0]]


def test_token_batches_name_a_sample_over_the_limit() -> None:
    with pytest.raises(DataError, match="sample 1 has 9 tokens, more than the limit of 8 tokens per batch"):
        TokenBatchSampler([3, 9], 8)
    with pytest.raises(DataError, match="no lengths"):
        TokenBatchSampler([], 8)


class Texts(Dataset[Tensor]):
    lengths = [1 + 7 * number % 11 for number in range(40)]

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> Tensor:
        return 1 + torch.arange(self.lengths[index]) % 5


def token_loss(model: nn.Module, batch: Tensor) -> Loss:
    losses = F.cross_entropy(model(batch).flatten(0, 1), batch.flatten(), ignore_index=0, reduction="sum")
    return Loss(losses, (batch > 0).sum())


def trained_on_tokens(folder: Path, **settings: Any) -> Trainer:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(6, 4), nn.Dropout(0.2), nn.Linear(4, 6)).double()
    config = TrainerConfig(checkpoint={"dir": folder}, accumulation_steps=2, **settings)
    trainer = Trainer(model, lambda parameters: torch.optim.SGD(parameters, lr=0.1), token_loss, config)
    loader = DataLoader(
        Texts(),
        batch_sampler=TokenBatchSampler(Texts.lengths, 24),
        collate_fn=lambda texts: pad_sequence(texts, batch_first=True),
    )
    trainer.fit(loader)
    return trainer


def test_token_batches_run_resumes_bitwise(tmp_path: Path) -> None:
    whole = trained_on_tokens(tmp_path / "whole", epochs=2)
    trained_on_tokens(tmp_path / "split", max_steps=whole.step // 2 + 1)
    rest = trained_on_tokens(tmp_path / "split", epochs=2)
    assert rest.step == whole.step
    assert all(map(torch.equal, rest.model.parameters(), whole.model.parameters()))
