"""Rows of scale.py about checkpoints that many writers write."""

import fcntl
import os
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ddp_kit.checkpoint import writer as checkpoint_writer
from ddp_kit.checkpoint.format import name_of
from ddp_kit.checkpoint.reader import load
from ddp_kit.checkpoint.saver import Saver
from ddp_kit.checkpoint.writer import System, WriteTask, collect
from ddp_kit.state_values import Piece

STEP = 1


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
    """Bytes of the manifest of a checkpoint that each rank has written a piece of."""
    values = []
    for writers in sizes:
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = sharded_checkpoint(Path(folder), writers)
            values.append((checkpoint / "manifest.json").stat().st_size)
    return {"name": "manifest", "per": "job", "sizes": [*sizes], "values": values, "unit": "bytes", "bound": 1.15}


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
