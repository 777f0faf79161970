"""Batches from an IterableDataset. Each rank reads a stream; the dataset itself divides the data among ranks.

W DataLoader workers take turns: batch j of a rank comes from worker j % W, so batch i of worker w is batch i*W + w of
the rank. When a worker's stream ends, the other workers continue to take turns.

If the dataset has `state_dict` and `load_state_dict`, `state_dict` is called after each batch, in the process that
reads the dataset.
"""

import copy
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count, islice
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, get_worker_info

from ddp_kit.config.settings import DataConfig
from ddp_kit.data.collate import (
    Partial,
    Uncollated,
    checked_batches,
    data_error,
    identity_collate,
    warn_about_left_out_samples,
)
from ddp_kit.data.loader_batches import name_of_stream
from ddp_kit.data.loading import (
    collate_and_send,
    expose_user_dataset,
    loader_options,
)
from ddp_kit.data.source import set_epoch
from ddp_kit.distributed.world import RandomStates, World, mixed_seed, random_states, seed_generators, set_random_states
from ddp_kit.errors import DataError
from ddp_kit.structures import tensors_in

_SKIPPED_TURN = 0
"""The sample count that a worker yields to skip a turn if, after a resume, another worker has the first turn."""


@dataclass(frozen=True)
class ReaderState:
    """The position of a process in the stream that it reads, recorded after a batch."""

    reader: int
    """The index of the DataLoader worker; 0 without workers."""
    number: int
    """The index of the next batch to read, counted from the start of the epoch."""
    random: RandomStates
    """The random states after the batch."""
    dataset: Any
    """The dataset's `state_dict` after the batch."""


class Stream:
    """Iterates over the batches of an epoch, and yields (number of samples, batch) for each."""

    def __init__(self, loader: "DataLoader[Any]", epoch: Tensor) -> None:
        self._loader = loader
        self._epoch = epoch
        self.states = deque[ReaderState]()
        """The states of the batches yielded so far, if the dataset has state. The caller removes states after use."""

    def set_position(self, epoch: int, states: Sequence[ReaderState] = ()) -> None:
        """Set where the next iteration starts: in `epoch`, after the batches for which `states` were recorded.

        `states`: the last state of each process that reads the dataset, in the order in which their batches were
        yielded. The iteration calls the dataset's `set_epoch`, if there is one, in each of these processes.
        """
        self._epoch.fill_(epoch)
        self.states.clear()
        batches: Any = self._loader.dataset
        batches.begin_at = None
        if states:
            batches.begin_at = (epoch, {state.reader: state for state in states}, states[-1].reader + 1)

    def __iter__(self) -> Iterator[tuple[int, Any]]:
        for samples, batch, state in checked_batches(self._loader):
            if samples == _SKIPPED_TURN:
                continue
            if type(batch) is Uncollated:
                raise data_error(batch, None)
            if type(batch) is Partial:
                warn_about_left_out_samples()
                samples = samples and batch.samples
                batch = batch.batch
                if samples == 0:
                    continue
            if state is not None:
                self.states.append(state)
            if samples is None:
                samples = _count(batch)
            yield samples, batch


def build_stream(
    dataset: "IterableDataset[Any]",
    sizes: Sequence[int],
    config: DataConfig,
    world: World,
    seed: int,
    template: "DataLoader[Any] | None" = None,
    *,
    record_states: bool = False,
) -> Stream:
    """Create this rank's stream of batches from an IterableDataset.

    `sizes`: batch j of an epoch has `sizes[j % len(sizes)]` samples; the last batches may have fewer. `template`: the
    user's own DataLoader, whose options are used; if its batch_size is None, the dataset yields whole batches, and
    `sizes` is ignored. `record_states`: whether to record a `ReaderState` with each batch, if the dataset
    has state.

    Raises `DataError` if `data.seed_samples` is set. Iterating raises it if a batch's number of samples is unknown.
    """
    if config.seed_samples:
        raise DataError(
            f"data.seed_samples is set, but the samples of a {name_of_stream(dataset)} have no index to seed from",
            "leave out data.seed_samples and set seeds in __iter__, or use a dataset with __getitem__ and __len__",
        )
    options = loader_options(config, world, seed, template)
    options["worker_init_fn"] = partial(expose_user_dataset, options.get("worker_init_fn"))
    collate, send = collate_and_send(config, template, options["num_workers"])
    epoch = torch.zeros((), dtype=torch.int64)
    if options["num_workers"]:
        epoch.share_memory_()  # type: ignore[no-untyped-call]
    batches = StreamBatches(
        dataset,
        sizes,
        collate,
        send,
        whole=template is not None and template.batch_size is None,
        drop_last=template is not None and template.drop_last,
        epoch=epoch,
        seed=mixed_seed(seed, world.rank),
        record_states=record_states,
    )
    return Stream(DataLoader(batches, batch_size=None, collate_fn=identity_collate, **options), epoch)


class IsolatedRandomStates:
    """Context manager with its own random states, separate from the random states of training.

    Each use continues from the states at the end of the previous use; the first use starts from `seed`. In a DataLoader
    worker, nothing is restored on exit, because no training code runs there.
    """

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._in_worker = get_worker_info() is not None
        self._states: RandomStates | None = None

    def __enter__(self) -> None:
        if not self._in_worker:
            self._outside = random_states()
        if self._states is None:
            seed_generators(self._seed)
        elif not self._in_worker:
            set_random_states(self._states)

    def __exit__(self, *_: object) -> None:
        self._states = random_states()
        if not self._in_worker:
            set_random_states(self._outside)

    @property
    def states(self) -> RandomStates:
        """The random states at the end of the last use."""
        assert self._states is not None
        return self._states


class StreamBatches(IterableDataset[tuple[int | None, Any, ReaderState | None]]):
    """Groups a stream's samples into batches, in the process that reads them.

    `sizes`: as for `build_stream`. `whole`: whether the dataset yields whole batches.
    """

    def __init__(
        self,
        dataset: "IterableDataset[Any]",
        sizes: Sequence[int],
        collate: Callable[..., Any],
        sent: Callable[[Any], Any],
        *,
        whole: bool,
        drop_last: bool,
        epoch: Tensor,
        seed: int,
        record_states: bool,
    ) -> None:
        self._seed = seed
        self.dataset = dataset
        has_state = all(callable(getattr(dataset, name, None)) for name in ("state_dict", "load_state_dict"))
        self._record_states = record_states and has_state
        self.begin_at: tuple[int, dict[int, ReaderState], int] | None = None
        """Position to resume from: the epoch, the state of each reader, and the reader whose turn it is."""
        self._whole = whole
        self._sizes = (1,) if whole else tuple(sizes)
        self._collate = collate
        self._sent = sent  # applied to each state, which contains tensors
        self._drop_last = drop_last
        self._epoch = epoch

    def __iter__(self) -> Iterator[tuple[int | None, Any, ReaderState | None]]:
        epoch = int(self._epoch)
        reader = 0
        turns = 1
        process = ""
        info = get_worker_info()
        if info is not None:
            reader = info.id
            turns = info.num_workers
            process = f", read by DataLoader worker {reader}"
        first = reader
        start = None
        if self.begin_at is not None and self.begin_at[0] == epoch:
            _, states, turn = self.begin_at
            start = states.get(reader)
            if reader < turn % turns:
                yield _SKIPPED_TURN, None, None
        # The seed depends on the epoch, so reading the same epoch again draws the same random numbers.
        isolated = IsolatedRandomStates(mixed_seed(self._seed, epoch, reader))
        dataset: Any = self.dataset
        with isolated:
            set_epoch(dataset, epoch)
            if start is not None:
                first = start.number
                dataset.load_state_dict(start.dataset)
            stream = iter(dataset)
            if start is not None:
                set_random_states(start.random)
        for number in count(first, turns):
            size = self._sizes[number % len(self._sizes)]
            with isolated:
                samples: list[Any] = []
                try:
                    samples.extend(islice(stream, size))
                except Exception as error:
                    name = name_of_stream(dataset)
                    error.add_note(
                        f"while reading item {len(samples)} of batch {number} of {name}{process} (numbers start at 0)"
                    )
                    raise
                if not samples or (self._drop_last and len(samples) < size):
                    return
                content: Any = samples
                known: int | None = len(samples)
                if self._whole:
                    (content,) = samples
                    known = None
                batch = self._collate(content, known or 0)
                dataset_state = self._record_states and copy.deepcopy(dataset.state_dict())
            after = None
            if self._record_states:
                after = self._sent(ReaderState(reader, number + turns, isolated.states, dataset_state))
            yield known, batch, after


def _count(batch: Any) -> int:
    """The number of samples in a batch: the length of its first tensor. Raises `DataError` if the number is unknown."""
    tensor = next(tensors_in(batch), None)
    if tensor is None or tensor.dim() == 0:
        problem = "contains no tensor" if tensor is None else "begins with a scalar tensor"
        raise DataError(
            f"the data consists of whole batches, but one batch {problem}: its number of samples is unknown",
            "yield batches whose first tensor has the batch dimension first, or set a batch_size",
        )
    return len(tensor)
