"""Rows of scale.py about models with many modules, and about runs with many log rows."""

import json
import sys
import tempfile
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from ddp_kit.model.blocks import repeated_blocks
from ddp_kit.trainer.run_record import _Rows


def blocks(sizes: Sequence[int]) -> dict[str, Any]:
    """Calls that it takes to find the repeated blocks of a model with this number of modules."""
    values = []
    for size in sizes:
        model = nn.Sequential(*(nn.Sequential(nn.Identity(), nn.Identity()) for _ in range(size // 3)))
        values.append(calls(lambda model=model: repeated_blocks(model)))
    return {"name": "blocks", "per": "job", "sizes": [*sizes], "values": values, "unit": "calls", "bound": 1.15}


def calls(function: Callable[[], object]) -> int:
    """The number of calls and returns of functions in a call, including generators that are resumed."""
    count = 0

    def add(*_event: object) -> None:
        nonlocal count
        count += 1

    sys.setprofile(add)
    try:
        function()
    finally:
        sys.setprofile(None)
    return count


def rows(sizes: Sequence[int]) -> dict[str, Any]:
    """Peak of the memory that rank 0 needs to remove the last three rows of the run record when it resumes."""
    values = []
    for size in sizes:
        with recorded_rows(size) as path:
            tracemalloc.start()
            _Rows(path).truncate_after(size - 3)
            values.append(tracemalloc.get_traced_memory()[1])
            tracemalloc.stop()
    return {"name": "rows", "per": "rank", "sizes": [*sizes], "values": values, "unit": "bytes", "bound": 0.15}


def rows_read(sizes: Sequence[int]) -> dict[str, Any]:
    """Bytes that rank 0 reads to remove the last three rows of the run record when it resumes."""
    values = []
    for size in sizes:
        with recorded_rows(size) as path:
            before = bytes_read()
            _Rows(path).truncate_after(size - 3)
            values.append(bytes_read() - before)
            with path.open() as file:
                assert sum(1 for _ in file) == size - 3
    return {"name": "rows_read", "per": "rank", "sizes": [*sizes], "values": values, "unit": "bytes", "bound": 0.15}


@contextmanager
def recorded_rows(count: int) -> Iterator[Path]:
    """A file with this number of rows, of a run with 8 ranks."""
    row = {"event": "train", "epoch": 0, "loss": 0.5, "learning_rate": 0.1, "rank_seconds": [0.123456789] * 8}
    rest = json.dumps(row)[1:]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows.jsonl")
        with path.open("w") as file:
            file.writelines(f'{{"step": {step}, {rest}\n' for step in range(1, count + 1))
        yield path


def bytes_read() -> int:
    """Bytes that this process has read from files so far."""
    facts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(facts["rchar"])
