"""The descriptors that workers write to: files, pipes, or pseudo-terminals if the launcher runs in a terminal."""

import fcntl
import os
import pty
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

_PIPE_BYTES = 1 << 20
_SET_PIPE_SIZE = 1031  # Linux's F_SETPIPE_SZ
_WINDOW_SIZE = bytes(8)  # struct winsize


@dataclass(frozen=True)
class Route:
    """Where stdout or stderr of a rank goes."""

    console: bool
    """Whether it is shown."""
    file: str = ""
    """The log file; empty: none."""
    label: str | None = None
    """The prefix of each line on the console; None: the rank, once more than one rank has written to this stream."""


@dataclass(frozen=True)
class Streams:
    """Where a worker's output goes."""

    local_rank: int
    rank: int
    out: Route
    err: Route


@contextmanager
def private_files() -> Iterator[None]:
    """Inside the block, files and folders are created for this user only, including those that torch creates."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def open_log(path: str) -> int:
    """Create a log file, without following a symbolic link. Raises `OSError`."""
    new = 0 if path == os.devnull else os.O_CREAT | os.O_EXCL
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC | new, 0o600)


def is_same_file(one: int, other: int) -> bool:
    """Whether two descriptors refer to the same file, pipe or terminal."""
    first, second = os.fstat(one), os.fstat(other)
    return (first.st_dev, first.st_ino) == (second.st_dev, second.st_ino)


def open_terminal_or_pipe(console: int) -> tuple[int, int]:
    """Open a pipe, or a pseudo-terminal if the console is a terminal; return the launcher's and the worker's end."""
    if os.isatty(console):
        with suppress(OSError):  # no pseudo-terminal is available
            ours, theirs = pty.openpty()
            tty.setraw(theirs)  # the console translates line ends, so this terminal must not
            fcntl.ioctl(theirs, termios.TIOCSWINSZ, fcntl.ioctl(console, termios.TIOCGWINSZ, _WINDOW_SIZE))
            return ours, theirs
    ours, theirs = os.pipe()
    with suppress(OSError):
        fcntl.fcntl(ours, _SET_PIPE_SIZE, _PIPE_BYTES)  # so that a slow console does not block workers
    return ours, theirs
