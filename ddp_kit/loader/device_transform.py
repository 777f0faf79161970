"""Applies the user's `data.device_transform` to batches on the device, with random states of its own."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ddp_kit.errors import DataError
from ddp_kit.torch_internals import pytree
from ddp_kit.world import mixed_seed, random_states_kept, seed_generators


class Keyed(NamedTuple):
    """A batch with the keys of its samples, for transforms that are seeded per sample."""

    keys: Sequence[tuple[int, Any]]
    """(epoch, key in the dataset) of each sample."""
    batch: Any


class DeviceTransform:
    """Transforms the batches of one epoch in order.

    Batches are transformed ahead of their use, so transforms must not draw from the random states of training, which a
    checkpoint stores. They are seeded from (seed, epoch, rank, number of the batch), or for each sample of a `Keyed`
    batch, which is then transformed one by one, from (seed, epoch, key).
    `number`: the index within the epoch of the next batch.
    """

    def __init__(self, function: Callable[[Any], Any], seed: int, epoch: int, rank: int, number: int) -> None:
        self._function = function
        self._seeds = (seed, epoch, rank)
        self._seed = seed
        self._number = number

    def __call__(self, batch: Any) -> Any:
        number, self._number = self._number, self._number + 1
        with random_states_kept():
            if not isinstance(batch, Keyed):
                seed_generators(mixed_seed(*self._seeds, number))
                return self._function(batch)
            samples = []
            for place, key in enumerate(batch.keys):
                seed_generators(mixed_seed(self._seed, *key))
                samples.append(self._function(_sample(batch.batch, place)))
            return _joined(samples)


def _sample(batch: Any, place: int) -> Any:
    """The sample at index `place` of a batch, as a batch of size 1."""
    return pytree.tree_map_only(Tensor, lambda leaf: leaf[place : place + 1] if leaf.dim() else leaf, batch)


def _joined(samples: list[Any]) -> Any:
    """Concatenate batches of size 1. Raises `DataError` if they are nested differently."""
    leaves, forms = zip(*map(pytree.tree_flatten, samples), strict=True)
    if len(set(map(repr, forms))) > 1:
        raise DataError(
            "data.device_transform returned differently nested batches for the samples of one batch",
            "return the same structure for each sample, or turn data.seed_samples off",
        )
    return pytree.tree_unflatten([_whole(each) for each in zip(*leaves, strict=True)], forms[0])


def _whole(parts: Sequence[Any]) -> Any:
    first = parts[0]
    return torch.cat([*parts]) if isinstance(first, Tensor) and first.dim() else first
