"""Processes of other users, as far as this process may see them."""

from dataclasses import dataclass
from pathlib import PurePath

import psutil

from ddp_kit.launcher.masking import masked

_COMMAND_LENGTH = 100


@dataclass(frozen=True)
class Process:
    """A process of this machine."""

    pid: int
    """0: in another container, whose process ids mean nothing here."""
    user: str = ""
    command: str = ""
    """Empty, as is `user`, if this process may not see it."""

    def __str__(self) -> str:
        if not self.pid:
            return "a process of another container"
        if not self.user:
            return f"pid {self.pid}, not visible here"
        return f"pid {self.pid} of {self.user}" + (f": {self.command}" if self.command else "")


def look_at(pid: int) -> Process:
    """User and command of a process; never raises."""
    user = command = ""
    try:
        process = psutil.Process(pid)
        user = process.username()
        words = process.cmdline()
        command = " ".join([PurePath(words[0]).name, *words[1:]]) if words else process.name()
    except psutil.Error:  # it has ended, or this process may not see it
        pass
    return Process(pid, user, _shown(command))


def _shown(command: str) -> str:
    """On one line, without secrets and control characters."""
    line = "".join(letter if letter.isprintable() else " " for letter in masked(command)).strip()
    return line if len(line) <= _COMMAND_LENGTH else f"{line[: _COMMAND_LENGTH - 3]}..."
