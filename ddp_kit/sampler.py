"""Samplers: which samples this rank uses, and in which order, as a pure function of (seed, epoch, position).

Step k of an epoch has the same samples for any number of ranks. A user's own sampler is iterated on every rank with the
same random states, so that all ranks draw the same order, of which each takes its share.
"""

import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence, Sized
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from random import Random, SystemRandom
from typing import Any, cast, overload

import torch
from torch import Generator, Tensor
from torch.utils.data import Sampler
from torch.utils.data.distributed import DistributedSampler

from ddp_kit.batch import BatchPlan, split
from ddp_kit.errors import DataError
from ddp_kit.world import mixed_seed, random_states_kept, seed_generators


class ExactDistributedSampler(DistributedSampler[Any]):
    """torch's DistributedSampler without padding: each sample is on exactly one rank, in contiguous shares.

    Iterating yields this rank's samples of an epoch; `order` returns those of all ranks.
    `own`: the user's own sampler over all samples, which then determines the order. Raises `DataError` if it has no
    length, or does not yield as many items as its length.
    """

    def __init__(
        self,
        data: Sized,
        rank: int,
        world_size: int,
        *,
        shuffle: bool,
        seed: int,
        own: Iterable[Any] | None = None,
    ) -> None:
        super().__init__(cast(Any, data), num_replicas=world_size, rank=rank, shuffle=shuffle, seed=seed)
        self.total_size = len(data) if own is None else _length(own, "sampler")
        self.num_samples = len(self._share())
        self._own = own
        self._drawn: tuple[int, Sequence[Any]] | None = None  # the epoch, and the order that `own` yielded for it

    def order(self) -> Sequence[Any]:
        """The samples of this epoch over all ranks, in order."""
        if self._own is not None:
            if self._drawn is None or self._drawn[0] != self.epoch:
                self._drawn = (self.epoch, _compact(_draw(self._own, self.seed, self.epoch, "sampler")))
            return self._drawn[1]
        if not self.shuffle:
            return range(self.total_size)
        generator = torch.Generator().manual_seed(mixed_seed(self.seed, self.epoch))
        return _LazyInts(torch.randperm(self.total_size, generator=generator))

    def fingerprint(self) -> str:
        """A hash of the order in this epoch if it comes from the user's own sampler; "" otherwise."""
        if self._own is None:
            return ""
        order = self.order()
        return blake2b(order.tobytes() if isinstance(order, array) else repr(order).encode()).hexdigest()

    def __iter__(self) -> Iterator[Any]:
        share = self._share()
        return iter(self.order()[share.start : share.stop])

    def _share(self) -> range:
        return split(self.total_size, self.num_replicas, self.rank)


class _LazyInts(Sequence[int]):
    """A sequence of the values of an int64 tensor: 8 bytes per value, while a list of ints takes 36."""

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


class TrainBatches(Sampler[list[Any]]):
    """A batch sampler that yields this rank's micro-batches of an epoch, starting at step `first_step`."""

    def __init__(self, sampler: ExactDistributedSampler, plan: BatchPlan, *, drop_last: bool) -> None:
        self._sampler = sampler
        self._plan = plan
        self.seed = sampler.seed
        self.steps = plan.steps(sampler.total_size, drop_last)
        if self.steps == 0:
            raise DataError(
                f"the dataset has {sampler.total_size} samples, fewer than the global batch of {plan.global_batch}: "
                "there is no complete step",
                "use a smaller global_batch_size, or data.drop_last=False",
            )
        self.first_step = 0
        self.division = ""
        self._full_steps = sampler.total_size // plan.global_batch
        self._full = self._ranges(plan.global_batch)
        self._full_passes = tuple(map(len, self._full))

    @property
    def epoch(self) -> int:
        """The epoch of the next iteration."""
        return self._sampler.epoch

    def set_position(self, epoch: int, first_step: int) -> None:
        """Set where the next iteration starts."""
        self._sampler.set_epoch(epoch)
        self.first_step = first_step

    def samples(self, step: int) -> int:
        """Samples of optimizer step `step` over all ranks."""
        if step < self._full_steps:
            return self._plan.global_batch  # the usual case, without computation
        return len(self._plan.step_samples(step, self._sampler.total_size))

    def passes(self, step: int) -> tuple[int, ...]:
        """The number of samples in each of this rank's passes in step `step`; empty if it has none."""
        return self._full_passes if step < self._full_steps else tuple(map(len, self._ranges(self.samples(step))))

    def most_passes(self, step: int) -> int:
        """The largest number of passes on any rank in step `step`."""
        return len(self._plan.micro_batches(0, self.samples(step)))

    def spare(self) -> list[Any]:
        """A batch of one sample, for a rank that has no batch of its own."""
        return list(self._sampler.order()[:1])

    def fingerprint(self) -> str:
        """A hash of this epoch's order, as in `ExactDistributedSampler`."""
        return self._sampler.fingerprint()

    def __iter__(self) -> Iterator[list[Any]]:
        return self._from(self._sampler.order(), self.first_step)

    def _from(self, order: Sequence[Any], first_step: int) -> Iterator[list[Any]]:
        for step in range(first_step, self.steps):
            start = step * self._plan.global_batch
            for positions in self._full if step < self._full_steps else self._ranges(self.samples(step)):
                yield list(order[start + positions.start : start + positions.stop])

    def _ranges(self, samples: int) -> tuple[range, ...]:
        return self._plan.micro_batches(self._sampler.rank, samples)


class UserTrainBatches(Sampler[list[Any]]):
    """This rank's share of the batches of the user's own batch sampler; each batch is one micro-batch.

    An optimizer step uses the next `accumulation` x `world_size` batches, of which each rank takes consecutive ones.
    Raises `DataError` if the batch sampler has no length, or does not yield as many batches as its length.
    """

    def __init__(
        self, own: Iterable[Any], rank: int, world_size: int, accumulation: int, *, drop_last: bool, seed: int
    ) -> None:
        self._own = own
        self._rank, self._world_size = rank, world_size
        self.per_step = accumulation * world_size
        self.seed = seed
        self.division = (
            f"a step = {self.per_step} batches of the DataLoader's {type(own).__name__} = "
            f"accumulation {accumulation} x {world_size}"
        )
        """The division of a step, for the log line at the start of a run; samples per step are not known in advance."""
        self._total = _length(own, "batch sampler")
        self.steps = self._total // self.per_step if drop_last else -(-self._total // self.per_step)
        if self.steps == 0:
            raise DataError(
                f"the batch sampler yields {self._total} batches, fewer than the {self.per_step} of one step: "
                "there is no complete step",
                "use fewer accumulation_steps, or data.drop_last=False",
            )
        self.epoch = 0
        self.first_step = 0
        self._drawn: _EpochBatches | None = None

    def set_position(self, epoch: int, first_step: int) -> None:
        """Set where the next iteration starts."""
        self.epoch = epoch
        self.first_step = first_step

    def samples(self, step: int) -> int:
        """Samples of optimizer step `step` over all ranks."""
        return self._epoch().samples[step]

    def passes(self, step: int) -> tuple[int, ...]:
        """The number of samples in each of this rank's passes in step `step`; empty if it has none."""
        return self._epoch().passes[step]

    def most_passes(self, step: int) -> int:
        """The largest number of passes on any rank in step `step`."""
        batches = min(self.per_step, self._total - step * self.per_step)
        return len(split(batches, self._world_size, 0))

    def spare(self) -> list[Any]:
        """The first batch, for a rank that has no batch of its own."""
        return list(_drawn_batches(self._own, self.seed, self.epoch)[0])

    def fingerprint(self) -> str:
        """A hash of the batches of all ranks in this epoch."""
        return self._epoch().fingerprint

    def __iter__(self) -> Iterator[list[Any]]:
        own = self._epoch().own
        return (batch for step in range(self.first_step, self.steps) for batch in own[step])

    def _epoch(self) -> "_EpochBatches":
        if self._drawn is None or self._drawn.epoch != self.epoch:
            batches = _drawn_batches(self._own, self.seed, self.epoch)
            steps = [batches[start : start + self.per_step] for start in range(0, self._total, self.per_step)]
            shares = [split(len(step), self._world_size, self._rank) for step in steps]
            own = [step[share.start : share.stop] for step, share in zip(steps, shares, strict=True)]
            self._drawn = _EpochBatches(
                self.epoch,
                own,
                [sum(map(len, step)) for step in steps],
                [tuple(map(len, step)) for step in own],
                blake2b(repr(batches).encode()).hexdigest(),
            )
        return self._drawn


@dataclass(frozen=True)
class _EpochBatches:
    """The batches that a batch sampler has yielded for an epoch, by optimizer step."""

    epoch: int
    own: list[list[list[Any]]]
    """This rank's batches in each step."""
    samples: list[int]
    """The number of samples in each step, over all ranks."""
    passes: list[tuple[int, ...]]
    """The sizes of this rank's batches in each step."""
    fingerprint: str
    """A hash of the batches of all ranks."""


class EvalBatches(Sampler[list[Any]]):
    """A batch sampler over this rank's share of a dataset, in order, in batches of at most `size`; without padding."""

    def __init__(self, sampler: ExactDistributedSampler, size: int) -> None:
        self._sampler = sampler
        self._size = size
        self.seed, self.epoch = sampler.seed, 0

    def sizes(self) -> list[int]:
        """Samples of each batch."""
        total = len(self._sampler)
        return [min(self._size, total - start) for start in range(0, total, self._size)]

    def spare(self) -> list[Any]:
        """A batch of one sample, for a rank that has no batch of its own."""
        return list(self._sampler.order()[:1])

    def __iter__(self) -> Iterator[list[Any]]:
        own = iter(self._sampler)
        return (list(islice(own, size)) for size in self.sizes())


class UserEvalBatches(Sampler[list[Any]]):
    """This rank's share of the batches of the user's own batch sampler, for evaluation: each batch on one rank."""

    def __init__(self, own: Iterable[Any], rank: int, world_size: int, *, seed: int) -> None:
        self.seed, self.epoch = seed, 0
        share = split(_length(own, "batch sampler"), world_size, rank)
        everyone = _drawn_batches(own, seed, self.epoch)
        self._batches, self._first = everyone[share.start : share.stop], everyone[:1]

    def sizes(self) -> list[int]:
        """Samples of each batch."""
        return list(map(len, self._batches))

    def spare(self) -> list[Any]:
        """The first batch, for a rank that has no batch of its own."""
        return list(self._first[0])

    def __iter__(self) -> Iterator[list[Any]]:
        return iter(self._batches)


# --- the user's own samplers ------------------------------------------------------------------------------------


def _length(own: Iterable[Any], what: str) -> int:
    try:
        return len(cast(Sized, own))
    except TypeError:
        raise DataError(
            f"the DataLoader's {what} ({type(own).__name__}) has no length",
            "add a __len__ that returns how many items it yields per epoch: it determines the number of steps",
        ) from None


def _draw(own: Iterable[Any], seed: int, epoch: int, what: str) -> list[Any]:
    """The items that the user's sampler yields in `epoch`, drawn with the same seeds on every rank and in every run.

    Random states are restored afterwards. `what`: "sampler" or "batch sampler", for messages.
    """
    with _seeded(own, mixed_seed(seed, epoch)):
        for part in _parts(own):
            if callable(set_epoch := getattr(part, "set_epoch", None)):
                set_epoch(epoch)
        drawn = list(own)
    if len(drawn) != _length(own, what):
        raise DataError(
            f"the DataLoader's {what} ({type(own).__name__}) has length {_length(own, what)}, "
            f"but yields {len(drawn)} items in epoch {epoch + 1}",
            "let its __len__ return how many items it yields in every epoch: it determines the number of steps",
        )
    return drawn


def _drawn_batches(own: Iterable[Any], seed: int, epoch: int) -> list[list[Any]]:
    batches = [list(batch) for batch in _draw(own, seed, epoch, "batch sampler")]
    if [] in batches:
        raise DataError(
            f"the DataLoader's batch sampler ({type(own).__name__}) yields an empty batch: number {batches.index([])}",
            "skip empty batches, and do not count them in __len__",
        )
    return batches


@contextmanager
def _seeded(own: Iterable[Any], seed: int) -> Iterator[None]:
    """Seed the global generators and the sampler's own ones; restore their states afterwards."""
    with ExitStack() as stack:
        stack.enter_context(random_states_kept())
        seed_generators(seed)
        for part in _parts(own):
            for value in [*getattr(part, "__dict__", {}).values()]:
                _seed_one(value, seed, stack)
        yield


def _seed_one(value: Any, seed: int, stack: ExitStack) -> None:
    """Seed `value` if it is a random generator of torch, Python or numpy; `stack` will restore its state."""
    numpy = sys.modules.get("numpy")
    if isinstance(value, Generator):
        stack.callback(value.set_state, value.get_state())
        value.manual_seed(seed)
    elif isinstance(value, Random) and not isinstance(value, SystemRandom):
        stack.callback(value.setstate, value.getstate())
        value.seed(seed)
    elif numpy is not None and isinstance(value, numpy.random.RandomState):
        stack.callback(value.set_state, value.get_state())
        value.seed(seed)
    elif numpy is not None and isinstance(value, numpy.random.Generator):
        source = value.bit_generator
        stack.callback(setattr, source, "state", source.state)
        source.state = type(source)(seed).state


def _parts(own: Iterable[Any]) -> Iterator[Any]:
    """A sampler and the samplers inside it; a batch sampler usually contains one."""
    part: Any = own
    for _ in range(5):  # a limit, in case a sampler contains itself
        yield part
        part = getattr(part, "sampler", None)
        if part is None:
            return


def _compact(order: list[Any]) -> Sequence[Any]:
    """The order as an array of 8-byte integers, if all keys are integers."""
    try:
        return array("q", order)
    except (TypeError, OverflowError):
        return order
