"""Every error that ddpkit raises on purpose. Each says what was asked, what was found, and what to do now.

    DdpKitError
    ├── ConfigError   a TrainerConfig (or a combination of its values) that cannot be used; also a ValueError
    ├── WorldError    the processes and devices are not what was asked for
    ├── DataError     the dataset or loader cannot be used
    ├── LossError     what the user's loss, metric or optimizer gave back cannot be used
    ├── CheckpointError  a checkpoint cannot be written, found or believed
    ├── UsageError    a command line that cannot be used: exit code 2
    └── LaunchError   the launcher could not bring the job up

A mistake of the user is shown as its message, without a traceback: see `speak_plainly`.
"""

import sys
import sysconfig
import time
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import TracebackType

_NOT_THE_USER_S = (Path(__file__).parent, Path(sysconfig.get_path("stdlib")))


class DdpKitError(Exception):
    """The base of all errors raised on purpose.

    `message` says what was asked and what was found; `hint` says what to do now.
    """

    hold_back_seconds = 5.0
    """How long ranks leave the word to the one that has taken it, or to rank 0 where nobody can tell who has."""
    another_speaks = False
    """Whether another rank has found the mistake, so that this one leaves the word to it."""

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


def speak_plainly(rank: int, takes_the_word: Callable[[], bool] | None = None) -> None:
    """From now on an uncaught `DdpKitError` ends this process with its message instead of a traceback.

    Where several ranks find the same mistake, one speaks: the first for which `takes_the_word` is true; rank 0 as
    long as there is no way to ask. The others hold back for a moment, in which the launcher ends them; a rank that is
    still there after that speaks for itself, so nothing is lost.
    All other exceptions go to the hook that was there before.
    """
    before = sys.excepthook
    if getattr(before, "speaks_plainly", False):
        if takes_the_word is None:
            return
        before = before.before  # type: ignore[attr-defined]

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, DdpKitError):
            before(kind, error, trace)
            return
        first = not error.another_speaks and (rank == 0 if takes_the_word is None else takes_the_word())
        if not first:
            time.sleep(error.hold_back_seconds)
        speaker = f" (rank {rank})" if rank > 0 else ""
        sys.stderr.write(f"ddpkit: error{speaker}{_place(trace)}: {error}\n")

    hook.speaks_plainly, hook.before = True, before  # type: ignore[attr-defined]
    sys.excepthook = hook


def _place(trace: TracebackType | None) -> str:
    """The last line of the user's own code on the way to the error."""
    place = ""
    while trace is not None:
        file = Path(trace.tb_frame.f_code.co_filename)
        library = "site-packages" in file.parts or any(folder in file.parents for folder in _NOT_THE_USER_S)
        if file.suffix == ".py" and not library:
            place = f" at {file.name}:{trace.tb_lineno}"
        trace = trace.tb_next
    return place
