"""Other people's processes, as far as they can be seen from here."""

from dataclasses import dataclass
from pathlib import PurePath

import psutil

from ddp_kit.launcher.masking import masked

_COMMAND_LENGTH = 100


@dataclass(frozen=True)
class Process:
    """A process of this machine."""

    pid: int
    """0: of another container, whose numbers mean nothing here."""
    user: str = ""
    command: str = ""
    """Empty, as is the user, where the system does not tell."""

    def __str__(self) -> str:
        if not self.pid:
            return "a process of another container"
        if not self.user:
            return f"pid {self.pid}, not to be seen from here"
        return f"pid {self.pid} of {self.user}" + (f": {self.command}" if self.command else "")


def look_at(pid: int) -> Process:
    """Who runs this process, and what it is; never raises."""
    user = command = ""
    try:
        process = psutil.Process(pid)
        user = process.username()
        words = process.cmdline()
        command = " ".join([PurePath(words[0]).name, *words[1:]]) if words else process.name()
    except psutil.Error:  # it has ended, or is not ours to see
        pass
    return Process(pid, user, _shown(command))


def _shown(command: str) -> str:
    """On one line, without secrets and without what a terminal would obey."""
    line = "".join(letter if letter.isprintable() else " " for letter in masked(command)).strip()
    return line if len(line) <= _COMMAND_LENGTH else f"{line[: _COMMAND_LENGTH - 3]}..."
