"""Comparison of datasets: between ranks, by properties and a few samples; and with those of an interrupted epoch."""

import time
import weakref
from array import array
from collections.abc import Iterator, Mapping, Sequence, Sized
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from ddp_kit.config.settings import DataConfig
from ddp_kit.data.collate import checked_batches, identity_collate
from ddp_kit.data.loading import expose_user_dataset, fetch_samples, loader_options, unwrapped
from ddp_kit.data.source import dataset_and_loader
from ddp_kit.distributed.consistency import Difference, Facts, digest_of, minority, which_differ
from ddp_kit.distributed.world import World, gathered, mixed_seed, random_states_kept, seed_generators
from ddp_kit.errors import DataError
from ddp_kit.log import logger
from ddp_kit.structures import UNKNOWN_DIGEST, digest_of_value
from ddp_kit.texts import plural

# Length, type, batching and a few samples are compared. Each rank uses its share of the same indices: if datasets
# differed in their order or in the split between training and evaluation, samples would silently be skipped, trained on
# twice, or used for both training and evaluation.


_PLAIN_SAMPLES = 16
"""The number of samples to compare if they are tensors or lists in memory, which are cheap to read."""
_MAX_SECONDS = 2.0
"""The time limit for fetching a dataset's samples; the remaining samples are not compared."""
_REPEATS = 2
"""The number of times that a differing sample is fetched again, to find out whether it is nondeterministic."""


def facts_of_data(data: Mapping[str, object]) -> Facts:
    """Properties of data that must be the same on all ranks.

    `data`: a mapping from the role, such as "train_data", to the dataset or DataLoader.
    """
    facts: Facts = {}
    for role, source in data.items():
        dataset, loader = dataset_and_loader(source)
        facts[f"the kind of {role}"] = f"{type(source).__name__} {_dataset_kind(dataset)}"
        facts[f"the number of samples in {role}"] = _length(dataset)
        facts[f"the indices of the Subset {role}"] = str(subset_digest(dataset))
        batches = getattr(loader, "batch_sampler", None)
        shuffling = type(getattr(batches, "sampler", None)).__name__
        facts[f"the batches of {role}"] = f"{getattr(batches, 'batch_size', '')} {getattr(batches, 'drop_last', '')}"
        facts[f"the shuffling of {role}"] = shuffling
    return facts


_DIGESTS: dict[tuple[Any, ...], int] = {}
"""Contents of the indices of Subsets -> digest, because the `repr` of a million indices takes a tenth of a second."""


def subset_digest(dataset: object) -> int | None:
    """A hash of the indices of a Subset and of the subsets inside it, outermost first; None for other datasets.

    The indices may change between two calls. Checkpoints contain the hash, so it must stay that of the `repr`.
    """
    indices = []
    while isinstance(dataset, Subset):
        indices.append(dataset.indices)
        dataset = dataset.dataset
    if not indices:
        return None
    contents = tuple(map(_content_of_integers, indices))
    digest = _DIGESTS.get(contents)
    if digest is None:
        digest = digest_of(repr([[*of_subset] for of_subset in indices]).encode())
        if None not in contents:
            _DIGESTS[contents] = digest
    return digest


def _content_of_integers(indices: Any) -> tuple[Any, ...] | None:
    """What the `repr` of integers depends on, with a hash in place of the numbers; None for other indices."""
    with suppress(TypeError, ValueError, OverflowError):
        compact = array("q", indices) if isinstance(indices, list) else indices  # twice as fast as NumPy
        numbers = np.ascontiguousarray(compact)
        if numbers.dtype.kind in "iu" and numbers.ndim == 1:
            first = tuple(map(type, indices[:1]))
            return type(indices), first, numbers.dtype.str, len(numbers), xxhash.xxh3_128_digest(numbers.data)
    return None


RANKS = "the number of ranks"
"""The name of a fact about streams. If a run resumes with a different number, it logs a warning and continues."""
_PER_RANK = ("the micro-batch", "data.num_workers")
"""Names of facts about streams that may differ after a resume if the number of ranks has changed."""


def check_same_samples(before: Facts, now: Facts, epoch: int, steps: int) -> None:
    """Raise `DataError` if a run that resumes within an epoch would continue with different samples.

    `before`, `now`: facts that determine the samples of each step. `steps`: the number of steps done in the epoch.
    """
    if RANKS in now and before.get(RANKS, now[RANKS]) != now[RANKS]:
        logger.warning(
            "epoch {} was started with {} and resumes with {}: each rank skips the part of its own stream "
            "before this step, so samples of this epoch may be left out or used twice, depending on how the "
            "dataset divides them among the ranks",
            epoch + 1,
            plural(int(before[RANKS]), "rank"),
            now[RANKS],
        )
        before = {name: value for name, value in before.items() if name not in _PER_RANK}
    differ = [
        f"{name} was {old} and is now {now.get(name)}"
        for name, old in before.items()
        if name != RANKS and old != now.get(name)
    ]
    if differ:
        raise DataError(
            f"the run resumes after {steps} steps of epoch {epoch + 1}, but the next steps "
            f"would use different samples than before: {'; '.join(differ)}",
            "resume with the same data and settings; they may change from the next epoch on. To start from step 0, "
            "use another checkpoint.dir, checkpoint.resume=None, or a new Trainer",
        )


class SampleComparison:
    """Compares a few samples of a Trainer's data between ranks. `data.compare_items` sets the number of samples.

    for each of the samples, spread over the dataset:
        digest = hash of the sample, fetched with a random seed that depends on its index
    gather the digests
    fetch the differing samples again, and raise `DataError` if each rank gets the same digests as before
    """

    def __init__(self, world: World, config: DataConfig, seed: int) -> None:
        self._world = world
        self._config = config
        self._seed = seed
        self._known: dict[int, tuple[Any, list[int]]] = {}  # dataset id -> (weak reference, digests)

    def compare(self, data: Mapping[str, object]) -> None:
        """Raise `DataError` if samples differ between ranks. A collective: `data` has the same keys everywhere."""
        for role, source in data.items():
            dataset, loader = dataset_and_loader(source)
            keys = self._keys(dataset)
            if not keys:
                continue
            table = gathered(self._world, self._digests(dataset, keys, loader))
            columns = [{*column} - {UNKNOWN_DIGEST} for column in zip(*table, strict=True)]
            differ = [number for number, digests in enumerate(columns) if len(digests) > 1]
            if differ and self._repeat(dataset, [keys[number] for number in differ], table, differ, loader):
                first = {rank: row[differ[0]] for rank, row in enumerate(table) if row[differ[0]] != UNKNOWN_DIGEST}
                difference = Difference(f"sample {keys[differ[0]]} of {role}: {which_differ(first)}", minority(first))
                raise difference.error(
                    self._world,
                    f"the ranks do not agree on {difference.description}"
                    f" ({len(differ)} of {len(keys)} compared samples differ)",
                    "every rank must build the same dataset in the same order: sort file listings, set the random seed "
                    "before splitting or shuffling, and let the Trainer divide the dataset among the ranks. If samples "
                    "differ on purpose, set data.compare_items=0",
                )

    def _keys(self, dataset: object) -> list[int]:
        """Indices evenly spread over the dataset, including the first and the last."""
        wanted = self._config.compare_items
        if wanted and _in_memory(dataset):
            wanted = _PLAIN_SAMPLES
        length = _length(dataset)
        count = min(wanted, length)
        return [number * (length - 1) // max(1, count - 1) for number in range(count)]

    def _digests(self, dataset: Any, keys: Sequence[int], loader: "DataLoader[Any] | None") -> list[int]:
        reference, digests = self._known.get(id(dataset), (None, []))
        if reference is not None and reference() is dataset and len(digests) == len(keys):
            return digests
        digests = self._fetch(dataset, keys, loader)
        with suppress(TypeError):  # a list has no weak references, and is cheap to read again
            self._known[id(dataset)] = (weakref.ref(dataset), digests)
        return digests

    def _repeat(
        self,
        dataset: Any,
        keys: Sequence[int],
        table: list[list[int]],
        numbers: Sequence[int],
        loader: "DataLoader[Any] | None",
    ) -> bool:
        """Whether every rank gets the same samples as before when it fetches them again. A collective."""
        before = [table[self._world.rank][number] for number in numbers]
        # Repeat in one call, and so in one process: a new DataLoader worker may repeat the last one's random numbers.
        repeated = self._fetch(dataset, [*keys] * _REPEATS, loader)
        equal = all(new in (UNKNOWN_DIGEST, old) for new, old in zip(repeated, before * _REPEATS, strict=True))
        return all(on_rank for (on_rank,) in gathered(self._world, [equal]))

    def _fetch(self, dataset: Any, keys: Sequence[int], loader: "DataLoader[Any] | None") -> list[int]:
        """The digest of each sample; `UNKNOWN_DIGEST` for samples without one, and after the time limit."""
        digests = [UNKNOWN_DIGEST] * len(keys)
        began = time.perf_counter()
        for number, digest in enumerate(self._arriving(_Digests(dataset, self._seed), keys, loader)):
            digests[number] = digest
            if time.perf_counter() - began > _MAX_SECONDS:
                break
        return digests

    def _arriving(self, digests: "_Digests", keys: Sequence[int], loader: "DataLoader[Any] | None") -> Iterator[int]:
        options = loader_options(self._config, self._world, self._seed, loader)
        if not keys or not options["num_workers"] or _in_memory(digests.dataset):
            with random_states_kept(self._world):
                yield from map(digests.__getitem__, keys)
            return
        # Fetch in a DataLoader worker, because training's workers must not inherit files that the dataset opens here.
        options |= {"num_workers": 1, "pin_memory": False, "persistent_workers": False, "generator": torch.Generator()}
        options["worker_init_fn"] = partial(expose_user_dataset, options.get("worker_init_fn"))
        loader = DataLoader(digests, sampler=keys, batch_size=None, collate_fn=identity_collate, **options)
        yield from checked_batches(loader)


class _Digests(Dataset[int]):
    """A dataset whose items are hashes of another dataset's samples.

    The random states are set from (seed, sample key) before each sample is fetched.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset = dataset
        self._seed = seed

    def __getitem__(self, key: int) -> int:
        seed_generators(mixed_seed(self._seed, key))
        try:
            return digest_of_value(fetch_samples(self.dataset, [key])[0])
        except Exception:  # the dataset has other keys, or training will raise the same error
            return UNKNOWN_DIGEST


def _in_memory(dataset: Any) -> bool:
    """Whether all samples are in memory, so that reading a sample runs no user code."""
    _, inner = unwrapped(dataset)
    return type(inner) in (TensorDataset, Tensor, list, tuple)


def _dataset_kind(dataset: object) -> str:
    kind = type(dataset).__name__
    return f"{kind} of {_dataset_kind(dataset.dataset)}" if isinstance(dataset, Subset) else kind


def _length(dataset: object) -> int:
    """The length of a dataset; 0 for a stream, whose length may differ between ranks."""
    return len(dataset) if isinstance(dataset, Sized) and not isinstance(dataset, IterableDataset) else 0
