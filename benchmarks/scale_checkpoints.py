"""Rows of scale.py about checkpoints that many writers write, and that many ranks load."""

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from ddp_kit.checkpoint import writer as checkpoint_writer
from ddp_kit.checkpoint.format import STATE, checkpoints, name_of
from ddp_kit.checkpoint.packing import Division, pack
from ddp_kit.checkpoint.reader import load
from ddp_kit.checkpoint.saver import SharedBuffer, begin_copy
from ddp_kit.checkpoint.writer import Region, System, WriteTask, collect, unfinished_folder, write
from ddp_kit.state_values import Piece

OPERATIONS = ("open", "stat", "lstat", "listdir", "scandir", "unlink", "rename", "replace")
ROWS_PER_RANK = 2  # of each weight
NAMES = {
    "model": [f"blocks.{number}.weight" for number in range(4)],
    "optimizer": [f"state.{number}.exp_avg" for number in range(4)],
}
WAIT_SECONDS = 10.0  # in which writer 0 waits


class Opens:
    """A context manager that counts how often files in a folder are opened."""

    def __init__(self, folder: Path) -> None:
        self._folder = f"{folder}{os.sep}"
        self._counting = False
        self.count = 0
        sys.addaudithook(self._on_event)  # cannot be removed

    def __enter__(self) -> "Opens":
        self._counting = True
        return self

    def __exit__(self, *_: object) -> None:
        self._counting = False

    def _on_event(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self._counting and event == "open" and str(arguments[0]).startswith(self._folder):
            self.count += 1


def manifest(sizes: Sequence[int]) -> dict[str, Any]:
    """File operations of all ranks that write a checkpoint of FSDP, remove the previous one, and verify the new one."""
    values = []
    for writers in sizes:
        with tempfile.TemporaryDirectory() as folder:
            values.append(file_operations(Path(folder), writers))
    return {"name": "manifest", "per": "job", "sizes": [*sizes], "values": values, "unit": "operations", "bound": 1.15}


def file_operations(folder: Path, writers: int) -> int:
    """File operations to write a second checkpoint to a folder that keeps one, and to list it and verify its bytes."""
    write_shards(folder, 1, writers)
    with counted_operations() as operations:
        write_shards(folder, 2, writers)
        (found,) = checkpoints(folder, hashes=True)
    assert found.whole, found
    assert found.manifest is not None
    assert len(found.manifest.files) > 2 * writers
    return len(operations)


@contextmanager
def counted_operations() -> Iterator[list[str]]:
    """Context manager that yields a list, to which it adds the name of each file operation in `OPERATIONS`."""
    done: list[str] = []

    def counted(name: str) -> Any:
        function = getattr(os, name)

        def call(*arguments: Any, **options: Any) -> Any:
            done.append(name)
            return function(*arguments, **options)

        return patch.object(os, name, call)

    with ExitStack() as stack:
        for name in OPERATIONS:
            stack.enter_context(counted(name))
        yield done


def piece(first: int, last: int, rows: int, value: float = 0.0) -> Piece:
    """The rows from `first` to before `last` of a weight with `rows` rows, all with the same value."""
    return Piece(torch.full((last - first, 4), value), (rows, 4), (first, 0))


def write_shards(folder: Path, step: int, writers: int) -> Path:
    """Write a checkpoint to which each writer adds its rows of four weights, and of their optimizer state."""
    unfinished_folder(folder, step, "token").mkdir(parents=True)
    rows = writers * ROWS_PER_RANK
    buffer = SharedBuffer()
    for writer in reversed(range(writers)):  # writer 0, which waits for the others, is last
        first = writer * ROWS_PER_RANK
        state = {
            part: {name: piece(first, first + ROWS_PER_RANK, rows, writer) for name in names}
            for part, names in NAMES.items()
        }
        packed = pack(state)
        division = Division(packed, lambda _part, _name: False, writer, writers)
        tensors = [packed.tensors[number].tensor for number in division.numbers]
        files = division.layout.files
        text = b""
        if writer == 0:
            text = json.dumps(packed.text).encode()
            files = (*files, Region(STATE, division.layout.bytes, len(text)))
        buffer.prepare(division.layout, tensors, text)
        begin_copy(zip(buffer.targets, tensors, strict=True))()
        task = WriteTask(
            str(folder), step, False, 1, {}, files, "token", writer, writers, division.bytes, division.tensors
        )
        write(task, buffer.view, WithoutSync())
    buffer.close()
    return folder / name_of(step)


class WithoutSync(System):
    """The system's file operations, without waiting for the disk."""

    def fsync(self, file: int) -> None:
        """Do nothing."""


def shard_load(sizes: Sequence[int]) -> dict[str, Any]:
    """Files that a rank of FSDP opens to load a checkpoint of as many writers as ranks: the most of three ranks."""
    values = []
    for writers in sizes:
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = write_shards(Path(folder), 1, writers)
            opens = Opens(checkpoint)
            values.append(
                max(opens_of_load(opens, checkpoint, rank, writers) for rank in (0, writers // 3, writers - 1))
            )
    return {"name": "shard_load", "per": "rank", "sizes": [*sizes], "values": values, "unit": "opens", "bound": 0.15}


def opens_of_load(opens: Opens, checkpoint: Path, rank: int, ranks: int) -> int:
    """Files that a rank opens to load its rows of each weight. Compares the values that it has read."""
    first = rank * ROWS_PER_RANK
    own = piece(first, first + ROWS_PER_RANK, ranks * ROWS_PER_RANK)
    before = opens.count
    with opens:
        state = load(checkpoint, wanted=lambda _part, _name: own, position=(rank, ranks))
    for read in (*state["model"].values(), *state["optimizer"].values()):
        assert torch.equal(read.tensor, torch.full((ROWS_PER_RANK, 4), float(rank)))
    return opens.count - before


class Clock:
    """A clock that only sleeping moves."""

    now = 0.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.now > WAIT_SECONDS:
            raise TimeoutError


def writer_wait(sizes: Sequence[int]) -> dict[str, Any]:
    """File operations of writer 0 in ten seconds in which no other writer has ended, and no file grows."""
    values = []
    for writers in sizes:
        with tempfile.TemporaryDirectory() as folder:
            unfinished = Path(folder)
            for writer in range(1, writers):
                for part in (".writer", "model", "optimizer"):
                    (unfinished / f"{part}-{writer}").touch()
            task = WriteTask(folder, 1, False, 1, {}, (), writers=writers)
            clock = patch.object(checkpoint_writer, "time", Clock())
            with clock, counted_operations() as operations, suppress(TimeoutError):
                collect(task, unfinished, lambda: False)
            values.append(len(operations))
    return {
        "name": "writer_wait",
        "per": "job",
        "sizes": [*sizes],
        "values": values,
        "unit": "operations",
        "bound": 1.15,
    }
