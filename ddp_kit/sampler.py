"""Which samples this rank takes, in which order: a pure function of (seed, epoch, position).

Step k of an epoch holds the same samples at every number of ranks. An order of the user's own is drawn on every rank
in the same way and divided like any other.
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
    """torch's DistributedSampler without its padding: each sample once, on one rank, in neighbouring shares.

    Iterating gives this rank's samples of the whole epoch; `order` gives everyone's. `own`: a sampler of the user's
    own over all samples; the order is then what it yields. Raises `DataError` where it cannot be divided.
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
        self._drawn: tuple[int, Sequence[Any]] | None = None  # the epoch, and what the user's own sampler gave for it

    def order(self) -> Sequence[Any]:
        """All samples of this epoch in their order over all ranks."""
        if self._own is not None:
            if self._drawn is None or self._drawn[0] != self.epoch:
                self._drawn = (self.epoch, _compact(_draw(self._own, self.seed, self.epoch, "sampler")))
            return self._drawn[1]
        if not self.shuffle:
            return range(self.total_size)
        generator = torch.Generator().manual_seed(mixed_seed(self.seed, self.epoch))
        return _Numbers(torch.randperm(self.total_size, generator=generator))

    def fingerprint(self) -> str:
        """The same text wherever the same order is drawn for this epoch; "" where that follows from the settings."""
        if self._own is None:
            return ""
        order = self.order()
        return blake2b(order.tobytes() if isinstance(order, array) else repr(order).encode()).hexdigest()

    def __iter__(self) -> Iterator[Any]:
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


class TrainBatches(Sampler[list[Any]]):
    """This rank's micro-batches of an epoch, from optimizer step `first_step` on."""

    def __init__(self, sampler: ExactDistributedSampler, plan: BatchPlan, *, drop_last: bool) -> None:
        self._sampler = sampler
        self._plan = plan
        self.seed = sampler.seed
        self.steps = plan.steps(sampler.total_size, drop_last)
        if self.steps == 0:
            raise DataError(
                f"the dataset has {sampler.total_size} samples and a global batch {plan.global_batch}: no step at all",
                "use a smaller global_batch_size, or data.drop_last=False",
            )
        self.first_step = 0
        self.division = ""
        self._full_steps = sampler.total_size // plan.global_batch
        self._full = self._ranges(plan.global_batch)
        self._full_passes = tuple(map(len, self._full))

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration is of."""
        return self._sampler.epoch

    def set_position(self, epoch: int, first_step: int) -> None:
        """What the next iteration starts with."""
        self._sampler.set_epoch(epoch)
        self.first_step = first_step

    def samples(self, step: int) -> int:
        """Samples of optimizer step `step` over all ranks."""
        if step < self._full_steps:
            return self._plan.global_batch
        return len(self._plan.step_samples(step, self._sampler.total_size))

    def passes(self, step: int) -> tuple[int, ...]:
        """Samples of each of this rank's passes in optimizer step `step`; empty where it has none."""
        return self._full_passes if step < self._full_steps else tuple(map(len, self._ranges(self.samples(step))))

    def most_passes(self, step: int) -> int:
        """Those of the rank that has the most in optimizer step `step`."""
        return len(self._plan.micro_batches(0, self.samples(step)))

    def spare(self) -> list[Any]:
        """A batch of one sample, whoever takes it."""
        return list(self._sampler.order()[:1])

    def fingerprint(self) -> str:
        """The same text wherever the same order is drawn for this epoch."""
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


class OwnTrainBatches(Sampler[list[Any]]):
    """This rank's share of the batches that the user's own batch sampler makes, each of them one micro-batch.

    An optimizer step takes the next `accumulation` x `world_size` of them, and each rank neighbouring ones.
    Raises `DataError` for a batch sampler whose length is not known, or not what it yields.
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
        """For the line that announces a run: how many samples they have is known once they are drawn."""
        self._total = _length(own, "batch sampler")
        self.steps = self._total // self.per_step if drop_last else -(-self._total // self.per_step)
        if self.steps == 0:
            raise DataError(
                f"the batch sampler makes {self._total} batches, and a step takes {self.per_step}: no step at all",
                "use fewer accumulation_steps, or data.drop_last=False",
            )
        self.epoch = 0
        self.first_step = 0
        self._drawn: _Drawn | None = None

    def set_position(self, epoch: int, first_step: int) -> None:
        """What the next iteration starts with."""
        self.epoch = epoch
        self.first_step = first_step

    def samples(self, step: int) -> int:
        """Samples of optimizer step `step` over all ranks."""
        return self._epoch().samples[step]

    def passes(self, step: int) -> tuple[int, ...]:
        """Samples of each of this rank's passes in optimizer step `step`; empty where it has none."""
        return self._epoch().passes[step]

    def most_passes(self, step: int) -> int:
        """Those of the rank that has the most in optimizer step `step`."""
        batches = min(self.per_step, self._total - step * self.per_step)
        return len(split(batches, self._world_size, 0))

    def spare(self) -> list[Any]:
        """The first batch, whoever takes it."""
        return list(_drawn_batches(self._own, self.seed, self.epoch)[0])

    def fingerprint(self) -> str:
        """The same text wherever the same batches are drawn for this epoch."""
        return self._epoch().fingerprint

    def __iter__(self) -> Iterator[list[Any]]:
        own = self._epoch().own
        return (batch for step in range(self.first_step, self.steps) for batch in own[step])

    def _epoch(self) -> "_Drawn":
        if self._drawn is None or self._drawn.epoch != self.epoch:
            batches = _drawn_batches(self._own, self.seed, self.epoch)
            steps = [batches[start : start + self.per_step] for start in range(0, self._total, self.per_step)]
            shares = [split(len(step), self._world_size, self._rank) for step in steps]
            own = [step[share.start : share.stop] for step, share in zip(steps, shares, strict=True)]
            self._drawn = _Drawn(
                self.epoch,
                own,
                [sum(map(len, step)) for step in steps],
                [tuple(map(len, step)) for step in own],
                blake2b(repr(batches).encode()).hexdigest(),
            )
        return self._drawn


@dataclass(frozen=True)
class _Drawn:
    """What a batch sampler gave for an epoch, by optimizer step."""

    epoch: int
    own: list[list[list[Any]]]
    """The batches of this rank."""
    samples: list[int]
    """Over all ranks."""
    passes: list[tuple[int, ...]]
    """The sizes of this rank's batches."""
    fingerprint: str
    """Of the batches of all ranks."""


class EvalBatches(Sampler[list[Any]]):
    """This rank's share of a dataset in order, in batches of at most `size` samples: each sample once, no padding."""

    def __init__(self, sampler: ExactDistributedSampler, size: int) -> None:
        self._sampler = sampler
        self._size = size
        self.seed, self.epoch = sampler.seed, 0

    def sizes(self) -> list[int]:
        """Samples of each batch."""
        total = len(self._sampler)
        return [min(self._size, total - start) for start in range(0, total, self._size)]

    def spare(self) -> list[Any]:
        """A batch of one sample, whoever takes it."""
        return list(self._sampler.order()[:1])

    def __iter__(self) -> Iterator[list[Any]]:
        own = iter(self._sampler)
        return (list(islice(own, size)) for size in self.sizes())


class OwnEvalBatches(Sampler[list[Any]]):
    """This rank's share of the batches that the user's own batch sampler makes, each of them once."""

    def __init__(self, own: Iterable[Any], rank: int, world_size: int, *, seed: int) -> None:
        self.seed, self.epoch = seed, 0
        share = split(_length(own, "batch sampler"), world_size, rank)
        everyone = _drawn_batches(own, seed, self.epoch)
        self._batches, self._first = everyone[share.start : share.stop], everyone[:1]

    def sizes(self) -> list[int]:
        """Samples of each batch."""
        return list(map(len, self._batches))

    def spare(self) -> list[Any]:
        """The first batch, whoever takes it."""
        return list(self._first[0])

    def __iter__(self) -> Iterator[list[Any]]:
        return iter(self._batches)


# --- orders of the user's own -----------------------------------------------------------------------------------


def _length(own: Iterable[Any], what: str) -> int:
    try:
        return len(cast(Sized, own))
    except TypeError:
        raise DataError(
            f"the DataLoader's {what} ({type(own).__name__}) has no length",
            "give it a __len__: how many it yields in an epoch, from which the steps are counted",
        ) from None


def _draw(own: Iterable[Any], seed: int, epoch: int, what: str) -> list[Any]:
    """What the user's sampler yields in `epoch`: the same on every rank and in every run, and nobody else's draws."""
    with _seeded(own, mixed_seed(seed, epoch)):
        for part in _parts(own):
            if callable(set_epoch := getattr(part, "set_epoch", None)):
                set_epoch(epoch)
        drawn = list(own)
    if len(drawn) != _length(own, what):
        raise DataError(
            f"the DataLoader's {what} ({type(own).__name__}) has length {_length(own, what)}, "
            f"but yields {len(drawn)} in epoch {epoch}",
            "let its __len__ return how many it yields, in every epoch: the steps are counted beforehand",
        )
    return drawn


def _drawn_batches(own: Iterable[Any], seed: int, epoch: int) -> list[list[Any]]:
    batches = [list(batch) for batch in _draw(own, seed, epoch, "batch sampler")]
    if [] in batches:
        raise DataError(
            f"the DataLoader's batch sampler ({type(own).__name__}) makes an empty batch: number {batches.index([])}",
            "leave empty batches out, and count them out of its length",
        )
    return batches


@contextmanager
def _seeded(own: Iterable[Any], seed: int) -> Iterator[None]:
    """The global generators and the sampler's own, at `seed` within; back in their states afterwards."""
    with ExitStack() as stack:
        stack.enter_context(random_states_kept())
        seed_generators(seed)
        for part in _parts(own):
            for value in [*getattr(part, "__dict__", {}).values()]:
                _seed_one(value, seed, stack)
        yield


def _seed_one(value: Any, seed: int, stack: ExitStack) -> None:
    """Seed a generator of torch's, Python's or numpy's, and put it back when `stack` ends."""
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
    """A sampler, and those that it draws from: a batch sampler usually holds one."""
    part: Any = own
    for _ in range(5):  # deeper ones are not known, and a ring would have no end
        yield part
        part = getattr(part, "sampler", None)
        if part is None:
            return


def _compact(order: list[Any]) -> Sequence[Any]:
    """Whole numbers in 8 bytes each; a dataset may have other keys, which stay what they are."""
    try:
        return array("q", order)
    except (TypeError, OverflowError):
        return order
