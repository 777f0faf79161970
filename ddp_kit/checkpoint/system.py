"""The operations on files that a save is made of, one by one: a test can fail at each, or be killed."""

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
        """Return when it is on the disk; a folder's names, too."""
        os.fsync(file)

    def rename(self, old: Path, new: Path) -> None:
        """Give a folder another name."""
        old.rename(new)

    def exchange(self, one: Path, other: Path) -> None:
        """Let two folders swap their names at once. Raises `OSError` where the file system cannot."""
        libc = ctypes.CDLL(None, use_errno=True)
        try:
            renameat2 = libc.renameat2
        except AttributeError:  # an old C library
            raise OSError("there is no renameat2") from None
        if renameat2(_CURRENT_FOLDER, os.fsencode(one), _CURRENT_FOLDER, os.fsencode(other), _EXCHANGE) != 0:
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    def remove(self, path: Path) -> None:
        """Remove a folder with all that is in it; what cannot be removed yet is left for the next time."""
        shutil.rmtree(path, ignore_errors=True)

    def free(self, folder: Path) -> int:
        """How many bytes can still be written there."""
        status = os.statvfs(folder)
        return status.f_bavail * status.f_frsize
