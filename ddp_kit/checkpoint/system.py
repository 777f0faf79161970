"""The file operations of a save, one by one: tests can make each fail, or kill the process there."""

import ctypes
import os
import shutil
from pathlib import Path

_CURRENT_FOLDER = -100  # AT_FDCWD
_EXCHANGE = 2  # RENAME_EXCHANGE


class System:
    """What the operating system does for a save. All of it may raise `OSError`."""

    def mkdir(self, path: Path) -> None:
        """Make a folder that is not there yet."""
        path.mkdir()

    def create(self, path: Path) -> int:
        """Open a file that is not there yet."""
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    def write(self, file: int, content: memoryview) -> int:
        """Write some of it, and return how much."""
        return os.write(file, content)

    def fsync(self, file: int) -> None:
        """Flush a file, or a folder's entries, to the disk."""
        os.fsync(file)

    def rename(self, old: Path, new: Path) -> None:
        """Give a folder another name."""
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
        """Remove a folder and its content; entries that cannot be removed yet stay for the next save."""
        shutil.rmtree(path, ignore_errors=True)

    def free(self, folder: Path) -> int:
        """How many bytes can still be written there."""
        status = os.statvfs(folder)
        return status.f_bavail * status.f_frsize
