"""Turns the user's data into feeds for training and batches for evaluation."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

from torch.utils.data import DataLoader, IterableDataset

from ddp_kit.batch import BatchPlan, split
from ddp_kit.config import TrainerConfig
from ddp_kit.errors import ConfigError, DataError
from ddp_kit.heartbeat import Phase
from ddp_kit.loader import (
    Batching,
    Data,
    DatasetEpoch,
    DeviceTransform,
    batching,
    build_loader,
    build_stream,
    check_batch_size,
    on_device,
    open_data,
)
from ddp_kit.log import logger
from ddp_kit.sampler import EvalBatches, ExactDistributedSampler, TrainBatches, UserEvalBatches, UserTrainBatches
from ddp_kit.timing import DATA, TRANSFER, StepClock
from ddp_kit.trainer.agreement import check_agreement, digest_of
from ddp_kit.trainer.feed import Feed, MapFeed, Mover, StreamFeed, counted
from ddp_kit.trainer.parts import Parts
from ddp_kit.trainer.position import RANKS, Facts
from ddp_kit.trainer.same_data import subset_indices
from ddp_kit.trainer.setup import check_sync_batch_norm
from ddp_kit.world import World, mixed_seed


@dataclass(frozen=True)
class EvaluationData:
    """Batches for evaluation or prediction."""

    batches: Callable[[], Iterable[tuple[int, Any]]]
    """Returns an iterable of (number of samples, batch on the device) over this rank's batches."""
    spare: Callable[[], Any]
    """Returns a batch for a rank that has none of its own. Raises `DataError` if there is none."""
    first: Callable[[], list[tuple[int, Any]]] | None = None
    """Returns a list of this rank's first batch, or an empty one, read without workers; None for a stream."""
    count: Callable[[], int] | None = None
    """Returns the number of this rank's batches; None for a stream."""


def _no_spare() -> Any:
    raise DataError(
        "the stream of this rank yields no batch, but with this parallel strategy every rank must run every pass",
        "give every rank at least one batch, or use parallel='ddp'",
    )


def loader_batch_size(data: Data, config: TrainerConfig) -> int | None:
    """The batch size of the user's DataLoader; None without one, or if the configuration sets a batch size."""
    if config.global_batch_size or config.micro_batch_size or config.reference_batch_size:
        return None
    return data.batch_size if isinstance(data, DataLoader) else None


@dataclass(frozen=True)
class FeedBuilder:
    """Opens data for one Trainer: `plan` divides its steps, `clock` measures the time spent waiting for data."""

    parts: Parts
    plan: BatchPlan
    clock: StepClock

    @property
    def _reader(self) -> World:
        """The world with data ranks in place of ranks: ranks with the same samples draw the same random numbers."""
        return replace(self.parts.world, rank=self._rank, world_size=self._ranks)

    @property
    def _rank(self) -> int:
        return self.parts.strategy.data_rank

    @property
    def _ranks(self) -> int:
        """The number of parts into which the data is divided."""
        return self.parts.strategy.data_ranks

    def train_feed(self, data: Data, step: int, epoch: int) -> Feed:
        """The feed of training data, at the start of an epoch.

        `step`: optimizer steps done, part of the seed of DataLoader workers. Raises `ConfigError` or `DataError`
        for data that does not fit the configuration.
        """
        dataset, template = open_data(data, "train_data")
        own, config, world = batching(template), self.parts.config, self.parts.world
        asked = config.global_batch_size is not None or config.micro_batch_size is not None
        check_batch_size(own, self.plan.micro_batch, asked=asked)
        seed = mixed_seed(config.seed, step)
        if isinstance(dataset, IterableDataset):
            self._check_stream()
            share = split(self.plan.global_batch, self._ranks, self._rank)
            passes = -(-len(share) // self.plan.micro_batch)
            sizes = [len(split(len(share), passes, number)) for number in range(passes)]
            stream = build_stream(dataset, sizes, config.data, self._reader, config.seed, template, record_states=True)
            full = self.plan.global_batch if config.data.drop_last else None
            facts = self._stream_facts(template)
            return StreamFeed(stream, len(sizes), world, self._move, facts, self.parts.strategy, at_least=full)
        dataset_epoch = DatasetEpoch(dataset, config.seed)
        dataset_epoch.set(epoch)
        batches = self._train_batches(dataset, own, epoch)
        if asked and self.plan.global_batch > len(dataset) and world.is_main:
            logger.warning(
                "the global batch is {} samples, but train_data has only {}: each step uses all of them",
                self.plan.global_batch,
                len(dataset),
            )
        epoch_facts = partial(self._map_facts, dataset, own, batches)
        self._check_epoch(batches, epoch_facts)
        transform = config.data.device_transform
        keyed = config.data.seed_samples and transform is not None
        loader = build_loader(
            dataset, batches, config.data, self._reader, seed, template, keyed=keyed, dataset_epoch=dataset_epoch
        )
        spares = self.parts.strategy.equal_passes
        spare = partial(self._read_spare, dataset, batches, template, transform) if spares else None
        check = partial(self._check_epoch, batches, epoch_facts, on_host=True)  # the device is still computing steps
        return MapFeed(loader, batches, self._move, epoch_facts, dataset_epoch, check, spare)

    def _map_facts(self, dataset: Any, own: Batching | None, batches: TrainBatches | UserTrainBatches) -> Facts:
        """Facts that determine the samples of each step of the present epoch."""
        config = self.parts.config
        facts: Facts = {
            "the setting seed": config.seed,
            "the number of samples": len(dataset),
            "drop_last": config.data.drop_last or bool(own and own.drop_last),
        }
        if order := batches.fingerprint():
            facts["the order of the DataLoader's own sampler"] = order
        chosen = subset_indices(dataset)
        if chosen:
            facts["the samples of the Subset"] = digest_of(repr(chosen).encode())
        if isinstance(batches, UserTrainBatches):
            kind = type(own.batches).__name__ if own else ""
            return facts | {"the sampler": kind, "the batches of a step over all ranks": batches.per_step}
        kind = "in random order" if (own.shuffle if own else config.data.shuffle) else "in the dataset's order"
        if own is not None and own.sampler is not None:
            kind = type(own.sampler).__name__
        return facts | {"the sampler": kind, "the global batch": self.plan.global_batch}

    def _stream_facts(self, template: DataLoader[Any] | None) -> Facts:
        """Facts that determine the samples of a stream's steps; equal on all ranks, as a checkpoint holds one copy."""
        config = self.parts.config
        workers = config.data.num_workers if template is None else template.num_workers
        facts: Facts = {
            "the setting seed": config.seed,
            "the global batch": self.plan.global_batch,
            "drop_last": config.data.drop_last or (template is not None and template.drop_last),
            RANKS: self._ranks,
            "data.num_workers": workers or 1,  # the same order without workers and with one
        }
        if workers not in (0, 1) or (template is not None and template.batch_size is None):
            facts["the micro-batch"] = self.plan.micro_batch
        return facts

    def trial_batches(self, data: Data, samples: int) -> list[Any]:
        """A batch of the first `samples` samples on the device, and as many more as are prefetched, to measure memory.

        Does not change the state of the run. Raises `ConfigError` if the data determines its batch size itself.
        """
        dataset, template = open_data(data, "train_data")
        if template is not None or isinstance(dataset, IterableDataset):
            raise ConfigError(
                f"micro_batch_size='auto' needs a dataset, but train_data is a {type(data).__name__} that decides the "
                "batch size itself",
                "use a dataset with __getitem__ and __len__, or set micro_batch_size to a number",
            )
        keys = [number % len(dataset) for number in range(samples)]
        config, world = self.parts.config.data, self.parts.world
        # With a DataLoader worker if training uses workers, which must not inherit files that the dataset opens here.
        settings = config.model_copy(update={"num_workers": 1 if config.num_workers else 0, "seed_samples": False})
        ahead = config.prefetch_batches if world.device.type == "cuda" else 0
        batches = [keys] * (1 + ahead)
        loader = build_loader(dataset, batches, settings, world, self.parts.config.seed)
        return list(self._on_device(loader, self._transform(config.device_transform)))

    def evaluation_data(self, data: Data, role: str) -> EvaluationData:
        """Batches for evaluation or prediction: each sample once, in the dataset's order. `role`: for messages."""
        dataset, template = open_data(data, role)
        own, config = batching(template), self.parts.config
        size = own.size if own and own.size else self.plan.micro_batch
        if isinstance(dataset, IterableDataset):
            stream = build_stream(dataset, [size], config.data, self._reader, config.seed, template)
            return EvaluationData(lambda: counted(stream, self._move_to_evaluate), _no_spare)
        batches: EvalBatches | UserEvalBatches
        if own is not None and own.batches is not None:
            batches = UserEvalBatches(own.batches, self._rank, self._ranks, seed=config.seed)
        else:
            batches = EvalBatches(self._sampler(dataset, own, shuffle=False), size)
        transform = config.data.eval_device_transform
        keyed = config.data.seed_samples and transform is not None
        loader = build_loader(dataset, batches, config.data, self._reader, config.seed, template, keyed=keyed)
        return EvaluationData(
            lambda: zip(batches.sizes(), self._move_to_evaluate(loader), strict=True),
            partial(self._read_spare, dataset, batches, template, transform),
            lambda: [(len(batch), self._read(dataset, batch, template, transform)) for batch in islice(batches, 1)],
            lambda: len(batches.sizes()),
        )

    def _read_spare(
        self, dataset: Any, batches: Any, template: DataLoader[Any] | None, transform: Callable[[Any], Any] | None
    ) -> Any:
        """A batch for a rank without batches, which runs passes with zero weight."""
        return self._read(dataset, batches.spare(), template, transform)

    def _read(
        self,
        dataset: Any,
        indices: list[Any],
        template: DataLoader[Any] | None,
        transform: Callable[[Any], Any] | None,
    ) -> Any:
        """One batch of these samples, without DataLoader workers."""
        settings = self.parts.config.data.model_copy(update={"num_workers": 0, "seed_samples": False})
        loader = build_loader(dataset, [indices], settings, self.parts.world, self.parts.config.seed, template)
        return next(iter(self._on_device(loader, self._transform(transform))))

    def _train_batches(self, dataset: Any, own: Batching | None, epoch: int) -> TrainBatches | UserTrainBatches:
        config = self.parts.config
        drop_last, seed = config.data.drop_last or bool(own and own.drop_last), config.seed
        if own is not None and own.batches is not None:
            passes = config.accumulation_steps or 1
            return UserTrainBatches(
                own.batches, self._rank, self._ranks, passes, drop_last=drop_last, seed=seed, epoch=epoch
            )
        sampler = self._sampler(dataset, own, shuffle=own.shuffle if own else config.data.shuffle)
        sampler.set_epoch(epoch)
        return TrainBatches(sampler, self.plan, drop_last=drop_last)

    def _sampler(self, dataset: Any, own: Batching | None, *, shuffle: bool) -> ExactDistributedSampler:
        seed, order = self.parts.config.seed, own.sampler if own else None
        return ExactDistributedSampler(dataset, self._rank, self._ranks, shuffle=shuffle, seed=seed, own=order)

    def _check_epoch(
        self, batches: TrainBatches | UserTrainBatches, facts: Callable[[], Facts], *, on_host: bool = False
    ) -> None:
        """Raise an error if the ranks' samples of an epoch differ, or the model cannot train on them. A collective."""
        if self.parts.world.world_size > 1:
            check_agreement(self.parts.world, facts(), on_host=on_host)
        check_sync_batch_norm(self.parts.model, batches, self._ranks)

    def _check_stream(self) -> None:
        """Raise `ConfigError` for settings that do not work with a stream."""
        if self.plan.global_batch < self._ranks:
            raise ConfigError(
                f"a global batch of {self.plan.global_batch} cannot be divided among {self._ranks} ranks, each "
                "of which reads its own stream",
                f"set global_batch_size to {self._ranks} or more",
            )
        check_sync_batch_norm(self.parts.model, None, self._ranks)

    def _move(self, epoch: int, number: int) -> Mover:
        """A function that moves training batches to the device, and measures waiting and transfer times."""

        def fetched() -> None:
            self.clock.mark(DATA)
            self.parts.heartbeat.mark(Phase.TRANSFER)

        transform = self._transform(self.parts.config.data.device_transform, epoch, number)
        return lambda loader: self._on_device(loader, transform, fetched, partial(self.clock.mark, TRANSFER))

    def _move_to_evaluate(self, loader: Iterable[Any]) -> Iterator[Any]:
        return self._on_device(loader, self._transform(self.parts.config.data.eval_device_transform))

    def _transform(
        self, function: Callable[[Any], Any] | None, epoch: int = 0, number: int = 0
    ) -> DeviceTransform | None:
        return function and DeviceTransform(function, self.parts.config.seed, epoch, self._rank, number)

    def _on_device(
        self, loader: Iterable[Any], transform: DeviceTransform | None, *marks: Callable[[], None]
    ) -> Iterator[Any]:
        precision, ahead = self.parts.precision, self.parts.config.data.prefetch_batches
        dtype, check = precision.batch_dtype, precision.check_batch
        return on_device(loader, self.parts.world.device, dtype, ahead, transform, *marks, check_first=check)
