"""Rows of scale.py about checkpoints that many writers write."""

import fcntl
import json
import os
import sys
import tempfile
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

from ddp_kit.checkpoint import writer as checkpoint_writer
from ddp_kit.checkpoint.format import PIECES, checkpoints, header, name_of
from ddp_kit.checkpoint.reader import load
from ddp_kit.checkpoint.saver import Saver
from ddp_kit.checkpoint.writer import Region, System, WriteTask, collect, unfinished_folder, write
from ddp_kit.state_values import Piece

STEP = 1
OPERATIONS = ("open", "stat", "lstat", "listdir", "scandir", "unlink", "rename", "replace")


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
    count = 0

    def counted(name: str) -> Any:
        function = getattr(os, name)

        def call(*arguments: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            return function(*arguments, **options)

        return patch.object(os, name, call)

    write_shards(folder, 1, writers)
    with ExitStack() as stack:
        for name in OPERATIONS:
            stack.enter_context(counted(name))
        write_shards(folder, 2, writers)
        (found,) = checkpoints(folder, hashes=True)
    assert found.whole, found
    assert found.manifest is not None
    assert len(found.manifest.files) > 2 * writers
    return count


def write_shards(folder: Path, step: int, writers: int) -> None:
    """Write a checkpoint to which each writer adds a row of one weight, and of the optimizer's state."""
    unfinished_folder(folder, step, "token").mkdir(parents=True)
    for writer in reversed(range(writers)):  # writer 0, which waits for the others, is last
        pieces = {"weight": {"shape": [writers, 4], "offsets": [writer, 0]}}
        content = header({"format": "pt", PIECES: json.dumps(pieces)}, [("weight", "F32", (1, 4), 16)]) + bytes(16)
        name = f"{writer + 1:05d}-of-{writers:05d}.safetensors"
        files = [Region(f"{part}-{name}", 0, len(content)) for part in ("model", "optimizer")]
        if writer == 0:
            files.append(Region("state.json", len(content), 2))
        task = WriteTask(str(folder), step, False, 1, {}, tuple(files), "token", writer, writers, tensors="same")
        write(task, memoryview(content + b"{}"), WithoutSync())


class WithoutSync(System):
    """The system's file operations, without waiting for the disk."""

    def fsync(self, file: int) -> None:
        """Do nothing."""


def shard_load(sizes: Sequence[int]) -> dict[str, Any]:
    """Files that one rank opens to load its piece of a checkpoint that each rank has written a piece of."""
    values = []
    for writers in sizes:
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = sharded_checkpoint(Path(folder), writers)
            own = piece(1, writers)
            with Opens(checkpoint) as opens:
                load(checkpoint, wanted=lambda _part, _name, own=own: own)
            values.append(opens.count)
    return {"name": "shard_load", "per": "rank", "sizes": [*sizes], "values": values, "unit": "opens", "bound": 0.15}


def piece(writer: int, writers: int) -> Piece:
    """The rows of a tensor that one writer holds."""
    return Piece(torch.full((2, 4), float(writer)), (2 * writers, 4), (2 * writer, 0))


def sharded_checkpoint(folder: Path, writers: int) -> Path:
    """Write a checkpoint to which each writer adds its pieces of four weights and of their optimizer state."""
    savers = [Saver(folder, keep_last=1, background=False, writer=writer, writers=writers) for writer in range(writers)]
    token = savers[0].begin(STEP)
    for writer in (*range(1, writers), 0):  # writer 0 waits for the others
        own = piece(writer, writers)
        state = {
            "model": {f"blocks.{number}.weight": own for number in range(4)},
            "optimizer": {f"state.{number}.exp_avg": own for number in range(4)},
        }
        savers[writer].save(STEP, state, token=token)
    for saver in savers:
        saver.close()
    return folder / name_of(STEP)


def writer_wait(sizes: Sequence[int]) -> dict[str, Any]:
    """Files that writer 0 opens each time it looks whether the other writers, which are still writing, have ended."""
    values = []
    for writers in sizes:
        with tempfile.TemporaryDirectory() as folder:
            unfinished = Path(folder)
            locks = []
            for writer in range(1, writers):
                lock = os.open(unfinished / f".writer-{writer}", os.O_RDWR | os.O_CREAT)
                fcntl.flock(lock, fcntl.LOCK_EX)
                locks.append(lock)
            values.append(opens_per_look(unfinished, writers))
            for lock in locks:
                os.close(lock)
    return {"name": "writer_wait", "per": "job", "sizes": [*sizes], "values": values, "unit": "opens", "bound": 1.15}


def opens_per_look(unfinished: Path, writers: int) -> float:
    """Files that writer 0 opens in one of its looks."""
    looks = 0

    class EnoughError(Exception):
        pass

    def sleep(_seconds: float) -> None:
        nonlocal looks
        looks += 1
        if looks == 4:
            raise EnoughError

    task = WriteTask(str(unfinished.parent), STEP, False, 3, {}, (), "token", 0, writers)
    original = checkpoint_writer.time.sleep
    checkpoint_writer.time.sleep = sleep
    try:
        with Opens(unfinished) as opens:
            collect(task, unfinished, System(), threading.Event().is_set)
    except EnoughError:
        pass
    finally:
        checkpoint_writer.time.sleep = original
    return opens.count / looks
