"""Errors of DataLoader workers and collation, with the samples at fault."""

from collections.abc import Iterable, Iterator
from itertools import count, islice
from typing import Any

from ddp_kit.errors import DataError
from ddp_kit.loader.collate import Uncollated, data_error


def watched(loader: Iterable[Any]) -> Iterator[Any]:
    """The loader's batches. Raises `DataError` where a worker is at fault, or samples do not fit together."""
    batches = iter(loader)
    for number in count():
        try:
            batch = next(batches)
        except StopIteration:
            return
        except RuntimeError as error:
            raise _named(error, batches) or error from None
        if type(batch) is Uncollated:
            raise data_error(batch, _keys(loader, number))
        yield batch


def _keys(loader: Any, number: int) -> list[Any] | None:
    """The samples of the loader's batch `number`, drawn once more; None where that is not known."""
    batches = getattr(loader, "batch_sampler", None)
    if batches is None or not loader.in_order:
        return None
    return next(islice(iter(getattr(batches, "batches", batches)), number, None), None)


def _named(error: RuntimeError, batches: Iterator[Any]) -> DataError | None:
    """torch names processes by their numbers alone, or not at all; None where no DataLoader worker is at fault."""
    workers, text = getattr(batches, "_workers", []), str(error)
    found = None
    if "timed out" in text:
        tasks, due = getattr(batches, "_task_info", {}), getattr(batches, "_rcvd_idx", None)
        late = tasks.get(due, (None,))[0]
        found = DataError(
            f"data: no batch has come in time from DataLoader worker {late}: {text}",
            "see what __getitem__ waits for, or raise data.timeout",
        )
    else:
        for number, worker in enumerate(workers):
            if not worker.is_alive() and worker.exitcode:
                how = f"signal {-worker.exitcode}" if worker.exitcode < 0 else f"exit code {worker.exitcode}"
                found = DataError(
                    f"data: DataLoader worker {number} (pid {worker.pid}) of {len(workers)} ended with {how}",
                    "signal 9 without anyone sending it means out of memory: fewer data.num_workers, smaller samples",
                )
    if found is not None:
        found.only_this_rank = True
    return found
