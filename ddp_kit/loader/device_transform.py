"""Applies the user's `data.device_transform` to batches on the device, with random numbers of their own."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ddp_kit.errors import DataError
from ddp_kit.torch_internals import pytree
from ddp_kit.world import mixed_seed, random_states_kept, seed_generators


class Keyed(NamedTuple):
    """A batch with the epoch and the key of each of its samples, for transforms that are seeded per sample."""

    keys: Sequence[tuple[int, Any]]
    batch: Any


class DeviceTransform:
    """The batches of one epoch, transformed one after the other.

    A batch is transformed ahead of its use, so it must not draw from the random states of training, whose position a
    checkpoint holds. Its own follow from (seed, epoch, the batch's number, rank); those of a `Keyed` batch from (seed,
    epoch, sample): its samples are then transformed one by one. `number`: of the next batch within the epoch.
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
    """A batch of one sample."""
    return pytree.tree_map_only(Tensor, lambda leaf: leaf[place : place + 1] if leaf.dim() else leaf, batch)


def _joined(samples: list[Any]) -> Any:
    """The batch of these batches of one sample."""
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
