"""Processes of other users, as far as this process may see them."""

from dataclasses import dataclass
from pathlib import PurePath

import psutil

from ddp_kit.masking import masked

_COMMAND_LENGTH = 100


@dataclass(frozen=True)
class Process:
    """A process of this machine."""

    pid: int
    """0: a process in another container, whose process ids are not valid here."""
    user: str = ""
    command: str = ""
    """Empty, like `user`, if this process may not see it."""

    def __str__(self) -> str:
        if not self.pid:
            return "a process in another container"
        if not self.user:
            return f"pid {self.pid}, not visible here"
        return f"pid {self.pid} of {self.user}" + (f": {self.command}" if self.command else "")


def process_info(pid: int) -> Process:
    """User and command of a process; never raises."""
    user = command = ""
    try:
        process = psutil.Process(pid)
        user = process.username()
        argv = process.cmdline()
        command = " ".join([PurePath(argv[0]).name, *argv[1:]]) if argv else process.name()
    except psutil.Error:  # it has ended, or this process may not see it
        pass
    return Process(pid, user, _shown(command))


def _shown(command: str) -> str:
    """On one line, without secrets and control characters."""
    line = "".join(letter if letter.isprintable() else " " for letter in masked(command)).strip()
    return line if len(line) <= _COMMAND_LENGTH else f"{line[: _COMMAND_LENGTH - 3]}..."
