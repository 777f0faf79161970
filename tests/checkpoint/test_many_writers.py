"""Checkpoints of many writers, as FSDP writes them: a save, a listing, a verification and a removal stay linear."""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ddp_kit.checkpoint import writer as writer_program
from ddp_kit.checkpoint.format import (
    PIECES,
    FileRecord,
    Hasher,
    Manifest,
    checkpoints,
    examine,
    header,
    leftovers,
    manifest_content,
    name_of,
    newest_whole,
)
from ddp_kit.checkpoint.writer import Region, System, WriteTask, collect, unfinished_folder, write
from ddp_kit.errors import CheckpointError

OPERATIONS = ("open", "stat", "lstat", "listdir", "scandir", "unlink", "rename", "replace")


class WithoutSync(System):
    def fsync(self, file: int) -> None: ...


def share_of(writer: int, writers: int, folder: Path, step: int) -> tuple[WriteTask, memoryview]:
    """The share of a writer: 8 rows of one weight, and as many of the optimizer's state."""
    pieces = {"weight": {"shape": [8 * writers, 4], "offsets": [8 * writer, 0]}}
    content = header({"format": "pt", PIECES: json.dumps(pieces)}, [("weight", "F32", (8, 4), 128)]) + bytes(128)
    name = f"{writer + 1:05d}-of-{writers:05d}.safetensors"
    files = tuple(Region(f"{part}-{name}", 0, len(content)) for part in ("model", "optimizer"))
    if writer == 0:
        files += (Region("state.json", len(content), 2),)
    task = WriteTask(str(folder), step, False, 1, {}, files, "token", writer, writers, tensors="same")
    return task, memoryview(content + b"{}")


def save(folder: Path, step: int, writers: int) -> None:
    unfinished_folder(folder, step, "token").mkdir()
    for writer in reversed(range(writers)):
        write(*share_of(writer, writers, folder, step), WithoutSync())


@contextmanager
def counted_operations() -> Iterator[Counter[str]]:
    """Context manager that counts the operations on files by name."""
    counts: Counter[str] = Counter()

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            counts[name] += 1
            return function(*arguments, **named)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in OPERATIONS:
            patch.setattr(os, name, counted(name, getattr(os, name)))
        yield counts


def test_operations_of_a_save_per_writer_do_not_grow_with_the_writers(tmp_path: Path) -> None:
    per_writer = {}
    for writers in (25, 100):
        folder = tmp_path / str(writers)
        folder.mkdir()
        save(folder, 1, writers)
        with counted_operations() as counts:
            save(folder, 2, writers)  # removes step 1
            assert [found.problem for found in checkpoints(folder, hashes=True)] == [None]
        per_writer[writers] = sum(counts.values()) / writers
    assert 10 < per_writer[100] < 1.1 * per_writer[25]


class Clock:
    """A clock that only sleeping moves, and that ends the program when `end` seconds are over."""

    def __init__(self, end: float) -> None:
        self.now = 0.0
        self.end = end

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds
        if self.now >= self.end:
            raise TimeoutError


@pytest.mark.parametrize("growing", [False, True])
def test_writer_0_looks_at_each_waiting_writer_at_most_twice_a_second(
    growing: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(15)
    files = [tmp_path / f"{part}-{writer}.safetensors" for writer in range(1, 50) for part in ("model", "optimizer")]
    for path in (*files, *(tmp_path / f".writer-{writer}" for writer in range(1, 50))):
        path.touch()

    def grow() -> bool:
        if growing:
            for path in files:
                os.truncate(path, int(100 * clock.now) + 1)
        return False

    monkeypatch.setattr(writer_program, "time", clock)
    with counted_operations() as counts, pytest.raises(TimeoutError):
        collect(share_of(0, 50, tmp_path, 1)[0], tmp_path, grow)
    polls = counts["listdir"]
    assert 15 < polls < 80
    assert counts["open"] == 0, "no lock is probed before all writers stand still"
    most_compared = 1 if growing else 16
    assert counts["stat"] <= most_compared * len(files) + polls


def test_dead_writer_is_found_once_nothing_has_grown_for_a_while(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(200)
    monkeypatch.setattr(writer_program, "time", clock)
    path = tmp_path / "model-00002.safetensors"

    def grow() -> bool:
        if clock.now < 100:
            path.write_bytes(bytes(int(clock.now * 10)))
        return False

    with pytest.raises(CheckpointError, match=r"writer 1 .* has ended or never started"):
        collect(share_of(0, 2, tmp_path, 1)[0], tmp_path, grow)
    assert 119 < clock.now < 123


def test_manifest_of_many_files_is_read(tmp_path: Path) -> None:
    names = (f"model-{number:05d}-of-10000.safetensors" for number in range(10_000))
    manifest = Manifest(5, "", False, {}, tuple(FileRecord(name, 8, str(Hasher())) for name in names))
    path = tmp_path / name_of(5)
    path.mkdir()
    content = manifest_content(manifest)
    assert len(content) > 1 << 20
    (path / "manifest.json").write_bytes(content)
    found = examine(path)
    assert found.manifest == manifest
    assert found.problem == "model-00000-of-10000.safetensors is missing"


@pytest.mark.slow
def test_checkpoint_of_8192_writers_is_written_listed_verified_and_pruned(tmp_path: Path) -> None:
    save(tmp_path, 1, 8192)
    found = newest_whole(tmp_path, hashes=True).checkpoint
    assert found is not None
    assert found.manifest is not None
    assert len(found.manifest.files) == 2 * 8192 + 1, "with state.json"
    save(tmp_path, 2, 1)
    assert [one.step for one in checkpoints(tmp_path)] == [2]
    assert leftovers(tmp_path) == ()
