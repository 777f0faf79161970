"""Collation of samples into batches, transforms on the device, and errors that name the samples."""

import pickle
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import default_collate

from ddp_kit.distributed.world import World, random_states_kept, seed_pass
from ddp_kit.errors import DataError
from ddp_kit.log import logger
from ddp_kit.structures import tensors_in
from ddp_kit.torch_internals import pytree

# --- Transforms on the device -----------------------------------------------------------------------------------------


class Keyed(NamedTuple):
    """A batch with the keys of its samples, for transforms that are seeded per sample."""

    keys: Sequence[tuple[int, Any]]
    """One pair (epoch, key in the dataset) for each sample."""
    batch: Any


class DeviceTransform:
    """Applies the user's `data.device_transform` to the batches of one epoch, in order.

    Batches are transformed before the step that uses them, so each call is seeded separately and does not change the
    random states of training, which checkpoints store; on the GPU as well. The seed depends on (seed, epoch, rank,
    number of the batch). For a `Keyed` batch, each sample is transformed in a separate call, and the seed depends on
    (seed, epoch, key).
    `rank`: among the ranks that have different batches. `number`: the index of the next batch, counted from the start
    of the epoch.
    """

    def __init__(
        self, function: Callable[[Any], Any], world: World, seed: int, epoch: int, rank: int, number: int
    ) -> None:
        self._function = function
        self._world = world
        self._seeds = (seed, epoch, rank)
        self._seed = seed
        self._number = number

    def __call__(self, batch: Any) -> Any:
        if type(batch) is Partial:
            return Partial(batch.samples, self(batch.batch))
        number = self._number
        self._number += 1
        with random_states_kept(self._world):
            if not isinstance(batch, Keyed):
                seed_pass(self._world, *self._seeds, number)
                return self._function(batch)
            samples = []
            for place, key in enumerate(batch.keys):
                seed_pass(self._world, self._seed, *key)
                samples.append(self._function(_one_sample(batch.batch, place)))
            return _joined(samples)


def _one_sample(batch: Any, place: int) -> Any:
    """The sample at index `place` of a batch, as a batch of size 1."""
    return pytree.tree_map_only(Tensor, lambda leaf: leaf[place : place + 1] if leaf.dim() else leaf, batch)


def _joined(samples: list[Any]) -> Any:
    """Concatenate batches of size 1. Raises `DataError` if their nested structures differ."""
    leaves, forms = zip(*map(pytree.tree_flatten, samples), strict=True)
    if len(set(map(repr, forms))) > 1:
        raise DataError(
            "data.device_transform returned results with different structures for the samples of one batch",
            "return the same structure for each sample, or set data.seed_samples=False",
        )
    return pytree.tree_unflatten([_concatenated(values) for values in zip(*leaves, strict=True)], forms[0])


def _concatenated(parts: Sequence[Any]) -> Any:
    first = parts[0]
    return torch.cat([*parts]) if isinstance(first, Tensor) and first.dim() else first


# --- Batches with fewer samples than were requested -------------------------------------------------------------------


class Partial(NamedTuple):
    """A batch with fewer samples than were requested.

    Known are samples that the user's `__getitems__` has not returned, and those that are None, which a collate function
    leaves out. The shapes of a batch say nothing: its tensors may be packed sequences, or single images in a list.
    """

    samples: int
    """The number of samples in the batch."""
    batch: Any


def unpacked(samples: int, batch: Any) -> tuple[int, Any]:
    """(number of samples, batch) of a batch of `samples` requested samples; `batch` may be a `Partial`."""
    if type(batch) is Partial:
        return batch.samples, batch.batch
    return samples, batch


@cache
def warn_about_left_out_samples() -> None:
    """Log a warning, once per process."""
    logger.warning(
        "the collate function or __getitems__ has left out samples of a batch: losses, gradients and metrics are "
        "weighted by the samples that remain; log rows and FitResult.samples count all samples"
    )


# --- Collation --------------------------------------------------------------------------------------------------------


_MAX_EXAMPLES = 4  # differing samples in a message
_NONE = "NoneType"  # the description of a part that is None


@dataclass(frozen=True)
class Uncollated:
    """A placeholder for a batch whose samples cannot be collated. DataLoader workers return it instead of the batch."""

    message: str
    """torch's error message."""
    where: str
    """The path of the first part that is None or differs, such as `['image']`; "" for the whole sample."""
    kinds: tuple[str, ...]
    """The shape, length, keys or type of this part in each sample; () if there is none."""


class Collate:
    """Makes a batch of samples with the user's collate function, or with torch's default if `function` is None.

    Returns a `Partial` if the batch has fewer samples than requested, and an `Uncollated` for samples that torch's
    default cannot collate (see `checked_batches`).
    """

    def __init__(self, function: Callable[[Any], Any] | None = None) -> None:
        self.function = function

    def __call__(self, samples: Any, requested: int, keys: Sequence[Any] | None = None) -> Any:
        """Collate the samples. `samples`: a list, or any other object that the user's `__getitems__` has returned.

        `keys`: the key of each sample, to return a `Keyed` batch; None: return the batch only.
        """
        number = requested
        if isinstance(samples, list):
            number = len(samples)
        if self.function is None:
            batch = _default_batch(samples)
            if type(batch) is Uncollated:
                return batch
        else:
            try:
                batch = self.function(samples)
            except StopIteration as error:
                raise stop_iteration_error("the collate function") from error
            if isinstance(samples, list):
                number -= sum(sample is None for sample in samples)  # which only the user's function can leave out
        if keys is not None:
            rows = {len(tensor) for tensor in tensors_in(batch) if tensor.dim()}
            if rows - {len(keys)}:
                raise DataError(
                    f"the collate function has made a batch of {len(keys)} samples with a tensor of "
                    f"{min(rows - {len(keys)})} rows, but with data.seed_samples, data.device_transform is called for "
                    "each sample, with its row of each tensor",
                    "return one row per sample, and leave out samples in the dataset; or set data.seed_samples=False",
                )
            batch = Keyed(keys, batch)
        return batch if number >= requested else Partial(number, batch)


def _default_batch(samples: Any) -> Any:
    """The result of torch's `default_collate`; an `Uncollated` for samples that it cannot collate."""
    try:
        return default_collate(samples)
    except (TypeError, RuntimeError, LookupError, ValueError, AttributeError) as error:
        where, kinds = _difference(samples)
        if not kinds and "default_collate" not in str(error) and "default collate_fn" not in str(error):
            raise  # not caused by the samples: out of memory, for example
        return Uncollated(str(error), where, kinds)


def identity_collate(batch: Any) -> Any:
    """A collate function for batches that are already complete: return the batch unchanged."""
    return batch


def data_error(batch: Uncollated, keys: Sequence[Any] | None) -> DataError:
    """The error for samples that cannot be collated. `keys`: the keys of the samples, if known."""
    names = [f"item {number} of the batch" for number in range(len(batch.kinds))]
    if keys:
        names = [f"sample {key}" for key in keys]
    if _NONE in batch.kinds:
        sample = names[batch.kinds.index(_NONE)]
        if not batch.where:
            return DataError(
                f"data: the dataset returned None for {sample}",
                "is a `return` missing in its __getitem__? To leave out samples on purpose, remove the None values in "
                'a function data={"collate_fn": ...}',
            )
        return DataError(
            f"data: {sample} contains None at {batch.where}, which cannot be collated into a tensor",
            "return a tensor or a number instead, leave this part out of all samples, or set "
            'data={"collate_fn": ...} to a function that creates the batch',
        )
    if not batch.kinds:
        return DataError(
            f"data: the samples cannot be collated into a batch: {batch.message}",
            "return tensors, numpy arrays, numbers, strings, or tuples, lists and dicts of them from __getitem__; "
            'or set data={"collate_fn": ...} to a function that creates the batch',
        )
    kinds = [*dict.fromkeys(batch.kinds)]
    examples = [f"{kind} in {names[batch.kinds.index(kind)]}" for kind in kinds[:_MAX_EXAMPLES]]
    if len(kinds) > _MAX_EXAMPLES:
        examples.append("...")
    part = f" at {batch.where}" if batch.where else ""
    return DataError(
        f"data: the samples of a batch differ{part}: {', '.join(examples)}",
        'set data={"collate_fn": ...} to a function that pads them to the same size, for example with '
        "torch.nn.utils.rnn.pad_sequence; or return samples of the same size from __getitem__",
    )


def _difference(samples: Sequence[Any]) -> tuple[str, tuple[str, ...]]:
    """The path of the first part that is None or differs between samples, and its description in each.

    ("", ()) if there is none.
    """
    by_part = [dict(_parts(sample)) for sample in samples]
    for where in by_part[0]:
        kinds = tuple(parts.get(where, "nothing") for parts in by_part)
        if len(set(kinds)) > 1 or _NONE in kinds:
            return where, kinds
    return "", ()


def _parts(sample: Any, where: str = "") -> Iterator[tuple[str, str]]:
    """Yield (path, description) for each part of a sample, outer parts first, for comparison with other samples."""
    inner: Iterable[tuple[Any, Any]] = ()
    kind = type(sample).__name__
    if hasattr(sample, "shape"):
        kind = f"shape {tuple(sample.shape)}"
    elif isinstance(sample, Mapping):
        kind = f"keys {', '.join(map(repr, sample))}"
        inner = sample.items()
    elif isinstance(sample, Sequence) and not isinstance(sample, str | bytes):
        kind = f"length {len(sample)}"
        inner = enumerate(sample)
    yield where, kind
    for key, value in inner:
        yield from _parts(value, f"{where}[{key!r}]")


# --- DataLoader errors ------------------------------------------------------------------------------------------------


def checked_batches(loader: Iterable[Any]) -> Iterator[Any]:
    """Yield the loader's batches. Raises `DataError` if a DataLoader worker fails or samples cannot be collated."""
    batches = _started(loader)
    for number in count():
        try:
            batch = next(batches)
        except StopIteration as end:
            if end.args:  # raised in a DataLoader worker: torch adds its traceback, but only raises the same type
                raise RuntimeError(*end.args) from None
            return
        except RuntimeError as error:
            if (of_worker := _worker_error(error, batches)) is not None:
                raise of_worker from None
            raise
        if type(batch) is Uncollated:
            raise data_error(batch, _keys(loader, number))
        if type(batch) is Partial:
            warn_about_left_out_samples()
        yield batch


def stop_iteration_error(source: str, note: str = "") -> RuntimeError:
    """The error to raise from a StopIteration of the user's code, which would otherwise end the epoch (see PEP 479).

    `source`: the function that raised it, for the message.
    """
    error = RuntimeError(
        f"{source} raised StopIteration, which usually comes from next() on an iterator without remaining items: use "
        "next(iterator, default), or raise another exception"
    )
    if note:
        error.add_note(note)
    return error


def _started(loader: Iterable[Any]) -> Iterator[Any]:
    """The loader's iterator. Raises `DataError` if the dataset cannot be pickled for its DataLoader workers."""
    try:
        with warnings.catch_warnings():
            # The error that follows contains the same text as this warning.
            warnings.filterwarnings("ignore", "Got pickle error when attempting to start a worker")
            return iter(loader)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        if not any(words in str(error) for words in ("pickle", "local object", "not found as")):
            raise
        raise DataError(
            f"data: the dataset cannot be sent to DataLoader workers started by spawn or forkserver: {error}",
            "define the dataset's class, its functions and collate_fn at the top level of a module (no lambda), and "
            "open files in __getitem__, not in __init__; or start workers by fork: "
            'DataLoader(..., multiprocessing_context="fork")',
        ) from None


def _keys(loader: Any, number: int) -> list[Any] | None:
    """The keys of the samples in batch `number`, found by iterating over the batch sampler again; None if unknown."""
    batches = getattr(loader, "batch_sampler", None)
    if batches is None:
        return None
    return next(islice(iter(getattr(batches, "batches", batches)), number, None), None)


def _worker_error(error: RuntimeError, batches: Iterator[Any]) -> DataError | None:
    """A `DataError` that names the DataLoader worker that failed or timed out; None for any other error."""
    text = str(error)
    named = None
    if text.startswith("DataLoader timed out"):
        tasks = getattr(batches, "_task_info", {})
        late = tasks.get(getattr(batches, "_rcvd_idx", None), (None,))[0]
        named = DataError(
            f"data: DataLoader worker {late} sent no batch within the timeout: {text}",
            "find out what __getitem__ waits for, or increase data.timeout",
        )
    else:
        workers = getattr(batches, "_workers", [])
        for number, worker in enumerate(workers):
            if not worker.is_alive() and worker.exitcode:
                how = f"exit code {worker.exitcode}"
                hint = "the worker's error is printed above; set data.num_workers=0 to get it with its traceback"
                if worker.exitcode < 0:
                    how = f"signal {-worker.exitcode}"
                    hint = (
                        "signal 9 usually means that the host ran out of memory: reduce data.num_workers or the sample "
                        "size"
                    )
                named = DataError(
                    f"data: DataLoader worker {number} (pid {worker.pid}) of {len(workers)} ended with {how}", hint
                )
    if named is not None:
        named.only_this_rank = True
    return named
