"""The descriptors that workers write to: files, pipes, or terminals of their own where the launcher has one."""

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
    """Where one stream of a rank goes."""

    console: bool
    """Whether it is shown."""
    file: str = ""
    """Where it is kept; empty: nowhere."""
    label: str = ""
    """In front of each line on the console; empty: the rank, once more than one speaks."""


@dataclass(frozen=True)
class Streams:
    """Where a worker's output goes."""

    local_rank: int
    rank: int
    out: Route
    err: Route


@contextmanager
def private_files() -> Iterator[None]:
    """Folders and files that are made meanwhile, by torch too, are the user's alone."""
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


def open_log(path: str) -> int:
    """A log file that is new, and that no link leads away. Raises `OSError`."""
    new = 0 if path == os.devnull else os.O_CREAT | os.O_EXCL
    return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC | new, 0o600)


def same_place(one: int, other: int) -> bool:
    """Whether two descriptors lead to the same file, pipe or terminal."""
    first, second = os.fstat(one), os.fstat(other)
    return (first.st_dev, first.st_ino) == (second.st_dev, second.st_ino)


def as_terminal_or_pipe(console: int) -> tuple[int, int]:
    """Our end and a worker's of what it writes to in the console's place: a terminal where the console is one."""
    if os.isatty(console):
        with suppress(OSError):  # a system without terminals to give away
            ours, theirs = pty.openpty()
            tty.setraw(theirs)  # lines reach the console as they were written; it is the console that adapts them
            fcntl.ioctl(theirs, termios.TIOCSWINSZ, fcntl.ioctl(console, termios.TIOCGWINSZ, _WINDOW_SIZE))
            return ours, theirs
    ours, theirs = os.pipe()
    with suppress(OSError):
        fcntl.fcntl(ours, _SET_PIPE_SIZE, _PIPE_BYTES)  # a worker shall not have to wait for a slow console
    return ours, theirs
