"""Checkpoints of many writers, as FSDP writes them: a save, a listing, a verification and a removal stay linear."""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

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
from ddp_kit.checkpoint.writer import Region, System, WriteTask, unfinished_folder, write

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
    assert len(found.manifest.files) == 2 * 8192 + 3, "with state.json and two indexes"
    save(tmp_path, 2, 1)
    assert [one.step for one in checkpoints(tmp_path)] == [2]
    assert leftovers(tmp_path) == ()
