"""From host memory to files on the disk, with their hashes."""

import errno
import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Self

from ddp_kit.checkpoint.system import System
from ddp_kit.manifest import FileRecord

_CHUNK = 64 << 20


@dataclass(frozen=True)
class Region:
    """A file, and where its content lies in the memory."""

    name: str
    offset: int
    bytes: int


@dataclass(frozen=True)
class Job:
    """What one process writes of one checkpoint."""

    folder: str
    """That of all checkpoints."""
    step: int
    best: bool
    keep_last: int
    versions: Mapping[str, str]
    files: tuple[Region, ...]
    token: str = ""
    """Names the folder in which the checkpoint is made; the same in all processes that write it."""
    writer: int = 0
    """Which of them this is. 0 waits for the others, and finishes the checkpoint."""
    writers: int = 1
    tensors: str = ""
    """A hash of the names, types and shapes of all tensors that the writers divide among themselves."""

    @property
    def size(self) -> int:
        """Bytes."""
        return sum(file.bytes for file in self.files)

    def to_json(self) -> str:
        """As one line."""
        return json.dumps(vars(self), default=vars)

    @classmethod
    def from_json(cls, line: str | bytes) -> Self:
        """The inverse of `to_json`."""
        content = json.loads(line)
        return cls(**{**content, "files": tuple(Region(**file) for file in content["files"])})


def write_files(files: Sequence[Region], memory: memoryview, folder: Path, system: System) -> list[FileRecord]:
    """Write files that are not there yet, and sync them. Raises `OSError`."""
    records = []
    for file in files:
        content = memory[file.offset : file.offset + file.bytes]
        with _hashed(content) as digest:
            write_file(folder / file.name, content, system)
        records.append(FileRecord(file.name, file.bytes, digest()))
    return records


@contextmanager
def _hashed(content: memoryview) -> Iterator[Callable[[], str]]:
    """Hash it in a thread while the body runs; both release the interpreter lock."""
    digest = hashlib.sha256()
    thread = Thread(target=digest.update, args=(content,))
    thread.start()
    try:
        yield digest.hexdigest
    finally:
        thread.join()


def write_text(path: Path, text: str, system: System) -> FileRecord:
    """Write a file that is not there yet, and sync it. Raises `OSError`."""
    content = text.encode()
    write_file(path, memoryview(content), system)
    return FileRecord(path.name, len(content), hashlib.sha256(content).hexdigest())


def write_file(path: Path, content: memoryview, system: System) -> None:
    """Write a file that is not there yet, and sync it. Raises `OSError`."""
    file = system.create(path)
    try:
        done = 0
        while done < len(content):
            done += system.write(file, content[done : done + _CHUNK])
        system.fsync(file)
    finally:
        os.close(file)


def fsync_folder(folder: Path, system: System) -> None:
    """Make the names in a folder durable. Raises `OSError`."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        system.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some file systems of networks: their names are durable at once, or never
            raise
    finally:
        os.close(descriptor)
