"""Sizes of global batches, and the samples that each rank takes in each step."""

import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property, lru_cache
from hashlib import blake2b
from itertools import accumulate, chain, pairwise
from random import Random, SystemRandom
from typing import Any, cast

import torch
import xxhash
from torch import Generator
from torch.utils.data import Sampler

from ddp_kit.distributed.world import mixed_seed, random_states_kept, seed_generators
from ddp_kit.errors import ConfigError, DataError
from ddp_kit.texts import plural

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
        whole, rest = divmod(samples, self.global_batch)
        return whole + (rest > 0 and not drop_last)

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
        passes = _ceil(len(positions), self.micro_batch)
        if samples >= self.global_batch:
            passes = max(passes, min(self.accumulation, len(positions)))
        shares = (split(len(positions), passes, number) for number in range(passes))
        return tuple(positions[share.start : share.stop] for share in shares)


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
    if global_batch is None and micro_batch is not None:
        global_batch = micro_batch * (accumulation or 1) * world_size
    global_batch = global_batch or DEFAULT_GLOBAL_BATCH
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
        f"x {plural(world_size, 'rank')} = {product}, "
        f"but global_batch_size is {global_batch}; the nearest settings that work:",
        "change one of the three sizes, or leave one out, which is then computed from the other two",
        ways,
    )


# --- Epochs -----------------------------------------------------------------------------------------------------------
# An epoch is an order of samples and the bounds of its steps in this order, both a pure function of (seed, epoch). Step
# k has the same samples for any number of ranks. A user's own sampler is iterated on every rank with the same random
# states, so that all ranks draw the same order.


class Epochs:
    """The order of the samples in each epoch, over all ranks, and the bounds of the optimizer steps in this order.

    A step has `per_step` samples, or `per_step` batches of the user's own batch sampler; None: one step is the whole
    epoch. The last step of an epoch may be shorter; if `drop_last` is set, it is then omitted.
    `sampler`, `batch_sampler`: the user's own; it determines the number and order of samples. `divided`: whether the
    batches of `batch_sampler` are divided among the ranks; otherwise each batch goes to one rank as a whole.
    `set_epoch` reads the length of `data`, which may change.
    Raises `DataError` if the user's sampler has no length, or does not yield as many items as its length.
    """

    def __init__(
        self,
        data: Sized,
        seed: int,
        per_step: int | None = None,
        *,
        shuffle: bool = False,
        sampler: Iterable[Any] | None = None,
        batch_sampler: Iterable[Any] | None = None,
        divided: bool = False,
        drop_last: bool = False,
        epoch: int = 0,
    ) -> None:
        self.seed = seed
        self._data = data
        self._per_step = per_step
        self._shuffle = shuffle
        self._divided = divided
        self._drop_last = drop_last
        self._user_sampler: Iterable[Any] | None = None
        self._what = "dataset"
        for what, own in (("sampler", sampler), ("batch sampler", batch_sampler)):
            if own is not None:
                _length(own, what)
                self._user_sampler = own
                self._what = what
        self._drawn: _Drawn | None = None  # what the user's sampler has yielded for this epoch
        self._known: dict[int, int] = {}  # epoch -> steps
        self.set_epoch(epoch)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, and read the number of samples, which may change between epochs."""
        self.epoch = epoch
        if self._user_sampler is None:
            self._keys: Sequence[Any] = range(len(self._data))
            self._bounds: Sequence[int] = range(len(self._data) + 1)
        else:
            if self._drawn is None or self._drawn.epoch != epoch:
                self._drawn = _drawn(self._user_sampler, self.seed, epoch, self._what)
            self._keys = self._drawn.keys
            self._bounds = self._drawn.bounds
        self._items = len(self._bounds) - 1
        self._step = self._per_step or max(self._items, 1)

    def keys(self) -> Sequence[Any]:
        """The keys of all samples of this epoch, over all ranks, in order."""
        if self._shuffle and isinstance(self._keys, range):
            generator = torch.Generator().manual_seed(mixed_seed(self.seed, self.epoch))
            self._keys = torch.randperm(self._items, generator=generator).numpy().data  # 8 bytes per key
        return self._keys

    def order(self) -> Sequence[Any] | None:
        """The keys of all samples of this epoch in the order of the user's sampler; None without one."""
        return None if self._user_sampler is None else self.keys()

    def fingerprint(self) -> str:
        """A hash of what the user's own sampler has yielded for this epoch; "" without one."""
        return "" if self._drawn is None else self._drawn.fingerprint

    def first_batch(self) -> list[Any]:
        """The keys of the first batch of the user's own batch sampler; otherwise, the key of the first sample."""
        return list(self.keys()[: self._bounds[1]])

    def cuts(self, step: int) -> Sequence[int]:
        """The positions in `keys` at which a step of this epoch may be divided, with its start and its end."""
        first = step * self._step
        end = min(first + self._step, self._items)
        if self._divided:
            return range(self._bounds[first], self._bounds[end] + 1)
        return self._bounds[first : end + 1]

    def full_steps(self) -> int:
        """The number of steps of this epoch, from the first on, that have `per_step` samples; 0 for batches."""
        return isinstance(self._bounds, range) * (self._items // self._step)

    def steps(self) -> int:
        """The number of steps in this epoch. Raises `DataError` if there is none."""
        return self._steps_of(self._items, self.epoch)

    def steps_in(self, epochs: range) -> int:
        """The total number of steps in these epochs, which start with the current epoch.

        All epochs have the same number of steps, unless `set_epoch` changes the length of the user's sampler.
        """
        if self._user_sampler is None or not _set_epochs(self._user_sampler):
            return len(epochs) * self.steps()
        self._known[self.epoch] = self.steps()
        new = [epoch for epoch in epochs if epoch not in self._known]
        if new:
            lengths = lengths_in(self._user_sampler, self._what, self.seed, new, then=self.epoch)
            self._known |= {epoch: self._steps_of(length, epoch) for epoch, length in zip(new, lengths, strict=True)}
        return sum(map(self._known.__getitem__, epochs))

    def _steps_of(self, items: int, epoch: int) -> int:
        """The number of steps in an epoch of so many samples or batches. Raises `DataError` if there is none."""
        if self._per_step is None:
            return 1
        whole, rest = divmod(items, self._per_step)
        if steps := whole + (rest > 0 and not self._drop_last):
            return steps
        where = f" in epoch {epoch + 1}" if epoch else ""
        if items == 0:
            raise DataError(
                f"the {self._what} has length 0{where}: there are no samples to train on",
                "make sure that it has samples in every epoch, or set max_steps so that the run ends earlier",
            )
        if self._what == "batch sampler":
            raise DataError(
                f"the batch sampler yields {items} batches, but one step needs {self._per_step}: there is no complete "
                f"step{where}",
                "use fewer accumulation_steps, or data.drop_last=False",
            )
        raise DataError(
            f"the {self._what} has {items} samples, fewer than the global batch of {self._per_step}: "
            f"there is no complete step{where}",
            "use a smaller global_batch_size, or data.drop_last=False",
        )


class RankBatches(Sampler[list[Any]]):
    """A batch sampler that divides each step of an epoch among the ranks, and yields this rank's batches.

    Each batch is one forward and backward pass. Iteration starts at step `first_step`.
    `divide`: a function of (rank, number of parts in a step) that returns the rank's passes as ranges of parts. A part
    is a sample, or a batch that is not divided.
    """

    def __init__(self, epochs: Epochs, rank: int, divide: Callable[[int, int], Sequence[range]]) -> None:
        self.epochs = epochs
        self._rank = rank
        self._divide = lru_cache(64)(divide)
        self._full_passes: list[range] = []  # of a step with `per_step` samples, as positions within the step
        self._full_sizes: tuple[int, ...] = ()
        self._full_samples = 0
        self.seed = epochs.seed
        self.set_position(epochs.epoch, 0)

    def set_position(self, epoch: int, first_step: int) -> None:
        """Set where the next iteration starts. Raises `DataError` if the epoch has no steps."""
        self.epochs.set_epoch(epoch)
        self.epoch = epoch
        self.first_step = first_step
        self.steps = self.epochs.steps()
        self._full_steps = 0
        if full_steps := self.epochs.full_steps():
            self._full_passes = self._passes(0)
            self._full_sizes = tuple(map(len, self._full_passes))
            self._full_samples = self.samples(0)
            self._full_steps = full_steps

    def samples(self, step: int) -> int:
        """The number of samples in optimizer step `step`, over all ranks."""
        if step < self._full_steps:  # the usual case, without computation
            return self._full_samples
        cuts = self.epochs.cuts(step)
        return cuts[-1] - cuts[0]

    def pass_sizes(self, step: int) -> tuple[int, ...]:
        """The number of samples in each forward pass of this rank in step `step`; () if the rank runs none."""
        if step < self._full_steps:
            return self._full_sizes
        return tuple(map(len, self._passes(step)))

    def passes_before(self, step: int) -> int:
        """The number of forward passes of this rank in the steps of this epoch before `step`."""
        full = min(step, self._full_steps)
        return full * len(self._full_sizes) + sum(len(self.pass_sizes(each)) for each in range(full, step))

    def max_passes(self, step: int) -> int:
        """The largest number of forward passes on any rank in step `step`."""
        return len(self._divide(0, len(self.epochs.cuts(step)) - 1))

    def keys(self, step: int, number: int) -> list[Any] | None:
        """The keys of the samples in this rank's pass `number` of step `step`; None if there is no such pass."""
        for positions in self._passes(step)[number : number + 1]:
            return list(self.epochs.keys()[positions.start : positions.stop])
        return None

    def checksum(self, step: int) -> str:
        """A checksum of the samples of step `step`, over all ranks."""
        cuts = self.epochs.cuts(step)
        return checksum(self.epochs.keys()[cuts[0] : cuts[-1]])

    def __iter__(self) -> Iterator[list[Any]]:
        keys = self.epochs.keys()
        for step in range(self.first_step, self.steps):
            for positions in self._passes(step):
                yield list(keys[positions.start : positions.stop])

    def _passes(self, step: int) -> list[range]:
        """This rank's passes in step `step`, as ranges of positions in the order of the epoch."""
        if step < self._full_steps:
            start = step * self._full_samples
            return [range(start + passes.start, start + passes.stop) for passes in self._full_passes]
        cuts = self.epochs.cuts(step)
        return [range(cuts[parts.start], cuts[parts.stop]) for parts in self._divide(self._rank, len(cuts) - 1)]


def passes_of(size: int, ranks: int, rank: int, parts: int) -> tuple[range, ...]:
    """The passes of a rank if so many parts are split evenly among the ranks, as ranges of parts.

    A pass has `size` parts; the rank's last pass may have fewer.
    """
    share = split(parts, ranks, rank)
    return tuple(share[start : start + size] for start in range(0, len(share), size))


def checksum(keys: Sequence[Any]) -> str:
    """A checksum of keys in their order, as eight hexadecimal digits. Keys that are no integers: of their `repr`."""
    return xxhash.xxh32_hexdigest(_content(_compact(keys)))


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
    with random_states_kept():  # once: it takes nine times as long as an epoch
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


@dataclass(frozen=True)
class _Drawn:
    """What the user's own sampler has yielded for an epoch."""

    epoch: int
    keys: Sequence[Any]
    """The keys of all samples, in order."""
    bounds: Sequence[int]
    """The position in `keys` of each batch, and the end of the last batch; of each key, if there are no batches."""

    @cached_property
    def fingerprint(self) -> str:
        """A hash of the keys, and of their division into batches."""
        content = self.keys
        if not isinstance(self.bounds, range):
            content = [[*self.keys[start:stop]] for start, stop in pairwise(self.bounds)]
        return blake2b(_content(content)).hexdigest()


def _drawn(user_sampler: Iterable[Any], seed: int, epoch: int, what: str) -> _Drawn:
    """Iterate over the user's sampler for `epoch`, with the same seeds on every rank and in every run.

    Random states are restored afterwards. `what`: "sampler" or "batch sampler", for messages.
    """
    with random_states_kept(), _seeded(user_sampler, mixed_seed(seed, epoch)):
        for set_epoch in _set_epochs(user_sampler):
            set_epoch(epoch)
        length = _length(user_sampler, what)
        items = list(user_sampler)
        # A sampler that counts epochs itself may now report the length of the next epoch, or may not have known the
        # length of this epoch before.
        if len(items) == _length(user_sampler, what):
            length = len(items)
    if len(items) != length:
        raise DataError(
            f"the {what} ({type(user_sampler).__name__}) has length {length}, "
            f"but yields {len(items)} items in epoch {epoch + 1}",
            "make its __len__ return the number of items in each epoch, which determines the number of steps",
        )
    if what == "sampler":
        return _Drawn(epoch, _compact(items), range(length + 1))
    batches = [list(batch) for batch in items]
    if [] in batches:
        raise DataError(
            f"the batch sampler ({type(user_sampler).__name__}) yields an empty batch at index {batches.index([])}",
            "skip empty batches, and do not count them in __len__",
        )
    keys: Sequence[Any] = [*chain(*batches)]
    if {*map(type, keys)} == {int}:  # the dataset gets the very objects of the user's batches
        keys = _compact(keys)
    return _Drawn(epoch, keys, array("q", accumulate(map(len, batches), initial=0)))


def _compact(keys: Sequence[Any]) -> Sequence[Any]:
    """Integers as an array, which takes 8 bytes per key; other keys as they are."""
    if isinstance(keys, memoryview):
        return keys
    try:
        return array("q", keys)
    except (TypeError, OverflowError):
        return keys


def _content(keys: Sequence[Any]) -> memoryview | bytes:
    """The bytes of compact keys; of other keys, those of their `repr`."""
    return memoryview(keys) if isinstance(keys, memoryview | array) else repr([*keys]).encode()


@contextmanager
def _seeded(user_sampler: Iterable[Any], seed: int) -> Iterator[None]:
    """Context manager that seeds the global and the sampler's own generators, and restores only its own on exit."""
    seed_generators(seed)
    with ExitStack() as stack:
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
