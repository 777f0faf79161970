"""From host memory to files on the disk, with their hashes."""

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
_LARGE = 4 << 20  # smaller files are read again soon, and the disk is not their time
_BLOCK = 4096  # that of any disk, or a multiple of it


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
    total: int = 0
    """Bytes of what all of them write; 0: of what this one does."""
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
    return [_write_file(folder / file.name, memory[file.offset : file.offset + file.bytes], system) for file in files]


def write_text(path: Path, text: str, system: System) -> FileRecord:
    """Write a file that is not there yet, and sync it. Raises `OSError`."""
    return _write_file(path, memoryview(text.encode()), system)


def _write_file(path: Path, content: memoryview, system: System) -> FileRecord:
    hasher = Hasher()
    thread = Thread(target=hasher.update, args=(content,))  # hashing and writing release the interpreter lock
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
    """Write as much as goes to the disk directly, and return how much: no copy in the kernel's memory is made."""
    flags, done = fcntl.fcntl(file, fcntl.F_GETFL), 0
    try:
        fcntl.fcntl(file, fcntl.F_SETFL, flags | os.O_DIRECT)
        while done < len(content):
            done += system.write(file, content[done : done + _CHUNK])
            if done % _BLOCK:
                break
    except OSError as error:
        if error.errno != errno.EINVAL:  # the file system cannot, or wants other blocks
            raise
    fcntl.fcntl(file, fcntl.F_SETFL, flags)
    return done


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
