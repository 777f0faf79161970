"""Errors of DataLoader workers and collation, with the samples at fault."""

from collections.abc import Iterable, Iterator
from itertools import count, islice
from typing import Any

from ddp_kit.errors import DataError
from ddp_kit.loader.collate import Uncollated, data_error


def checked_batches(loader: Iterable[Any]) -> Iterator[Any]:
    """Yield the loader's batches. Raises `DataError` if a DataLoader worker fails or samples cannot be collated."""
    batches = iter(loader)
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


def _keys(loader: Any, number: int) -> list[Any] | None:
    """The samples of the loader's batch `number`, drawn again from the batch sampler; None if unknown."""
    batches = getattr(loader, "batch_sampler", None)
    if batches is None or not loader.in_order:
        return None
    return next(islice(iter(getattr(batches, "batches", batches)), number, None), None)


def _worker_error(error: RuntimeError, batches: Iterator[Any]) -> DataError | None:
    """An error that names the DataLoader worker, which torch's own does not; None if no worker failed."""
    workers, text = getattr(batches, "_workers", []), str(error)
    found = None
    if "timed out" in text:
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
                    "signal 9 usually means out of host memory: use fewer data.num_workers or smaller samples",
                )
    if found is not None:
        found.only_this_rank = True
    return found
