"""Batches with a maximum number of tokens instead of a fixed number of samples."""

from collections.abc import Iterator, Sequence
from itertools import accumulate, groupby, pairwise

import torch
from torch.utils.data import Sampler

from ddp_kit.distributed.world import mixed_seed
from ddp_kit.errors import DataError


class TokenBatchSampler(Sampler[list[int]]):
    """A batch sampler that groups samples of similar length, with at most `tokens` tokens per padded batch.

        loader = DataLoader(dataset, batch_sampler=TokenBatchSampler(lengths, tokens=4096), collate_fn=pad)
        Trainer(...).fit(loader)    # each batch is one micro-batch of one rank

    The order is a pure function of (seed, epoch). All epochs have the same number of batches. Batches have different
    numbers of tokens, so the loss function should return `Loss(sum, number of tokens)`.

    Args:
        lengths: The number of tokens of each sample, in the dataset's order.
        tokens: The maximum number of tokens in a padded batch: (samples) x (length of the longest sample).
        shuffle: Whether to shuffle, in each epoch, the order of batches and the order of samples of equal length.
        seed: The seed of the shuffling.

    Raises:
        DataError: If there are no samples, or one is longer than `tokens`.
    """

    def __init__(self, lengths: Sequence[int], tokens: int, *, shuffle: bool = True, seed: int = 0) -> None:
        longest = max(range(len(lengths)), key=lengths.__getitem__, default=None)
        if longest is None:
            raise DataError("TokenBatchSampler got no lengths", "pass the number of tokens of each sample")
        if lengths[longest] > tokens:
            raise DataError(
                f"sample {longest} has {lengths[longest]} tokens, more than the limit of {tokens} tokens per batch",
                f"truncate or leave out long samples, or set tokens to {lengths[longest]} or more",
            )
        self._by_length = sorted(range(len(lengths)), key=lengths.__getitem__)
        self._lengths = lengths
        self._sizes = [*_sizes([lengths[index] for index in self._by_length], tokens)]
        self._shuffle = shuffle
        self._seed = seed
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration. The order of the batches depends on the epoch.

        Args:
            epoch: The index of the epoch, from 0.
        """
        self._epoch = epoch

    def __len__(self) -> int:
        """The number of batches in an epoch."""
        return len(self._sizes)

    def __iter__(self) -> Iterator[list[int]]:
        generator = torch.Generator().manual_seed(mixed_seed(self._seed, self._epoch))
        order = self._by_length
        if self._shuffle:
            order = []
            for _, group in groupby(self._by_length, key=self._lengths.__getitem__):
                same = [*group]
                order += [same[place] for place in torch.randperm(len(same), generator=generator)]
        batches = [order[start:stop] for start, stop in pairwise(accumulate(self._sizes, initial=0))]
        if self._shuffle:
            batches = [batches[place] for place in torch.randperm(len(batches), generator=generator)]
        return iter(batches)


def _sizes(ascending: Sequence[int], tokens: int) -> Iterator[int]:
    """The number of samples in each batch; each batch takes as many samples as fit."""
    size = 0
    for length in ascending:
        if length * (size + 1) > tokens:
            yield size
            size = 0
        size += 1
    yield size
