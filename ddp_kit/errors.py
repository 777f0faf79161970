"""Every error that ddpkit raises on purpose. Each says what was asked, what was found, and what to do now.

    DdpKitError
    ├── ConfigError   a TrainerConfig (or a combination of its values) that cannot be used; also a ValueError
    ├── WorldError    the processes and devices are not what was asked for
    ├── DataError     the dataset or loader cannot be used
    ├── LossError     what the user's loss, metric or optimizer gave back cannot be used
    ├── CheckpointError  a checkpoint cannot be written, found or believed
    ├── UsageError    a command line that cannot be used: exit code 2
    └── LaunchError   the launcher could not bring the job up

A mistake of the user is shown as its message, without a traceback: see uncaught.py.
"""

from collections.abc import Sequence
from difflib import get_close_matches


class DdpKitError(Exception):
    """The base of all errors raised on purpose.

    `message` says what was asked and what was found; `hint` says what to do now.
    """

    another_speaks = False
    """Whether another rank has found the mistake: then that one prints it, and the launcher's verdict names it."""
    of_one_rank = False
    """Whether only this rank can find it, as the end of a DataLoader worker of its own: then the verdict repeats it."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message, hint)
        # What is quoted from a file may hold lone surrogates, which cannot be printed.
        self.message = message.encode(errors="backslashreplace").decode()
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message}\n  hint: {self.hint}"


class ConfigError(DdpKitError, ValueError):
    """A configuration that cannot be used; `problems` lists every mistake found, not only the first."""

    def __init__(self, message: str, hint: str, problems: tuple[str, ...] = ()) -> None:
        super().__init__(message, hint)
        self.problems = problems

    def __str__(self) -> str:
        lines = [self.message, *(f"  {number}. {text}" for number, text in enumerate(self.problems, 1))]
        return "\n".join([*lines, f"  hint: {self.hint}"])


class WorldError(DdpKitError):
    """The processes or devices at hand are not what was asked for."""


class DataError(DdpKitError):
    """The dataset or loader cannot be used."""


class LossError(DdpKitError):
    """What the user's loss function, metric or optimizer gave back cannot be used.

    `step`: the first optimizer step that it was so in, where that is found out later.
    """

    def __init__(self, message: str, hint: str, step: int | None = None) -> None:
        super().__init__(message, hint)
        self.step = step


class CheckpointError(DdpKitError):
    """A checkpoint cannot be written, found or believed.

    `may_pass`: whether it is transient, as a full disk: the run then continues and tries again with its next save.
    """

    def __init__(self, message: str, hint: str, *, may_pass: bool = False) -> None:
        super().__init__(message, hint)
        self.may_pass = may_pass


class UsageError(DdpKitError):
    """A command line that cannot be used."""


class LaunchError(DdpKitError):
    """The launcher could not bring the job up."""


def nearest(name: str, known: list[str]) -> str | None:
    """The known name closest in spelling, or None where nothing is close."""
    found = get_close_matches(name, known, n=1, cutoff=0.6)
    return found[0] if found else None


def some(names: Sequence[str]) -> str:
    """The first five of many names, and how many more there are."""
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
