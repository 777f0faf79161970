"""The exceptions of ddpkit. Each message states what was requested, what was found, and what to do.

DdpKitError
├── ConfigError   an invalid TrainerConfig or combination of settings; also a ValueError
├── WorldError    the processes or devices are not as requested
│   └── FaultyRankError  a rank computes wrong gradients
├── DataError     the dataset or loader cannot be used
├── LossError     the user's loss, metric or optimizer returned an unusable value
├── CheckpointError  a checkpoint cannot be written, found or trusted
├── UsageError    an invalid command line: exit code 2
└── LaunchError   the launcher could not start the job

Uncaught exceptions of these classes are printed without a traceback: see uncaught.py.
"""

import errno
import unicodedata

from ddp_kit.texts import some


class DdpKitError(Exception):
    """The base class of ddpkit's exceptions.

    Args:
        message: What was requested and what was found.
        hint: What to do.
    """

    reported_elsewhere = False
    """Whether another rank reports this error. If so, only that rank prints it, and the launcher names that rank."""
    only_this_rank = False
    """Whether only this rank has the error, such as a failed DataLoader worker. If so, the launcher repeats it."""

    def __init__(self, message: str, hint: str) -> None:
        super().__init__(message, hint)
        self.message = printable(message, keep="\n\t")
        self.hint = printable(hint, keep="\n\t")

    def __str__(self) -> str:
        return f"{self.message}\n  hint: {self.hint}"


class ConfigError(DdpKitError, ValueError):
    """An invalid configuration; `problems` lists all mistakes, not only the first.

    Args:
        message: What was requested and what was found.
        hint: What to do.
        problems: One sentence for each mistake; empty if `message` alone describes the mistake.
    """

    def __init__(self, message: str, hint: str, problems: tuple[str, ...] = ()) -> None:
        super().__init__(message, hint)
        self.problems = problems

    def __str__(self) -> str:
        lines = [self.message, *(f"  {number}. {text}" for number, text in enumerate(self.problems, 1))]
        return "\n".join([*lines, f"  hint: {self.hint}"])


class WorldError(DdpKitError):
    """The processes or devices are not as requested."""


class FaultyRankError(WorldError):
    """A rank computes wrong gradients, which `verify_ranks="replay"` has found.

    Args:
        message: What was requested and what was found.
        hint: What to do.
        ranks: The ranks; empty if it is one of two, and nothing shows which.
    """

    def __init__(self, message: str, hint: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message, hint)
        self.ranks = ranks


class DataError(DdpKitError):
    """The dataset or loader cannot be used."""


class LossError(DdpKitError):
    """The user's loss function, metric or optimizer returned an unusable value.

    Args:
        message: What was requested and what was found.
        hint: What to do.
        step: The first optimizer step with the problem, if the problem is detected only in a later step.
    """

    def __init__(self, message: str, hint: str, step: int | None = None) -> None:
        super().__init__(message, hint)
        self.step = step


class CheckpointError(DdpKitError):
    """A checkpoint cannot be written, found or trusted.

    Args:
        message: What was requested and what was found.
        hint: What to do.
        transient: Whether the next save may succeed, as when a disk was full. The run then continues and tries again.
    """

    def __init__(self, message: str, hint: str, *, transient: bool = False) -> None:
        super().__init__(message, hint)
        self.transient = transient


class UsageError(DdpKitError):
    """An invalid command line."""


class LaunchError(DdpKitError):
    """The launcher could not start the job."""


def printable(text: str, keep: str = "") -> str:
    """Text from a file, an argument or another process, with control characters and lone surrogates as escapes.

    A terminal would interpret control characters: an escape sequence in a file name could move the cursor or set the
    window's title.

    Args:
        text: The text, such as the name of a script.
        keep: Control characters to keep, such as a newline.

    Returns:
        The text, with escapes such as `\\x1b`.
    """
    if text.isprintable():
        return text
    # Control and format characters, unassigned ones, lone surrogates, and line separators.
    escaped = {"Cc", "Cf", "Cn", "Co", "Cs", "Zl", "Zp"}
    return "".join(
        letter.encode("unicode_escape").decode()
        if letter not in keep and unicodedata.category(letter) in escaped
        else letter
        for letter in text
    )


def nearest(name: str, known: list[str]) -> str | None:
    """The known name that is closest in spelling, or None if no known name is close."""
    from difflib import get_close_matches  # slow to import, and only needed for mistakes

    matches = get_close_matches(name, known, n=1, cutoff=0.6)
    return next(iter(matches), None)


def suggestion(name: str, known: list[str], what: str) -> str:
    """The hint for an unknown name: the closest known name, or else some known names. `what`: such as "modules"."""
    if not known:
        return f"there are no {what}"
    close = nearest(name, known)
    if close:
        return f"did you mean {close!r}?"
    return f"{what}: {some(known)}"


_OPEN_FILES = (
    "the limit of open files is reached: run `ulimit -n 65536` in the shell before you start the command again, or "
    "close files and sockets that are no longer needed"
)
_DISK_FULL = "a disk or a quota is full (`df -h`, `df -i`): free some space, or write somewhere else"
_ADVICE = {
    errno.EMFILE: _OPEN_FILES,
    errno.ENFILE: _OPEN_FILES,
    errno.ENOSPC: _DISK_FULL,
    errno.EDQUOT: _DISK_FULL,
}


def advice_for(error: Exception, otherwise: str) -> str:
    """The hint for an error of the operating system. `otherwise`: the hint if its number does not tell the cause."""
    return _ADVICE.get(getattr(error, "errno", None) or 0, otherwise)
