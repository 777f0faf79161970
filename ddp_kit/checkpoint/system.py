"""The file operations of a save, as methods that tests can make fail, or replace to kill the process there."""

import ctypes
import os
import shutil
from pathlib import Path

_CURRENT_FOLDER = -100  # AT_FDCWD
_EXCHANGE = 2  # RENAME_EXCHANGE


class System:
    """The file operations of a save. All of them may raise `OSError`."""

    def mkdir(self, path: Path) -> None:
        """Create a folder, which must not exist."""
        path.mkdir()

    def create(self, path: Path) -> int:
        """Create a file, which must not exist, and return its descriptor."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def write(self, file: int, content: memoryview) -> int:
        """Write at least a part of the content, and return how many bytes."""
        return os.write(file, content)

    def fsync(self, file: int) -> None:
        """Flush a file, or a folder's entries, to the disk."""
        os.fsync(file)

    def rename(self, old: Path, new: Path) -> None:
        """Rename a file or folder."""
        old.rename(new)

    def exchange(self, one: Path, other: Path) -> None:
        """Swap the names of two folders atomically. Raises `OSError` if the file system cannot."""
        libc = ctypes.CDLL(None, use_errno=True)
        try:
            renameat2 = libc.renameat2
        except AttributeError:  # an old C library
            raise OSError("renameat2 is not available") from None
        if renameat2(_CURRENT_FOLDER, os.fsencode(one), _CURRENT_FOLDER, os.fsencode(other), _EXCHANGE) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def remove(self, path: Path) -> None:
        """Remove a folder and its content. Entries that cannot be removed are left for the next save."""
        shutil.rmtree(path, ignore_errors=True)

    def free(self, folder: Path) -> int:
        """The number of bytes that can still be written to the folder's file system."""
        status = os.statvfs(folder)
        return status.f_bavail * status.f_frsize
