"""Training data, one optimizer step at a time, from a dataset with a length or from a stream."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist

from ddp_kit.containers import with_copied_containers
from ddp_kit.errors import DataError
from ddp_kit.loader import DatasetEpoch, ReaderState, Stream
from ddp_kit.log import logger
from ddp_kit.parallel import Strategy
from ddp_kit.sampler import TrainBatches, UserTrainBatches
from ddp_kit.torch_internals import pytree
from ddp_kit.trainer.agreement import digest_of
from ddp_kit.trainer.exchange import gathered
from ddp_kit.trainer.position import Facts
from ddp_kit.world import World, host_group

Mover = Callable[[Iterable[Any]], Iterator[Any]]
"""Moves a loader's batches to the device."""
EpochMover = Callable[[int, int], Mover]
"""`(epoch, number)` -> the mover of this rank's batches in an epoch, starting with batch `number`."""
StreamPosition = tuple[ReaderState, ...]
"""The positions of the processes that read a rank's stream, the most recent last; () for other data."""


class Share(NamedTuple):
    """This rank's share of an optimizer step."""

    samples: int
    """Samples of the whole step, over all ranks."""
    passes: tuple[int, ...]
    """The samples in each of this rank's passes; empty if it has none. A pass of 0 samples has zero weight."""


class Feed(Protocol):
    """The steps of an epoch: call `begin`, then `next` and `batch` once per pass, until `next` returns None."""

    @property
    def steps(self) -> int | None:
        """Optimizer steps in this epoch; None if unknown before its end."""

    division: str
    """How a step divides into batches, for the log line at the start of a run; "": as in the batch plan."""
    place: StreamPosition
    """This rank's position in a stream, before the batches of the step that `next` returned last."""

    def steps_in(self, epochs: range) -> int | None:
        """Optimizer steps in this epoch and later ones; None if unknown before their end."""

    def facts(self, epoch: int) -> Facts:
        """Go to the start of an epoch. Returns facts that determine the samples of each of its steps."""

    def begin(self, epoch: int, first_step: int, place: StreamPosition = ()) -> None:
        """Go to a position. `place`: the value of `place` at that position, if known."""

    def next(self) -> Share | None:
        """The next step; None after the last one. All ranks must call it equally often."""

    def batch(self) -> Any:
        """The next pass's batch, on the device."""


def counted(stream: Iterable[tuple[int, Any]], move: Mover) -> Iterator[tuple[int, Any]]:
    """(number of samples, batch on the device) for each batch of a stream, even if `move` prefetches batches."""
    counts: deque[int] = deque()

    def batches() -> Iterator[Any]:
        for samples, batch in stream:
            counts.append(samples)
            yield batch

    return ((counts.popleft(), batch) for batch in move(batches()))


class MapFeed:
    """The feed of a dataset with a length: the division of samples among ranks is known in advance."""

    place: StreamPosition = ()

    def __init__(
        self,
        loader: Iterable[Any],
        batches: TrainBatches | UserTrainBatches,
        move: EpochMover,
        facts: Callable[[], Facts],
        dataset_epoch: DatasetEpoch,
        check: Callable[[], None],
        spare: Callable[[], Any] | None = None,
    ) -> None:
        """`batches`: at the start of the first epoch. `facts()`: those of the present epoch.

        `check()`: raises an error if the present epoch, unless it is the first, is not fit for training. A collective.
        """
        self._dataset_epoch = dataset_epoch
        self._check = check
        self._checked = batches.epoch
        self._spare = spare
        self._left = 0  # remaining passes of the step that have samples
        self._last: Any = None  # a copy of the last batch, for passes with zero weight
        self.division = batches.division
        self._facts = facts
        self._loader = loader
        self._batches = batches
        self._move = move
        self._number = 0

    @property
    def steps(self) -> int:
        return self._batches.steps

    def steps_in(self, epochs: range) -> int:
        return self._batches.steps_in(epochs)

    def facts(self, epoch: int) -> Facts:
        self._go_to(epoch, 0)
        return self._facts()

    def _go_to(self, epoch: int, first_step: int) -> None:
        self._dataset_epoch.set(epoch)
        self._batches.set_position(epoch, first_step)

    def begin(self, epoch: int, first_step: int, place: StreamPosition = ()) -> None:  # noqa: ARG002 - the step says it
        self._go_to(epoch, first_step)
        if epoch != self._checked:
            self._checked = epoch
            self._check()
        self._number = first_step
        number = sum(len(self._batches.passes(step)) for step in range(first_step))
        self._arriving = self._move(epoch, number)(self._loader)

    def next(self) -> Share | None:
        number = self._number
        if number == self.steps:
            return None
        self._number = number + 1
        passes = self._batches.passes(number)
        if self._spare is not None:
            self._left = len(passes)
            passes += (0,) * (self._batches.most_passes(number) - self._left)
        return Share(self._batches.samples(number), passes)

    def batch(self) -> Any:
        if self._spare is None:
            return next(self._arriving)
        if self._left:
            self._left -= 1
            batch = next(self._arriving)
            self._last = with_copied_containers(batch)
            return batch
        if self._last is None:
            self._last = self._spare()
        return with_copied_containers(self._last)


class StreamFeed:
    """The feed of an iterable dataset of unknown length; every rank reads its own stream.

    Each rank fetches the batches of the next step in advance, and an all-reduce adds up the ranks' sample counts. So
    the weights of a step are known when it starts, and all ranks end the epoch together, when no rank has samples left.
    A rank that runs out earlier takes part without samples. The all-reduce is on host memory, does not wait for the
    device, and overlaps with the previous step.
    `at_least`: the minimum number of samples in a step; a smaller one is skipped and ends the epoch.
    """

    steps = None
    division = ""

    def __init__(
        self,
        loader: Stream,
        passes: int,
        world: World,
        move: EpochMover,
        facts: Facts,
        strategy: Strategy,
        at_least: int | None = None,
    ) -> None:
        self._strategy = strategy
        self._last: list[Any] = []  # a copy of the last batch, for passes with zero weight
        self._facts = facts
        self._at_least = at_least or 1
        self._loader = loader
        self._passes = passes
        self._world = world
        self._move = move
        self._compared = False  # whether the ranks' first samples were compared
        self.place = self._reached = StreamPosition()

    def steps_in(self, epochs: range) -> None:
        """None: the length of a stream is not known before its end."""

    def facts(self, epoch: int) -> Facts:  # noqa: ARG002 - a stream's samples are not known in advance
        return self._facts

    def begin(self, epoch: int, first_step: int, place: StreamPosition = ()) -> None:
        self.place = self._reached = place
        self._loader.set_position(epoch, place)
        self._arriving = counted(self._loader, self._move(epoch, first_step * self._passes if place else 0))
        if first_step and not place:
            logger.info(
                "skipping the first {} steps of epoch {} by reading them: the stream has no state_dict to resume from",
                first_step,
                epoch + 1,
            )
            for _ in range(first_step):
                self._fetch()
        self._begun_at: int | None = first_step  # None once a step of the epoch has been asked for

    def _fetch(self) -> list[tuple[int, Any]]:
        fetched = list(islice(self._arriving, self._passes))
        if states := self._loader.states:
            for state in [states.popleft() for _ in fetched]:
                self._reached = (*(each for each in self._reached if each.reader != state.reader), state)
        return fetched

    def next(self) -> Share | None:
        self.place = self._reached
        fetched = self._fetch()
        passes, batches = tuple(samples for samples, _ in fetched), [batch for _, batch in fetched]
        samples = self._over_all_ranks(sum(passes) if self._strategy.contributes else 0, dist.ReduceOp.SUM)
        if self._strategy.equal_passes and samples:
            passes, batches = self._padded(passes, batches)
        self._waiting = iter(batches)
        if samples < self._at_least and self._begun_at is not None:
            raise self._no_steps_error(samples, self._begun_at)
        if not self._compared and self._world.world_size > 1:
            self._compared = True
            self._compare_first_samples(batches)
        self._begun_at = None
        return Share(samples, passes) if samples >= self._at_least else None

    def batch(self) -> Any:
        return next(self._waiting)

    def _padded(self, passes: tuple[int, ...], batches: list[Any]) -> tuple[tuple[int, ...], list[Any]]:
        """Pad with zero-weight passes to the largest number of passes on any rank. A collective."""
        missing = self._over_all_ranks(len(passes), dist.ReduceOp.MAX) - len(passes)
        self._last = with_copied_containers(batches[-1:]) or self._last
        if missing and not self._last:
            raise DataError(
                "the stream of this rank yields no batch, but with this parallel strategy every rank must run every "
                "pass",
                "give every rank at least one batch, or use parallel='ddp'",
            )
        return passes + (0,) * missing, batches + with_copied_containers(self._last * missing)

    def _no_steps_error(self, samples: int, first_step: int) -> DataError:
        """The error for an epoch without steps: the next epoch would have none either."""
        if first_step:
            return DataError(
                f"the run resumes at step {first_step + 1} of an epoch, but train_data ended before that step",
                "resume with the same data as before, or start from step 0 with another checkpoint.dir",
            )
        if samples:
            return DataError(
                f"train_data yielded {samples} samples in an epoch, fewer than the global batch of {self._at_least}, "
                "and data.drop_last skips an incomplete batch: there is no complete step",
                "use a smaller global_batch_size, or data.drop_last=False",
            )
        return DataError(
            "train_data yielded no sample on any rank",
            "check what its __iter__ yields (an exhausted generator or file yields nothing in the next epoch), "
            "how it divides the data, and whether drop_last skips its only batches",
        )

    def _compare_first_samples(self, batches: list[Any]) -> None:
        """Warn if all ranks read the same samples, because the stream is not divided among ranks. A collective.

        Raises `DataError` if ranks that share a model replica read different samples.
        """
        bits = b"".join(leaf.cpu().numpy().tobytes() for leaf in pytree.tree_leaves(batches) if _readable(leaf))
        digests: dict[int, set[int]] = {}
        for data_rank, digest in gathered(self._world, [self._strategy.data_rank, digest_of(bits)]):
            digests.setdefault(data_rank, set()).add(digest)
        if any(len(found) > 1 for found in digests.values()):
            raise DataError(
                "ranks that share one replica of the model read different samples from their streams",
                "divide the stream by trainer.data_rank of trainer.data_ranks, not by the rank of the process",
            )
        if bits and len(digests) > 1 and len(set.union(*digests.values())) == 1:
            logger.warning(
                "all {} ranks read the same samples from their streams: divide them in the dataset's __iter__, such as "
                "with islice(samples, rank, None, world_size), and over DataLoader workers too (get_worker_info)",
                self._world.world_size,
            )

    def _over_all_ranks(self, number: int, operation: Any) -> int:
        if self._world.world_size == 1:
            return number
        total = torch.tensor(number)
        dist.all_reduce(total, operation, group=host_group(self._world))
        return int(total)


def _readable(leaf: Any) -> bool:
    """Whether numpy can represent it."""
    return isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided and leaf.dtype != torch.bfloat16
