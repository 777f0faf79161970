"""Batches on the device, for training (divided into optimizer steps), evaluation and prediction."""

import sys
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, islice
from typing import Any, NamedTuple, NoReturn, Protocol

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from ddp_kit.config.settings import TrainerConfig
from ddp_kit.data.collate import DeviceTransform, unpacked
from ddp_kit.data.comparison import RANKS, subset_digest
from ddp_kit.data.device import on_device
from ddp_kit.data.loader_batches import LoaderBatches, iterates_itself, loader_batches
from ddp_kit.data.loading import build_loader
from ddp_kit.data.sampler import (
    BatchPlan,
    Epochs,
    RankBatches,
    passes_of,
    split,
)
from ddp_kit.data.source import (
    Batching,
    Data,
    DatasetEpoch,
    batching,
    check_batch_size,
    dataset_and_loader,
    open_data,
    parts_with_state,
    train_batching,
)
from ddp_kit.data.stream import ReaderState, Stream, build_stream
from ddp_kit.distributed.consistency import Facts, check_agreement
from ddp_kit.distributed.world import World, gathered, host_group, mixed_seed, random_states_kept
from ddp_kit.errors import ConfigError, DataError
from ddp_kit.log import logger
from ddp_kit.structures import UNKNOWN_DIGEST, digest_of_value, tensors_in, with_copied_containers

# --- Feeds ------------------------------------------------------------------------------------------------------------
# Training data, one optimizer step at a time, from a dataset with a length or from a stream.


Mover = Callable[[Iterable[Any]], Iterator[Any]]
"""A function that moves a loader's batches to the device."""
EpochMover = Callable[[int, int], Mover]
"""A function of `(epoch, number)` that returns a `Mover` for this rank's batches in `epoch`, from `number` on."""
StreamPosition = tuple[ReaderState, ...]
"""The positions of the processes that read a rank's stream, in the order of their last batches; () for other data."""


@dataclass(frozen=True)
class DataRank:
    """The part of the data that this rank reads. Ranks that share one replica of the model read the same samples."""

    rank: int
    """The index of this part, from 0."""
    ranks: int
    """The number of parts into which the data is divided."""
    contributes: bool
    """Whether this rank's samples are counted: true for exactly one of the ranks that read the same samples."""
    equal_passes: bool
    """Whether all ranks must run the same number of forward and backward passes.

    If so, a rank with fewer batches repeats a batch with zero weight.
    """


class Share(NamedTuple):
    """This rank's share of an optimizer step."""

    step_samples: int
    """The number of samples in the whole step, over all ranks."""
    passes: tuple[int, ...]
    """The number of samples in each forward and backward pass of this rank; () if it runs no pass.

    A pass of 0 samples has zero weight; it only makes the number of passes equal on all ranks.
    """
    keys: Callable[[int], Sequence[Any] | None] = lambda _pass: None
    """A function that returns the indices in the dataset of the samples of a pass, given by its index in this share.

    None if they are unknown.
    """


class Feed(Protocol):
    """Supplies the training batches of an epoch, one optimizer step at a time.

    Call `begin`; then, for each step, call `next` once and `batch` once per pass, until `next` returns None.
    """

    @property
    def steps(self) -> int | None:
        """The number of optimizer steps in this epoch; None if unknown before the end of the epoch."""

    division: str
    """How a step is divided into batches of the user's own batch sampler, as text for the log; "" for other data."""
    stream_position: StreamPosition
    """This rank's position in its stream before the step that `next` returned last; () for other data."""

    def steps_in(self, epochs: range) -> int | None:
        """The total number of optimizer steps in `epochs`; None if unknown.

        `epochs`: a range that begins with the current epoch.
        """

    def facts(self, epoch: int) -> Facts:
        """Go to the start of an epoch, and return the properties that determine the samples of each step."""

    def begin(self, epoch: int, first_step: int, stream_position: StreamPosition = ()) -> None:
        """Go to a step of an epoch. `stream_position`: the value of the attribute at that step; () if unknown."""

    def next(self) -> Share | None:
        """Return this rank's share of the next step; None after the last step.

        All ranks must call this method the same number of times.
        """

    def batch(self) -> Any:
        """Return the batch of the next pass, on the device; a `Partial` if samples were left out of it."""

    def samples_checksum(self) -> str | None:
        """A checksum of the samples of the step that `next` returned last, over all ranks; None for a stream.

        Call it after the step's batches were read, on a rank that has at least one.
        """


def counted(stream: Iterable[tuple[int, Any]], move: Mover) -> Iterator[tuple[int, Any]]:
    """Yield (number of samples, batch on the device) for each batch of a stream.

    `move`: a function that moves batches to the device, and may prefetch them.
    """
    counts: deque[int] = deque()

    def batches() -> Iterator[Any]:
        for samples, batch in stream:
            counts.append(samples)
            yield batch

    return ((counts.popleft(), batch) for batch in move(batches()))


class MapFeed:
    """The feed of a dataset with a length: the division of samples among ranks is known in advance."""

    stream_position: StreamPosition = ()

    def __init__(
        self,
        loader: Iterable[Any],
        batches: RankBatches,
        move: EpochMover,
        facts: Callable[[], Facts],
        dataset_epoch: DatasetEpoch,
        check: Callable[[], None],
        filler_batch: Callable[[], Any] | None = None,
        division: str = "",
    ) -> None:
        """`batches`: a batch sampler that is positioned at the start of the first epoch.

        `facts`: a function that returns the properties that determine the samples of each step of the current epoch.
        `check`: a collective function that raises an error if the run cannot train on the current epoch; it is not
        called for the first epoch.
        """
        self._dataset_epoch = dataset_epoch
        self._check = check
        self._checked = batches.epoch
        self._filler_batch = filler_batch
        self._left = 0  # remaining passes of the step that have samples
        self._last: Any = None  # a copy of the last batch, for passes with zero weight
        self.division = division
        self._facts = facts
        self._loader = loader
        self._batches = batches
        self._move = move
        self._number = 0

    @property
    def steps(self) -> int:
        return self._batches.steps

    def steps_in(self, epochs: range) -> int:
        return self._batches.epochs.steps_in(epochs)

    def facts(self, epoch: int) -> Facts:
        self._go_to(epoch, 0)
        return self._facts()

    def _go_to(self, epoch: int, first_step: int) -> None:
        self._dataset_epoch.set(epoch)
        self._batches.set_position(epoch, first_step)

    def begin(
        self,
        epoch: int,
        first_step: int,
        stream_position: StreamPosition = (),  # noqa: ARG002 - for streams
    ) -> None:
        self._go_to(epoch, first_step)
        if epoch != self._checked:
            self._checked = epoch
            self._check()
        self._number = first_step
        self._arriving = self._move(epoch, self._batches.passes_before(first_step))(self._loader)

    def next(self) -> Share | None:
        number = self._number
        if number == self.steps:
            return None
        self._number = number + 1
        passes = self._batches.pass_sizes(number)
        if self._filler_batch is not None:
            self._left = len(passes)
            passes += (0,) * (self._batches.max_passes(number) - self._left)
        return Share(self._batches.samples(number), passes, partial(self._batches.keys, number))

    def batch(self) -> Any:
        if self._filler_batch is None:
            return next(self._arriving)
        if self._left:
            self._left -= 1
            batch = next(self._arriving)
            self._last = with_copied_containers(unpacked(0, batch)[1])
            return batch
        if self._last is None:
            self._last = self._filler_batch()
        return with_copied_containers(self._last)

    def samples_checksum(self) -> str:
        return self._batches.checksum(self._number - 1)


class StreamFeed:
    """The feed of an iterable dataset of unknown length. Every rank reads its own stream.

    Each rank fetches the batches of the next step in advance, and an all-reduce adds up the ranks' sample counts. The
    total, over which the loss is averaged, is therefore known before the step starts. All ranks end the epoch at the
    same step, when no rank has samples left; a rank whose stream ends earlier runs the remaining steps without samples.
    The all-reduce uses host memory, does not wait for the device, and overlaps with the previous step.

    `first_batch`: a function that reads the first batch of this rank in an epoch; it returns [batch], or [] if there is
    none. `own`: the batches that it reads, if a DataLoader that iterates in its own way makes them.
    `at_least`: the minimum number of samples in a step; a step with fewer samples is skipped and ends the epoch.
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
        data_rank: DataRank,
        first_batch: Callable[[int], list[Any]],
        own: LoaderBatches | None = None,
        at_least: int = 1,
    ) -> None:
        self._data_rank = data_rank
        self._first_batch = first_batch
        self._own = own
        self._last: list[Any] = []  # a copy of the last batch, for passes with zero weight
        self._facts = facts
        self._at_least = at_least
        self._loader = loader
        self._passes = passes
        self._world = world
        self._move = move
        self._compared = False  # whether the ranks' first samples were compared
        self.stream_position = self._reached = StreamPosition()

    def steps_in(self, epochs: range) -> None:
        """Return None, because the length of a stream is unknown before its end."""

    def facts(self, epoch: int) -> Facts:  # noqa: ARG002 - a stream's samples are not known in advance
        return self._facts

    def begin(self, epoch: int, first_step: int, stream_position: StreamPosition = ()) -> None:
        if stream_position and self._data_rank.equal_passes and not self._last:
            # The stream may have ended already. Not later: after `load_state_dict` it may yield nothing from its start.
            self._last = self._first_batch(epoch)
        self.stream_position = self._reached = stream_position
        self._loader.set_position(epoch, stream_position)
        number = first_step * self._passes if stream_position else 0
        self._arriving = counted(self._loader, self._move(epoch, number))
        if first_step and not stream_position:
            logger.info(
                "reading and discarding the first {} steps of epoch {}, because the stream has no state_dict to resume "
                "from",
                first_step,
                epoch + 1,
            )
            for _ in range(first_step):
                self._fetch()
        self._begun_at: int | None = first_step  # None once a step of the epoch was requested

    def _fetch(self) -> list[tuple[int, Any]]:
        fetched = list(islice(self._arriving, self._passes))
        if states := self._loader.states:
            for state in [states.popleft() for _ in fetched]:
                self._reached = (*(other for other in self._reached if other.reader != state.reader), state)
        if fetched and self._data_rank.equal_passes:
            self._last = with_copied_containers([fetched[-1][1]])
        return fetched

    def next(self) -> Share | None:
        self.stream_position = self._reached
        fetched = self._fetch()
        passes = tuple(samples for samples, _ in fetched)
        batches = [batch for _, batch in fetched]
        samples = self._over_all_ranks(sum(passes) * self._data_rank.contributes, dist.ReduceOp.SUM)
        if self._data_rank.equal_passes and samples:
            missing = self._over_all_ranks(len(passes), dist.ReduceOp.MAX) - len(passes)
            if missing and not self._last:
                _raise_no_batch()
            passes += (0,) * missing
            batches += with_copied_containers(self._last * missing)
        self._waiting = iter(batches)
        if samples < self._at_least and self._begun_at is not None:
            raise self._no_steps_error(samples, self._begun_at)
        if not self._compared and self._world.world_size > 1:
            self._compared = True
            if self._own is not None:
                self._own.check_ranks(self._world, "train_data")
            self._compare_first_samples(batches)
        self._begun_at = None
        return Share(samples, passes) if samples >= self._at_least else None

    def batch(self) -> Any:
        return next(self._waiting)

    def samples_checksum(self) -> None:
        """Return None, because the samples of a stream have no index."""

    def _no_steps_error(self, samples: int, first_step: int) -> DataError:
        """Create the error for an epoch without steps: the run must stop, because later epochs may also have none."""
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
            "check what the dataset's __iter__ yields (an exhausted generator or file yields nothing in the next "
            "epoch), how it divides the data among ranks, and whether drop_last skips its only batches",
        )

    def _compare_first_samples(self, batches: list[Any]) -> None:
        """Warn if all ranks read the same samples because the stream is not divided among them. A collective.

        Raises `DataError` if ranks that share a model replica read different samples.
        """
        own = digest_of_value([*tensors_in(batches)])
        everyone = gathered(self._world, [self._data_rank.rank, own])
        if len({*map(tuple, everyone)}) > len({data_rank for data_rank, _ in everyone}):
            raise DataError(
                "ranks that share one replica of the model read different samples from their streams",
                "divide the stream by trainer.data_rank and trainer.data_ranks, not by the rank of the process",
            )
        if own != UNKNOWN_DIGEST and self._data_rank.ranks > 1 and len({digest for _, digest in everyone}) == 1:
            logger.warning(
                "all {} ranks read the same samples from their streams: divide the samples in the dataset's __iter__, "
                "for example with islice(samples, rank, None, world_size), and also among DataLoader workers "
                "(get_worker_info)",
                self._world.world_size,
            )

    def _over_all_ranks(self, number: int, operation: Any) -> int:
        if self._world.world_size == 1:
            return number
        total = torch.tensor(number)
        dist.all_reduce(total, operation, group=host_group(self._world))
        return int(total)


# --- Feed builder -----------------------------------------------------------------------------------------------------
# Turns the user's data into feeds for training and batches for evaluation.


@dataclass(frozen=True)
class EvaluationData:
    """Batches for evaluation or prediction."""

    batches: Callable[[], Iterable[tuple[int, Any]]]
    """A function that returns this rank's batches, as an iterable of (number of samples, batch on the device)."""
    filler_batch: Callable[[], Any]
    """A function that returns a batch for a rank that has no batch of its own. Raises `DataError` for a stream."""
    first: Callable[[], list[tuple[int, Any]]] | None = None
    """A function that reads this rank's first batch without DataLoader workers; None for a stream.

    It returns [(number of samples, batch)], or [] if this rank has no batch.
    """
    count: Callable[[], int] | None = None
    """A function that returns the number of this rank's batches; None for a stream."""
    order: Callable[[], Sequence[Any] | None] = lambda: None
    """A function that returns the keys of all ranks' samples, rank by rank; None if they are in the dataset's order.

    Raises `DataError` if the order is random and cannot be known.
    """


def _raise_no_batch() -> NoReturn:
    raise DataError(
        "the stream of this rank yields no batch, but with this parallel strategy all ranks must run the same number "
        "of passes",
        "give every rank at least one batch, or use parallel='ddp'",
    )


def loader_batch_size(data: Data, config: TrainerConfig) -> int | None:
    """The batch size of the user's DataLoader; None without a DataLoader, or if the configuration sets a batch size."""
    if config.global_batch_size or config.micro_batch_size or config.reference_batch_size:
        return None
    _, loader = dataset_and_loader(data)
    return batching(loader).size  # also if a BatchSampler has the size


@dataclass(frozen=True)
class FeedBuilder:
    """Creates the training feeds and the evaluation batches of one Trainer."""

    config: TrainerConfig
    world: World
    data_rank: DataRank
    plan: BatchPlan
    """The division of each training step into batches."""
    dtype: torch.dtype | None
    """The dtype to which floating-point tensors of a batch are converted; None: they are not converted."""
    check_first: Callable[[Any], None]
    """A function that is called with the first batch of each epoch and evaluation, before it leaves the host."""
    needs_equal_samples: bool
    """Whether all ranks must have equally many samples in each pass, because the model has SyncBatchNorm."""
    fetched: Callable[[], None]
    """A function that is called when a training batch has been fetched to the host."""
    moved: Callable[[], None]
    """A function that is called when a training batch is on the device."""

    def _reader(self, own: LoaderBatches | None = None) -> World:
        """The world for reading data: a copy of `world` with the rank and number of ranks of `data_rank`.

        Ranks that read the same samples then draw the same random numbers. `own`: the batches to read, if a DataLoader
        that iterates in its own way makes them.
        """
        reader = replace(self.world, rank=self.data_rank.rank, world_size=self.data_rank.ranks)
        return reader if own is None else own.reader(reader)

    def train_feed(self, data: Data, step: int, epoch: int) -> Feed:
        """Create the feed of training data, positioned at the start of an epoch.

        `step`: the number of completed optimizer steps; makes the base seed of new DataLoader workers differ. Samples
        do not depend on it: see `SampleBatches`. Raises `ConfigError` or `DataError` for data that does not fit the
        configuration.
        """
        dataset, template = open_data(data, "train_data")
        config = self.config
        world = self.world
        options = train_batching(dataset, template, config.data)
        asked = config.global_batch_size is not None or config.micro_batch_size is not None
        if template is not None:
            check_batch_size(options, self.plan.micro_batch, asked=asked)
        seed = mixed_seed(config.seed, step)
        dataset, template, own = self._own_batches(dataset, template, "train_data", in_order=False)
        if isinstance(dataset, IterableDataset):
            self._check_stream()
            share = split(self.plan.global_batch, self.data_rank.ranks, self.data_rank.rank)
            passes = -(-len(share) // self.plan.micro_batch)
            sizes = [len(split(len(share), passes, number)) for number in range(passes)]
            build = partial(build_stream, dataset, sizes, config.data, self._reader(own), config.seed, template)
            first_batch = partial(self._first_of_stream, build)
            stream = build(record_states=True)
            facts = self._facts(dataset, template, batching(template))
            at_least = self.plan.global_batch if config.data.drop_last else 1
            return StreamFeed(
                stream, passes, world, self._move, facts, self.data_rank, first_batch, own, at_least=at_least
            )
        if world.is_main and config.checkpoint.dir is not None and (names := parts_with_state(dataset, options)):
            logger.warning(
                "state_dict() of {} is not called, and checkpoints do not contain its state: the samples of an epoch "
                "must depend only on (seed, epoch), for example in set_epoch; an IterableDataset may have a state",
                " and ".join(names),
            )
        dataset_epoch = DatasetEpoch(dataset, config.seed)
        dataset_epoch.set(epoch)
        batches = self._train_batches(dataset, options, epoch)
        if asked and options.batches is None and self.plan.global_batch > len(dataset) and world.is_main:
            logger.warning(
                "the global batch is {} samples, but train_data has only {}: each step uses all samples",
                self.plan.global_batch,
                len(dataset),
            )
        epoch_facts = partial(self._facts, dataset, template, options, batches.epochs)
        self._check_epoch(batches, options, epoch_facts)
        transform = config.data.device_transform
        keyed = config.data.seed_samples and transform is not None
        loader = build_loader(
            dataset, batches, config.data, self._reader(), seed, template, keyed=keyed, dataset_epoch=dataset_epoch
        )
        filler_batch = None
        if self.data_rank.equal_passes:
            filler_batch = lambda: self._read(dataset, batches.epochs.first_batch(), template, transform)[1]  # noqa: E731
        # In host memory, because the device is still computing steps.
        check = partial(self._check_epoch, batches, options, epoch_facts, on_host=True)
        division = self._division(options)
        return MapFeed(loader, batches, self._move, epoch_facts, dataset_epoch, check, filler_batch, division)

    def _own_batches(
        self, dataset: Any, template: DataLoader[Any] | None, role: str, *, in_order: bool
    ) -> tuple[Any, DataLoader[Any] | None, LoaderBatches | None]:
        """Replace a DataLoader that iterates in its own way by this rank's batches of it, which are a stream.

        Returns the dataset, the DataLoader and these batches; the arguments and None for other data.
        """
        if template is None or not iterates_itself(template):
            return dataset, template, None
        own = loader_batches(template, self.data_rank.rank, self.data_rank.ranks, in_order=in_order, role=role)
        return own, own.as_loader(), own

    def _first_of_stream(self, build: Callable[[], Stream], epoch: int) -> list[Any]:
        """[the first batch of a stream in an epoch], or []. Random states are kept, as in `_read`."""
        with random_states_kept(self.world):
            stream = build()
            stream.set_position(epoch)
            return [batch for _, batch in islice(counted(stream, self._move(epoch, 0)), 1)]

    def _facts(
        self, dataset: Any, template: DataLoader[Any] | None, options: Batching, epochs: Epochs | None = None
    ) -> Facts:
        """Properties that determine the samples of each step of the current epoch, or those of a stream.

        Those of a stream must be equal on all ranks, because a checkpoint stores them only once.
        `epochs`: None for a stream.
        """
        config = self.config
        facts: Facts = {"the setting seed": config.seed, "drop_last": config.data.drop_last or options.drop_last}
        if options.batches is None:
            facts["the global batch"] = self.plan.global_batch
        else:
            facts["the batches of a step over all ranks"] = self._per_step(options)
        if epochs is None:
            workers = config.data.num_workers
            makes_batches = False
            if template is not None:
                workers = template.num_workers
                makes_batches = template.batch_size is None
            facts[RANKS] = self.data_rank.ranks
            facts["data.num_workers"] = workers or 1  # the order is the same without workers and with one worker
            if workers not in (0, 1) or makes_batches:
                facts["the micro-batch"] = self.plan.micro_batch
            return facts
        facts["the number of samples"] = len(dataset)
        if order := epochs.fingerprint():
            owner = "configuration" if template is None else "DataLoader"
            facts[f"the order of the {owner}'s own sampler"] = order
        if (digest := subset_digest(dataset)) is not None:
            facts["the samples of the Subset"] = digest
        if options.own is not None:
            facts["the sampler"] = type(options.own).__name__
        else:
            facts["the sampler"] = "in random order" if options.shuffle else "in the dataset's order"
        return facts

    def trial_batches(self, data: Data, samples: int) -> list[Any]:
        """Return equal batches on the device to measure memory, each with the first `samples` samples of the dataset.

        There is one batch more than is prefetched during training. Does not change the state of the run. Raises
        `ConfigError` if the data determines its batch size itself.
        """
        dataset, template = open_data(data, "train_data")
        if template is not None or isinstance(dataset, IterableDataset):
            raise ConfigError(
                f"micro_batch_size='auto' needs a dataset, but train_data is a {type(data).__name__} that decides the "
                "batch size itself",
                "use a dataset with __getitem__ and __len__, or set micro_batch_size to a number",
            )
        keys = [number % len(dataset) for number in range(samples)]
        config = self.config.data
        # Use a DataLoader worker if training does: its workers must not inherit files that the dataset opens here.
        settings = config.model_copy(update={"num_workers": int(config.num_workers != 0), "seed_samples": False})
        ahead = config.prefetch_batches * (self.world.device.type == "cuda")
        loader = build_loader(dataset, [keys] * (1 + ahead), settings, self.world, self.config.seed)
        moved = self._on_device(loader, self._transform(config.device_transform))
        return [unpacked(samples, batch)[1] for batch in moved]

    def evaluation_data(self, data: Data, role: str) -> EvaluationData:
        """Batches for evaluation or prediction: each sample once, in the dataset's order.

        `role`: such as "eval_data", for messages.
        """
        dataset, template = open_data(data, role)
        config = self.config
        options = batching(template)
        size = options.size or self.plan.micro_batch
        dataset, template, own = self._own_batches(dataset, template, role, in_order=True)
        if isinstance(dataset, IterableDataset):
            stream = build_stream(dataset, [size], config.data, self._reader(own), config.seed, template)

            if own is None:
                return EvaluationData(lambda: counted(stream, self._move_to_evaluate), _raise_no_batch)

            def equal_on_all_ranks() -> Iterator[tuple[int, Any]]:
                arriving = counted(stream, self._move_to_evaluate)
                first = [*islice(arriving, 1)]
                own.check_ranks(self.world, role)
                return chain(first, arriving)

            return EvaluationData(equal_on_all_ranks, _raise_no_batch, order=partial(own.check_order, role))
        epochs = Epochs(dataset, config.seed, sampler=options.sampler, batch_sampler=options.batches)
        divide = partial(passes_of, size if options.batches is None else 1, self.data_rank.ranks)
        batches = RankBatches(epochs, self.data_rank.rank, divide)

        def sizes() -> tuple[int, ...]:
            batches.set_position(0, 0)  # the dataset may have another length than before
            return batches.pass_sizes(0)

        transform = config.data.eval_device_transform
        keyed = config.data.seed_samples and transform is not None
        loader = build_loader(dataset, batches, config.data, self._reader(), config.seed, template, keyed=keyed)
        return EvaluationData(
            lambda: (
                unpacked(size, batch) for size, batch in zip(sizes(), self._move_to_evaluate(loader), strict=True)
            ),
            lambda: self._read(dataset, batches.epochs.first_batch(), template, transform)[1],
            lambda: [
                self._read(dataset, batch, template, transform) for _, batch in zip(sizes()[:1], batches, strict=False)
            ],
            lambda: len(sizes()),
            epochs.order,
        )

    def _read(
        self,
        dataset: Any,
        indices: list[Any],
        template: DataLoader[Any] | None,
        transform: Callable[[Any], Any] | None,
    ) -> tuple[int, Any]:
        """Read (number of samples, batch) of the samples at `indices`, without DataLoader workers.

        Random states are kept: which batches are read in this way depends on where the run was last resumed.
        """
        settings = self.config.data.model_copy(update={"num_workers": 0, "seed_samples": False})
        with random_states_kept(self.world):
            loader = build_loader(dataset, [indices], settings, self.world, self.config.seed, template)
            return unpacked(len(indices), next(iter(self._on_device(loader, self._transform(transform)))))

    def _train_batches(self, dataset: Any, options: Batching, epoch: int) -> RankBatches:
        config = self.config
        divide = self.plan.micro_batches
        if options.divided:
            largest = config.micro_batch_size if isinstance(config.micro_batch_size, int) else sys.maxsize
            divide = BatchPlan(1, largest, config.accumulation_steps or 1, self.data_rank.ranks).micro_batches
        elif options.batches is not None:
            divide = partial(passes_of, 1, self.data_rank.ranks)
        epochs = Epochs(
            dataset,
            config.seed,
            self._per_step(options),
            shuffle=options.shuffle,
            sampler=options.sampler,
            batch_sampler=options.batches,
            divided=options.divided,
            drop_last=config.data.drop_last or options.drop_last,
            epoch=epoch,
        )
        return RankBatches(epochs, self.data_rank.rank, divide)

    def _per_step(self, options: Batching) -> int:
        """The number of samples in a step over all ranks; of batches, if the user's own batch sampler makes them."""
        if options.batches is None:
            return self.plan.global_batch
        if options.divided:
            return 1
        return (self.config.accumulation_steps or 1) * self.data_rank.ranks

    def _division(self, options: Batching) -> str:
        """The division of a step into batches of the user's own batch sampler, as text; "" without one."""
        kind = type(options.batches).__name__
        if options.batches is None:
            return ""
        if options.divided:
            return f"a step = a batch of {kind}"
        return (
            f"a step = {self._per_step(options)} batches of the DataLoader's {kind} = "
            f"accumulation {self.config.accumulation_steps or 1} x {self.data_rank.ranks}"
        )

    def _check_epoch(
        self, batches: RankBatches, options: Batching, facts: Callable[[], Facts], *, on_host: bool = False
    ) -> None:
        """Raise an error if the ranks cannot train on the current epoch. A collective.

        The properties that determine the samples of each step must be equal on all ranks. With SyncBatchNorm, all ranks
        must also get the same number of samples.
        """
        if self.world.world_size > 1:
            check_agreement(self.world, facts(), on_host=on_host)
        # All steps have the global batch, except the last; batches that a user has made may all differ.
        steps = range(batches.steps) if options.divided else (0, batches.steps - 1)
        self._check_equal_samples(map(batches.samples, steps))

    def _check_stream(self) -> None:
        """Raise `ConfigError` for settings that do not work with a stream."""
        ranks = self.data_rank.ranks
        if self.plan.global_batch < ranks:
            raise ConfigError(
                f"a global batch of {self.plan.global_batch} cannot be divided among {ranks} ranks, each of which "
                "reads its own stream",
                f"set global_batch_size to {ranks} or more",
            )
        self._check_equal_samples([1])  # a stream may end after any number of samples

    def _check_equal_samples(self, samples: Iterable[int]) -> None:
        """Raise `ConfigError` if the model has SyncBatchNorm and a step cannot be divided equally among the ranks.

        SyncBatchNorm runs a collective in every pass, so all ranks need the same number of samples in each pass.
        `samples`: the number of samples of each step.
        """
        ranks = self.data_rank.ranks
        if self.needs_equal_samples and ranks > 1 and any(number % ranks for number in samples):
            raise ConfigError(
                f"the model has SyncBatchNorm, but some global batches cannot be divided equally among {ranks} ranks",
                f"set data.drop_last=True and a global_batch_size that is a multiple of {ranks}",
            )

    def _move(self, epoch: int, number: int) -> Mover:
        """Return a function that moves training batches to the device, and calls `fetched` and `moved` for each."""

        transform = self._transform(self.config.data.device_transform, epoch, number)
        return lambda loader: self._on_device(loader, transform, self.fetched, self.moved)

    def _move_to_evaluate(self, loader: Iterable[Any]) -> Iterator[Any]:
        return self._on_device(loader, self._transform(self.config.data.eval_device_transform))

    def _transform(
        self, function: Callable[[Any], Any] | None, epoch: int = 0, number: int = 0
    ) -> DeviceTransform | None:
        return function and DeviceTransform(function, self.world, self.config.seed, epoch, self.data_rank.rank, number)

    def _on_device(
        self, loader: Iterable[Any], transform: DeviceTransform | None, *marks: Callable[[], None]
    ) -> Iterator[Any]:
        ahead = self.config.data.prefetch_batches
        return on_device(loader, self.world.device, self.dtype, ahead, transform, *marks, check_first=self.check_first)
