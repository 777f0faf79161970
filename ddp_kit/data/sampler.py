"""Sizes of global batches, and the samples that each rank takes in each step."""

import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from hashlib import blake2b
from itertools import chain, islice
from random import Random, SystemRandom
from typing import Any, cast

import torch
import xxhash
from torch import Generator
from torch.utils.data import Sampler

from ddp_kit.distributed.world import mixed_seed, random_states_kept, seed_generators
from ddp_kit.errors import ConfigError, DataError

# --- Batch plan -------------------------------------------------------------------------------------------------------
# The division of an optimizer step's samples among ranks and into micro-batches: pure arithmetic on positions. Nothing
# is rounded: a global batch that is not divisible by the number of ranks is split unevenly, and every sample of a step
# is used exactly once, for any number of ranks.


DEFAULT_GLOBAL_BATCH = 32


@dataclass(frozen=True)
class BatchPlan:
    """The batch sizes of an optimizer step, in samples, and their division among ranks."""

    global_batch: int
    """Samples per optimizer step over all ranks."""
    micro_batch: int
    """The largest number of samples in a forward pass of one rank."""
    accumulation: int
    """Forward and backward passes per optimizer step, on the rank with the largest share."""
    data_ranks: int
    """The number of ranks that a global batch is divided among."""

    def steps(self, samples: int, drop_last: bool = False) -> int:
        """The number of optimizer steps in an epoch.

        Args:
            samples: Samples in the epoch, over all ranks.
            drop_last: Whether to count only complete steps.
        """
        return samples // self.global_batch if drop_last else -(-samples // self.global_batch)

    def step_samples(self, step: int, samples: int) -> range:
        """The positions, within the epoch, of the samples that all ranks together use in a step.

        Args:
            step: The index of the step in the epoch, from 0.
            samples: Samples in the epoch, over all ranks.
        """
        return range(step * self.global_batch, min((step + 1) * self.global_batch, samples))

    def micro_batches(self, rank: int, samples: int) -> tuple[range, ...]:
        """The micro-batches of a rank in an optimizer step, as positions within the step.

        A full step has `accumulation` micro-batches per rank, or fewer if the rank has fewer samples. A shorter step
        has only as many micro-batches as its samples need. A rank without samples has no micro-batches.

        Args:
            rank: The index of the rank, from 0 to `data_ranks` - 1.
            samples: Samples in the step, over all ranks.
        """
        positions = split(samples, self.data_ranks, rank)
        if not positions:
            return ()
        needed = -(-len(positions) // self.micro_batch)
        passes = max(needed, min(self.accumulation, len(positions))) if samples >= self.global_batch else needed
        shares = (split(len(positions), passes, number) for number in range(passes))
        return tuple(range(positions.start + share.start, positions.start + share.stop) for share in shares)


def split(total: int, parts: int, number: int) -> range:
    """Split `total` positions into `parts` ranges of nearly equal size, and return the range with index `number`."""
    size, larger = divmod(total, parts)
    start = number * size + min(number, larger)
    return range(start, start + size + (number < larger))


def plan_batches(
    global_batch: int | None, micro_batch: int | None, accumulation: int | None, world_size: int
) -> BatchPlan:
    """Compute the batch sizes that are None from the others. The default global batch is 32.

    Raises `ConfigError` if all three are given and contradict each other.
    """
    if global_batch is None:
        global_batch = DEFAULT_GLOBAL_BATCH if micro_batch is None else micro_batch * (accumulation or 1) * world_size
    share = _ceil(global_batch, world_size)
    if micro_batch is None:
        micro_batch = _ceil(share, accumulation or 1)
    passes = _ceil(share, micro_batch)
    if accumulation is None:
        accumulation = passes
    if accumulation != passes and micro_batch != _ceil(share, accumulation):
        raise _disagreement(global_batch, micro_batch, accumulation, world_size)
    return BatchPlan(global_batch, micro_batch, accumulation, world_size)


def _ceil(total: int, parts: int) -> int:
    return -(-total // parts)


def _disagreement(global_batch: int, micro_batch: int, accumulation: int, world_size: int) -> ConfigError:
    share = _ceil(global_batch, world_size)
    product = micro_batch * accumulation * world_size
    ways = (
        f"micro_batch_size={_ceil(share, accumulation)} (keeps the other two)",
        f"accumulation_steps={_ceil(share, micro_batch)} (keeps the other two)",
        f"global_batch_size={product} (keeps the other two)",
    )
    return ConfigError(
        f"the batch sizes do not agree: micro_batch_size {micro_batch} x accumulation_steps {accumulation} "
        f"x {world_size} {'rank' if world_size == 1 else 'ranks'} = {product}, "
        f"but global_batch_size is {global_batch}; the nearest settings that work:",
        "change one of the three sizes, or leave one out, which is then computed from the other two",
        ways,
    )


# --- Samplers ---------------------------------------------------------------------------------------------------------
# The samples of this rank, and their order, are a pure function of (seed, epoch, position). Step k of an epoch has the
# same samples for any number of ranks. A user's own sampler is iterated on every rank with the same random states, so
# that all ranks draw the same order and each takes its share.


class ExactDistributedSampler(Sampler[Any]):
    """A sampler like torch's DistributedSampler, but without padding: each sample is on exactly one rank.

    A rank's samples are consecutive in the order of the epoch. Iterating yields this rank's samples; `order` returns
    the samples of all ranks. `set_epoch` reads the length of `data`, which may change.
    `user_sampler`: the user's own sampler over all samples; if given, it determines the number and order of samples.
    Raises `DataError` if it has no length, or does not yield as many items as its length.
    """

    def __init__(
        self,
        data: Sized,
        rank: int,
        world_size: int,
        *,
        shuffle: bool,
        seed: int,
        user_sampler: Iterable[Any] | None = None,
    ) -> None:
        if user_sampler is not None:
            _length(user_sampler, "sampler")
        self.user_sampler = user_sampler
        self.rank = rank
        self.seed = seed
        self.epoch = 0
        self._data = data
        self._world_size = world_size
        self._shuffle = shuffle
        self._size: int | None = None  # samples in this epoch; None until the number is needed
        self._drawn: tuple[int, Sequence[Any]] | None = None  # the epoch, and the order of `user_sampler` for it

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration, and reset the number of samples, which may change between epochs."""
        self.epoch, self._size = epoch, None

    @property
    def total_size(self) -> int:
        """The number of samples in this epoch, over all ranks."""
        if self._size is None:
            self._size = len(self._data) if self.user_sampler is None else len(self.order())
        return self._size

    def order(self) -> Sequence[Any]:
        """The keys of all samples of this epoch, over all ranks, in order."""
        if self.user_sampler is not None:
            if self._drawn is None or self._drawn[0] != self.epoch:
                order: Sequence[Any] = _draw(self.user_sampler, self.seed, self.epoch, "sampler")
                with suppress(TypeError, OverflowError):  # keys that are no integers
                    order = array("q", order)  # 8 bytes per key
                self._drawn = (self.epoch, order)
            return self._drawn[1]
        if not self._shuffle:
            return range(self.total_size)
        generator = torch.Generator().manual_seed(mixed_seed(self.seed, self.epoch))
        return torch.randperm(self.total_size, generator=generator).numpy().data  # a memoryview: 8 bytes per key

    def fingerprint(self) -> str:
        """A hash of this epoch's order if the user's own sampler determines the order; "" otherwise."""
        if self.user_sampler is None:
            return ""
        order = self.order()
        return blake2b(order.tobytes() if isinstance(order, array) else repr(order).encode()).hexdigest()

    def __len__(self) -> int:
        return len(self._share())

    def __iter__(self) -> Iterator[Any]:
        share = self._share()
        return iter(self.order()[share.start : share.stop])

    def _share(self) -> range:
        return split(self.total_size, self._world_size, self.rank)


def checksum(keys: Sequence[Any]) -> str:
    """A checksum of keys in their order, as eight hexadecimal digits. Keys that are no integers: of their `repr`."""
    if isinstance(keys, memoryview | array):
        return xxhash.xxh32_hexdigest(keys)
    try:
        return xxhash.xxh32_hexdigest(array("q", keys))
    except (TypeError, OverflowError):
        return xxhash.xxh32_hexdigest(repr([*keys]).encode())


class _Steps(Sampler[list[Any]]):
    """A batch sampler that yields the batches of optimizer steps. The number of steps may differ between epochs.

    `user_sampler`: the user's sampler or batch sampler, if any. `what`: "dataset", "sampler" or "batch sampler", for
    messages.
    """

    def __init__(self, user_sampler: Iterable[Any] | None, what: str, seed: int) -> None:
        self._user_sampler, self._what = user_sampler, what
        self.seed = seed
        self.epoch = 0
        """The epoch of the next iteration."""
        self.first_step = 0
        """The index, within the epoch, of the step at which the next iteration starts."""
        self.steps = 0
        """The number of optimizer steps in this epoch."""
        self._known: dict[int, int] = {}  # epoch -> steps

    def steps_in(self, epochs: range) -> int:
        """The total number of optimizer steps in these epochs, which start with the current epoch.

        All epochs have the same number of steps, unless `set_epoch` changes the length of the user's sampler.
        """
        if self._user_sampler is None or not _set_epochs(self._user_sampler):
            return len(epochs) * self.steps
        self._known[self.epoch] = self.steps
        new = [epoch for epoch in epochs if epoch not in self._known]
        if new:
            lengths = lengths_in(self._user_sampler, self._what, self.seed, new, then=self.epoch)
            self._known |= {epoch: self._steps_of(length, epoch) for epoch, length in zip(new, lengths, strict=True)}
        return sum(map(self._known.__getitem__, epochs))

    def _steps_of(self, length: int, epoch: int) -> int:
        """The number of steps in an epoch of `length` items. Raises `DataError` if this number is 0."""
        steps = self._count(length)
        if steps == 0:
            where = f" in epoch {epoch + 1}" if epoch else ""
            if length == 0:
                raise DataError(
                    f"the {self._what} has length 0{where}: there are no samples to train on",
                    "make sure that it has samples in every epoch, or set max_steps so that the run ends earlier",
                )
            raise self._no_step(length, where)
        return steps

    def _count(self, length: int) -> int:
        """The number of steps in an epoch of `length` items."""
        raise NotImplementedError

    def _no_step(self, length: int, where: str) -> DataError:
        """Create the error for an epoch with too few items for one step. `where`: text that names the epoch, or ""."""
        raise NotImplementedError


class TrainBatches(_Steps):
    """A batch sampler that yields this rank's micro-batches of an epoch, starting at step `first_step`."""

    division = ""

    def __init__(self, sampler: ExactDistributedSampler, plan: BatchPlan, *, drop_last: bool) -> None:
        super().__init__(sampler.user_sampler, "dataset" if sampler.user_sampler is None else "sampler", sampler.seed)
        self._sampler = sampler
        self._plan = plan
        self._drop_last = drop_last
        self._full = self._ranges(plan.global_batch)
        self._full_passes = tuple(map(len, self._full))
        self._order: Sequence[Any] = ()  # of the epoch over which this object iterates
        self.set_position(sampler.epoch, 0)

    def set_position(self, epoch: int, first_step: int) -> None:
        """Set where the next iteration starts. Raises `DataError` if the epoch has no steps."""
        self._sampler.set_epoch(epoch)
        self.epoch, self.first_step = epoch, first_step
        self.steps = self._steps_of(self._sampler.total_size, epoch)
        self._full_steps = self._sampler.total_size // self._plan.global_batch

    def _count(self, length: int) -> int:
        return self._plan.steps(length, self._drop_last)

    def _no_step(self, length: int, where: str) -> DataError:
        return DataError(
            f"the {self._what} has {length} samples, fewer than the global batch of {self._plan.global_batch}: "
            f"there is no complete step{where}",
            "use a smaller global_batch_size, or data.drop_last=False",
        )

    def samples(self, step: int) -> int:
        """The number of samples in optimizer step `step`, over all ranks."""
        if step < self._full_steps:
            return self._plan.global_batch  # the usual case, without computation
        return len(self._plan.step_samples(step, self._sampler.total_size))

    def pass_sizes(self, step: int) -> tuple[int, ...]:
        """The number of samples in each forward pass of this rank in step `step`; () if the rank runs none."""
        return self._full_passes if step < self._full_steps else tuple(map(len, self._ranges(self.samples(step))))

    def max_passes(self, step: int) -> int:
        """The largest number of forward passes on any rank in step `step`."""
        return len(self._plan.micro_batches(0, self.samples(step)))

    def filler_batch(self) -> list[Any]:
        """A batch of one sample, for a rank that has no batch of its own."""
        return list(self._sampler.order()[:1])

    def fingerprint(self) -> str:
        """The `fingerprint` of the `ExactDistributedSampler` for this epoch."""
        return self._sampler.fingerprint()

    def keys(self, step: int, number: int) -> list[Any] | None:
        """The keys of the samples in this rank's pass `number` of step `step`; None if there is no such pass."""
        return next(islice(self._of_step(self._sampler.order(), step), number, None), None)

    def checksum(self, step: int) -> str:
        """A checksum of the samples of step `step`, over all ranks. Call it after the step's batches were yielded."""
        start = step * self._plan.global_batch
        return checksum(self._order[start : start + self.samples(step)])

    def __iter__(self) -> Iterator[list[Any]]:
        order = self._order = self._sampler.order()
        for step in range(self.first_step, self.steps):
            yield from self._of_step(order, step)

    def _of_step(self, order: Sequence[Any], step: int) -> Iterator[list[Any]]:
        start = step * self._plan.global_batch
        for positions in self._full if step < self._full_steps else self._ranges(self.samples(step)):
            yield list(order[start + positions.start : start + positions.stop])

    def _ranges(self, samples: int) -> tuple[range, ...]:
        return self._plan.micro_batches(self._sampler.rank, samples)


class UserTrainBatches(_Steps):
    """A batch sampler that yields this rank's share of the user's own batches; each batch is one micro-batch.

    An optimizer step uses the next `accumulation` x `world_size` batches. Each rank takes consecutive batches.
    Raises `DataError` if the batch sampler has no length, or does not yield as many batches as its length.
    """

    def __init__(
        self,
        user_sampler: Iterable[Any],
        rank: int,
        world_size: int,
        accumulation: int,
        *,
        drop_last: bool,
        seed: int,
        epoch: int = 0,
    ) -> None:
        super().__init__(user_sampler, "batch sampler", seed)
        _length(user_sampler, "batch sampler")
        self._rank, self._world_size = rank, world_size
        self._drop_last = drop_last
        self.per_step = accumulation * world_size
        self.division = (
            f"a step = {self.per_step} batches of the DataLoader's {type(user_sampler).__name__} = "
            f"accumulation {accumulation} x {world_size}"
        )
        """The division of a step, for the first log line of a run; the number of samples is not known in advance."""
        self._drawn = self._draw(epoch)
        self.set_position(epoch, 0)

    def set_position(self, epoch: int, first_step: int) -> None:
        """Set where the next iteration starts. Raises `DataError` if the epoch has no steps."""
        if self._drawn.epoch != epoch:
            self._drawn = self._draw(epoch)
        self.epoch, self.first_step = epoch, first_step
        self.steps = self._steps_of(self._drawn.batches, epoch)

    def _count(self, length: int) -> int:
        return length // self.per_step if self._drop_last else -(-length // self.per_step)

    def _no_step(self, length: int, where: str) -> DataError:
        return DataError(
            f"the batch sampler yields {length} batches, but one step needs {self.per_step}: there is no complete "
            f"step{where}",
            "use fewer accumulation_steps, or data.drop_last=False",
        )

    def samples(self, step: int) -> int:
        """The number of samples in optimizer step `step`, over all ranks."""
        return self._drawn.samples[step]

    def pass_sizes(self, step: int) -> tuple[int, ...]:
        """The number of samples in each forward pass of this rank in step `step`; () if the rank runs none."""
        return self._drawn.passes[step]

    def max_passes(self, step: int) -> int:
        """The largest number of forward passes on any rank in step `step`."""
        batches = min(self.per_step, self._drawn.batches - step * self.per_step)
        return len(split(batches, self._world_size, 0))

    def filler_batch(self) -> list[Any]:
        """The first batch, for a rank that has no batch of its own."""
        return list(self._drawn.first[0])

    def fingerprint(self) -> str:
        """A hash of the batches of all ranks in this epoch."""
        return self._drawn.fingerprint

    def keys(self, step: int, number: int) -> list[Any] | None:
        """The keys of the samples in this rank's pass `number` of step `step`; None if there is no such pass."""
        return next(iter(self._drawn.rank_batches[step][number : number + 1]), None)

    def checksum(self, step: int) -> str:
        """A checksum of the samples of step `step`, over all ranks."""
        return self._drawn.checksums[step]

    def __iter__(self) -> Iterator[list[Any]]:
        rank_batches = self._drawn.rank_batches
        return (batch for step in range(self.first_step, self.steps) for batch in rank_batches[step])

    def _draw(self, epoch: int) -> "_EpochBatches":
        assert self._user_sampler is not None
        batches = _drawn_batches(self._user_sampler, self.seed, epoch)
        steps = [batches[start : start + self.per_step] for start in range(0, len(batches), self.per_step)]
        rank_batches = [self._share(step) for step in steps]
        return _EpochBatches(
            epoch,
            len(batches),
            rank_batches,
            [sum(map(len, step)) for step in steps],
            [tuple(map(len, step)) for step in rank_batches],
            [checksum([*chain(*step)]) for step in steps],
            blake2b(repr(batches).encode()).hexdigest(),
            batches[:1],
        )

    def _share(self, step: list[list[Any]]) -> list[list[Any]]:
        """This rank's micro-batches of a step. `step`: the batches of the step."""
        share = split(len(step), self._world_size, self._rank)
        return step[share.start : share.stop]


class DividedTrainBatches(UserTrainBatches):
    """A batch sampler that yields this rank's share of each of the user's own batches, each of which is one step.

    `plan`: the division of a batch among the ranks and into micro-batches.
    """

    def __init__(self, user_sampler: Iterable[Any], rank: int, plan: BatchPlan, *, seed: int, epoch: int = 0) -> None:
        self._plan, self._plan_rank = plan, rank
        super().__init__(user_sampler, 0, 1, 1, drop_last=False, seed=seed, epoch=epoch)
        self.division = f"a step = a batch of {type(user_sampler).__name__}"

    def max_passes(self, step: int) -> int:
        return len(self._plan.micro_batches(0, self.samples(step)))

    def _share(self, step: list[list[Any]]) -> list[list[Any]]:
        (batch,) = step
        return [batch[part.start : part.stop] for part in self._plan.micro_batches(self._plan_rank, len(batch))]


@dataclass(frozen=True)
class _EpochBatches:
    """The batches that a batch sampler has yielded for an epoch, grouped by optimizer step."""

    epoch: int
    batches: int
    """The number of batches, over all ranks."""
    rank_batches: list[list[list[Any]]]
    """This rank's batches in each step."""
    samples: list[int]
    """The number of samples in each step, over all ranks."""
    passes: list[tuple[int, ...]]
    """The sizes of this rank's batches in each step."""
    checksums: list[str]
    """A checksum of the samples of each step, over all ranks."""
    fingerprint: str
    """A hash of the batches of all ranks."""
    first: list[list[Any]]
    """A list with the first batch of the epoch; empty if the epoch has no batch."""


class EvalBatches(Sampler[list[Any]]):
    """A batch sampler that yields this rank's share of a dataset, in order and without padding.

    `size`: the maximum number of samples in a batch.
    """

    def __init__(self, sampler: ExactDistributedSampler, size: int) -> None:
        self._sampler = sampler
        self._size = size
        self.seed, self.epoch = sampler.seed, 0

    def sizes(self) -> list[int]:
        """The number of samples in each batch, for the current length of the dataset."""
        self._sampler.set_epoch(0)
        total = len(self._sampler)
        return [min(self._size, total - start) for start in range(0, total, self._size)]

    def filler_batch(self) -> list[Any]:
        """A batch of one sample, for a rank that has no batch of its own."""
        return list(self._sampler.order()[:1])

    def order(self) -> Sequence[Any] | None:
        """The keys of all ranks' samples, rank by rank, in a user's order; None if they are in the dataset's order."""
        return None if self._sampler.user_sampler is None else self._sampler.order()

    def __iter__(self) -> Iterator[list[Any]]:
        keys = iter(self._sampler)
        return (list(islice(keys, size)) for size in self.sizes())


class UserEvalBatches(Sampler[list[Any]]):
    """A batch sampler for evaluation that yields this rank's share of the user's own batches.

    Each batch goes to exactly one rank.
    """

    def __init__(self, user_sampler: Iterable[Any], rank: int, world_size: int, *, seed: int) -> None:
        self.seed, self.epoch = seed, 0
        share = split(_length(user_sampler, "batch sampler"), world_size, rank)
        everyone = _drawn_batches(user_sampler, seed, self.epoch)
        self._everyone = everyone
        self._batches = everyone[share.start : share.stop]

    def sizes(self) -> list[int]:
        """The number of samples in each batch."""
        return list(map(len, self._batches))

    def filler_batch(self) -> list[Any]:
        """The first batch, for a rank that has no batch of its own."""
        return list(self._everyone[0])

    def order(self) -> Sequence[Any]:
        """The keys of all ranks' samples, rank by rank."""
        return [*chain(*self._everyone)]

    def __iter__(self) -> Iterator[list[Any]]:
        return iter(self._batches)


# --- User-defined samplers --------------------------------------------------------------------------------------------


def _length(user_sampler: Iterable[Any], what: str) -> int:
    try:
        return len(cast(Sized, user_sampler))
    except TypeError:
        raise DataError(
            f"the {what} ({type(user_sampler).__name__}) has no length",
            "add a __len__ that returns the number of items per epoch, which determines the number of steps",
        ) from None


def lengths_in(user_sampler: Iterable[Any], what: str, seed: int, epochs: Sequence[int], then: int = 0) -> list[int]:
    """The lengths of the user's sampler in these epochs; its `set_epoch`, if any, is called before each length is read.

    `what`: "sampler" or "batch sampler", for messages. `then`: the epoch that the sampler is set to afterwards.
    """
    if not _set_epochs(user_sampler):
        return [_length(user_sampler, what)] * len(epochs)
    lengths = []
    for epoch in (*epochs, then):
        with _seeded(user_sampler, mixed_seed(seed, epoch)):
            for set_epoch in _set_epochs(user_sampler):
                set_epoch(epoch)
            lengths.append(_length(user_sampler, what))
    return lengths[:-1]


def _set_epochs(user_sampler: Iterable[Any]) -> list[Callable[[int], object]]:
    """The `set_epoch` methods of a sampler and of the samplers inside it."""
    methods = [getattr(part, "set_epoch", None) for part in samplers_in(user_sampler)]
    return [method for method in methods if callable(method)]


def _draw(user_sampler: Iterable[Any], seed: int, epoch: int, what: str) -> list[Any]:
    """The items that the user's sampler yields in `epoch`, drawn with the same seeds on every rank and in every run.

    Random states are restored afterwards. `what`: "sampler" or "batch sampler", for messages.
    """
    with _seeded(user_sampler, mixed_seed(seed, epoch)):
        for set_epoch in _set_epochs(user_sampler):
            set_epoch(epoch)
        length = _length(user_sampler, what)
        drawn = list(user_sampler)
        # A sampler that counts epochs itself may now report the length of the next epoch, or may not have known the
        # length of this epoch before.
        if len(drawn) == _length(user_sampler, what):
            length = len(drawn)
    if len(drawn) != length:
        raise DataError(
            f"the {what} ({type(user_sampler).__name__}) has length {length}, "
            f"but yields {len(drawn)} items in epoch {epoch + 1}",
            "make its __len__ return the number of items in each epoch, which determines the number of steps",
        )
    return drawn


def _drawn_batches(user_sampler: Iterable[Any], seed: int, epoch: int) -> list[list[Any]]:
    batches = [list(batch) for batch in _draw(user_sampler, seed, epoch, "batch sampler")]
    if [] in batches:
        raise DataError(
            f"the batch sampler ({type(user_sampler).__name__}) yields an empty batch at index {batches.index([])}",
            "skip empty batches, and do not count them in __len__",
        )
    return batches


@contextmanager
def _seeded(user_sampler: Iterable[Any], seed: int) -> Iterator[None]:
    """Context manager that seeds the global generators and the sampler's generators, and restores them on exit."""
    with ExitStack() as stack:
        stack.enter_context(random_states_kept())
        seed_generators(seed)
        for part in samplers_in(user_sampler):
            for value in [*getattr(part, "__dict__", {}).values()]:
                _seed_one(value, seed, stack)
        yield


def _seed_one(value: Any, seed: int, stack: ExitStack) -> None:
    """Seed `value` if it is a random generator of torch, Python or NumPy. `stack` restores the state on exit."""
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


def samplers_in(sampler: Iterable[Any]) -> Iterator[Any]:
    """A sampler and the samplers inside it; a batch sampler usually contains one."""
    part: Any = sampler
    for _ in range(5):  # a limit, in case a sampler contains itself
        yield part
        part = getattr(part, "sampler", None)
        if part is None:
            return
