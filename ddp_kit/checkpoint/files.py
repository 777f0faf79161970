"""Writes host memory to files, and hashes them."""

import errno
import fcntl
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Self

from ddp_kit.checkpoint.system import System
from ddp_kit.manifest import FileRecord, Hasher

_CHUNK = 64 << 20
_LARGE = 4 << 20  # smaller files are written through the page cache: bandwidth does not dominate their time
_BLOCK = 4096  # a multiple of the block size of any disk


@dataclass(frozen=True)
class Region:
    """A file to write, and the position of its content in memory."""

    name: str
    offset: int
    bytes: int


@dataclass(frozen=True)
class Job:
    """The part of one checkpoint that one process writes."""

    folder: str
    """The folder of all checkpoints."""
    step: int
    best: bool
    keep_last: int
    versions: Mapping[str, str]
    files: tuple[Region, ...]
    token: str = ""
    """Part of the name of the checkpoint's temporary folder; equal on all writers."""
    writer: int = 0
    """The index of this writer. Writer 0 waits for the others and completes the checkpoint."""
    writers: int = 1
    """The number of writers."""
    total: int = 0
    """Bytes that all writers write together; 0: those of this writer."""
    tensors: str = ""
    """A hash of names, dtypes and shapes of the tensors that are divided among the writers."""

    @property
    def size(self) -> int:
        """Bytes that this writer writes."""
        return sum(file.bytes for file in self.files)

    def to_json(self) -> str:
        """The job as one line of JSON."""
        return json.dumps(vars(self), default=vars)

    @classmethod
    def from_json(cls, line: str | bytes) -> Self:
        """The inverse of `to_json`."""
        content = json.loads(line)
        return cls(**{**content, "files": tuple(Region(**file) for file in content["files"])})


def write_files(files: Sequence[Region], memory: memoryview, folder: Path, system: System) -> list[FileRecord]:
    """Create files from regions of `memory`, and fsync them. Raises `OSError`."""
    return [_write_file(folder / file.name, memory[file.offset : file.offset + file.bytes], system) for file in files]


def write_text(path: Path, text: str, system: System) -> FileRecord:
    """Create a text file and fsync it. Raises `OSError`."""
    return _write_file(path, memoryview(text.encode()), system)


def _write_file(path: Path, content: memoryview, system: System) -> FileRecord:
    hasher = Hasher()
    thread = Thread(target=hasher.update, args=(content,))  # hashing and writing release the GIL
    file = system.create(path)
    try:
        thread.start()
        try:
            done = 0
            if len(content) >= _LARGE:
                done = _write_past_the_cache(file, content[: len(content) // _BLOCK * _BLOCK], system)
            while done < len(content):
                done += system.write(file, content[done : done + _CHUNK])
            system.fsync(file)
        finally:
            thread.join()
    finally:
        os.close(file)
    return FileRecord(path.name, len(content), str(hasher))


def _write_past_the_cache(file: int, content: memoryview, system: System) -> int:
    """Write with direct I/O, bypassing the page cache; returns how many bytes could be written that way."""
    flags, done = fcntl.fcntl(file, fcntl.F_GETFL), 0
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, flags | os.O_DIRECT)
        while done < len(content):
            done += system.write(file, content[done : done + _CHUNK])
            if done % _BLOCK:
                break
    except OSError as error:
        if error.errno != errno.EINVAL:  # EINVAL: the file system has no direct I/O, or another block size
            raise
    fcntl.fcntl(file, fcntl.F_SETFL, flags)
    return done


def fsync_folder(folder: Path, system: System) -> None:
    """Make the entries of a folder durable. Raises `OSError`."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        system.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # EINVAL: some network file systems cannot sync folders
            raise
    finally:
        os.close(descriptor)
