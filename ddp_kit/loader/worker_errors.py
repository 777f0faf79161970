"""Errors of DataLoader workers and of collation, which name the worker or the samples."""

import pickle
import warnings
from collections.abc import Iterable, Iterator
from itertools import count, islice
from typing import Any

from ddp_kit.errors import DataError
from ddp_kit.loader.collate import Uncollated, data_error


def checked_batches(loader: Iterable[Any]) -> Iterator[Any]:
    """Yield the loader's batches. Raises `DataError` if a DataLoader worker fails or samples cannot be collated."""
    batches = _started(loader)
    for number in count():
        try:
            batch = next(batches)
        except StopIteration:
            return
        except RuntimeError as error:
            raise _worker_error(error, batches) or error from None
        if type(batch) is Uncollated:
            raise data_error(batch, _keys(loader, number))
        yield batch


def _started(loader: Iterable[Any]) -> Iterator[Any]:
    """The loader's iterator. Raises `DataError` if the dataset cannot be pickled for its DataLoader workers."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Got pickle error when attempting to start a worker")  # the error says it
            return iter(loader)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        if not any(words in str(error) for words in ("pickle", "local object", "not found as")):
            raise
        raise DataError(
            f"data: the dataset cannot be sent to DataLoader workers that spawn or forkserver starts: {error}",
            "define its class, functions and collate_fn at the top level of a module (no lambda), and open files in "
            '__getitem__, not in __init__; or start workers by fork: DataLoader(..., multiprocessing_context="fork")',
        ) from None


def _keys(loader: Any, number: int) -> list[Any] | None:
    """The keys of the samples in batch `number`, drawn again from the batch sampler; None if unknown."""
    batches = getattr(loader, "batch_sampler", None)
    if batches is None:
        return None
    return next(islice(iter(getattr(batches, "batches", batches)), number, None), None)


def _worker_error(error: RuntimeError, batches: Iterator[Any]) -> DataError | None:
    """An error that names the DataLoader worker, which torch's own does not; None if no worker failed."""
    workers, text = getattr(batches, "_workers", []), str(error)
    found = None
    if text.startswith("DataLoader timed out"):
        tasks, due = getattr(batches, "_task_info", {}), getattr(batches, "_rcvd_idx", None)
        late = tasks.get(due, (None,))[0]
        found = DataError(
            f"data: DataLoader worker {late} sent no batch within the timeout: {text}",
            "find out what __getitem__ waits for, or raise data.timeout",
        )
    else:
        for number, worker in enumerate(workers):
            if not worker.is_alive() and worker.exitcode:
                how = f"signal {-worker.exitcode}" if worker.exitcode < 0 else f"exit code {worker.exitcode}"
                found = DataError(
                    f"data: DataLoader worker {number} (pid {worker.pid}) of {len(workers)} ended with {how}",
                    "signal 9 usually means out of host memory: use fewer data.num_workers or smaller samples"
                    if worker.exitcode < 0
                    else "its own error is above; data.num_workers=0 shows it with its traceback",
                )
    if found is not None:
        found.only_this_rank = True
    return found
