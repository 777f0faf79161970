"""Which samples this rank takes, in which order: a pure function of (seed, epoch, position).

Step k of an epoch holds the same samples at every number of ranks.
"""

from collections.abc import Iterator, Sequence, Sized
from itertools import islice
from typing import Any, cast, overload

import torch
from torch import Tensor
from torch.utils.data import Sampler
from torch.utils.data.distributed import DistributedSampler

from ddp_kit.batch import BatchPlan, MicroBatch, split
from ddp_kit.errors import DataError
from ddp_kit.world import mixed_seed


class ExactDistributedSampler(DistributedSampler[Any]):
    """torch's DistributedSampler without its padding: each sample once, on one rank, in neighbouring shares.

    Iterating gives this rank's samples of the whole epoch; `order` gives everyone's.
    """

    def __init__(self, data: Sized, rank: int, world_size: int, *, shuffle: bool, seed: int) -> None:
        super().__init__(cast(Any, data), num_replicas=world_size, rank=rank, shuffle=shuffle, seed=seed)
        self.total_size = len(data)
        self.num_samples = len(self._share())

    def order(self) -> Sequence[int]:
        """All samples of this epoch in their order over all ranks."""
        if not self.shuffle:
            return range(self.total_size)
        generator = torch.Generator().manual_seed(mixed_seed(self.seed, self.epoch))
        return _Numbers(torch.randperm(self.total_size, generator=generator))

    def __iter__(self) -> Iterator[int]:
        share = self._share()
        return iter(self.order()[share.start : share.stop])

    def _share(self) -> range:
        return split(self.total_size, self.num_replicas, self.rank)


class _Numbers(Sequence[int]):
    """The numbers of a tensor, made into Python's where they are asked for: 8 bytes each for a whole epoch, not 36."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __len__(self) -> int:
        return len(self._tensor)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        return cast("int | list[int]", self._tensor[index].tolist())


class TrainBatches(Sampler[list[int]]):
    """This rank's micro-batches of an epoch, from optimizer step `first_step` on."""

    def __init__(self, sampler: ExactDistributedSampler, plan: BatchPlan, *, drop_last: bool) -> None:
        self._sampler = sampler
        self._plan = plan
        self.steps = plan.steps(sampler.total_size, drop_last)
        if self.steps == 0:
            raise DataError(
                f"the dataset has {sampler.total_size} samples and a global batch {plan.global_batch}: no step at all",
                "use a smaller global_batch_size, or data.drop_last=False",
            )
        self.first_step = 0

    def set_position(self, epoch: int, first_step: int) -> None:
        """What the next iteration starts with."""
        self._sampler.set_epoch(epoch)
        self.first_step = first_step

    def samples(self, step: int) -> int:
        """Samples of optimizer step `step` over all ranks."""
        return len(self._plan.step_samples(step, self._sampler.total_size))

    def micro_batches(self, step: int) -> tuple[MicroBatch, ...]:
        """This rank's passes in optimizer step `step`."""
        return self._plan.micro_batches(self._sampler.rank, self.samples(step))

    def __iter__(self) -> Iterator[list[int]]:
        order = self._sampler.order()
        for step in range(self.first_step, self.steps):
            start = self._plan.step_samples(step, len(order)).start
            for micro_batch in self.micro_batches(step):
                first, last = micro_batch.positions.start, micro_batch.positions.stop
                yield list(order[start + first : start + last])


class EvalBatches(Sampler[list[int]]):
    """This rank's share of a dataset in order, in batches of at most `size` samples: each sample once, no padding."""

    def __init__(self, sampler: ExactDistributedSampler, size: int) -> None:
        self._sampler = sampler
        self._size = size

    def sizes(self) -> list[int]:
        """Samples of each batch."""
        total = len(self._sampler)
        return [min(self._size, total - start) for start in range(0, total, self._size)]

    def __iter__(self) -> Iterator[list[int]]:
        own = iter(self._sampler)
        return (list(islice(own, size)) for size in self.sizes())
