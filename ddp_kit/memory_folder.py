"""The folder in /dev/shm in which the workers of a node keep copies of their state, for the process that makes it.

The warm server makes the folder, and removes it when the job ends. The server's lock on it tells the next launch on
this machine whether it is still used: a server that is killed together with its launcher cannot remove it.
"""

import fcntl
import os
import shutil
import stat
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from ddp_kit.env import PACKAGE_FOLDER, SHARED_MEMORY, child_code

_MODE = stat.S_IFDIR | 0o700  # of a folder that `mkdtemp` has made
_LOCKED_AFTER = 60.0  # seconds in which a new folder is certain to be locked


def claim(folder: str) -> list[int]:
    """Lock a folder if it is in memory, and remove the folders next to it whose processes are gone.

    Returns the descriptors to keep open: the lock is released when this process ends.
    """
    own = Path(folder)
    if own.parent != Path(SHARED_MEMORY):
        return []
    prefix, _, random = own.name.rpartition("-")
    for other in own.parent.glob(f"{prefix}-{'?' * len(random)}"):
        with suppress(OSError):
            status = other.lstat()
            is_new = time.time() - status.st_mtime < _LOCKED_AFTER
            is_ours = status.st_uid == os.getuid() and status.st_mode == _MODE  # not a folder that the user has made
            if other != own and is_ours and not is_new:
                os.close(_lock(other))
                shutil.rmtree(other, ignore_errors=True)
    with suppress(OSError):
        return [_lock(own)]
    return []


def _lock(folder: Path) -> int:
    """Lock a folder, and return the descriptor. Raises `OSError`, also if another process has locked it."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def holds_copies(folder: str) -> bool:
    """Whether there are copies in a folder, because the workers have failed. `folder`: its path; may be empty."""
    with suppress(OSError):  # it is being removed
        return bool(folder) and any(Path(folder).glob("*/step-*"))
    return False


def remove(folder: str, *, save: bool) -> None:
    """Remove the folder. `save`: whether to save the newest copies in it on disk first, and print where."""
    if save and holds_copies(folder):
        code = child_code("from ddp_kit.checkpoint import ending", "ending.main(sys.argv[2])")
        subprocess.run([sys.executable, "-c", code, PACKAGE_FOLDER, folder], check=False)
    shutil.rmtree(folder, ignore_errors=True)
