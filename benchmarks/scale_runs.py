"""Rows of scale.py about models with many modules, and about runs with many log rows."""

import json
import sys
import tempfile
from collections.abc import Callable, Sequence
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
    """Bytes that rank 0 reads from the rows of the run record when it resumes and removes the last three rows."""
    row = {
        "event": "train",
        "step": 0,
        "epoch": 0,
        "loss": 0.123456789,
        "learning_rate": 0.1,
        "rank_seconds": [0.5] * 8,
    }
    values = []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "rows.jsonl")
        for size in sizes:
            path.write_text("".join(f"{json.dumps(row | {'step': step})}\n" for step in range(1, size + 1)))
            before = bytes_read()
            _Rows(path).truncate_after(size - 3)
            values.append(bytes_read() - before)
            if len(path.read_text().splitlines()) != size - 3:
                raise RuntimeError("rows are missing")
    return {"name": "rows", "per": "rank", "sizes": [*sizes], "values": values, "unit": "bytes read", "bound": 0.15}


def bytes_read() -> int:
    """Bytes that this process has read from files so far."""
    facts = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(facts["rchar"])
