"""Output of the commands of `ddpkit`: without control characters, and with secrets masked."""

import io
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import NamedTuple

from ddp_kit.errors import printable


def _write_stdout(text: str) -> None:
    with suppress(OSError, ValueError, AttributeError):  # stdout is closed; the exit code still reports the result
        if isinstance(sys.stdout, io.TextIOWrapper):
            # The bytes of names and arguments that are not UTF-8 are printed as they are.
            utf8 = sys.stdout.encoding.lower().replace("-", "") == "utf8"
            sys.stdout.reconfigure(errors="surrogateescape" if utf8 else "backslashreplace")
        print(text, flush=True)


def _write_stderr(text: str) -> None:
    with suppress(OSError, ValueError, AttributeError):  # a closed stderr must not end the job
        sys.stderr.write(text)


class Terminal(NamedTuple):
    """The environment of a command, and the functions with which it prints."""

    env: Mapping[str, str]
    """The environment, whose secrets are masked in messages."""
    stdout: Callable[[str], None] = _write_stdout
    """Writes a text and a line break to standard output."""
    stderr: Callable[[str], None] = _write_stderr
    """Writes a text to standard error."""

    def print_exactly(self, text: str) -> None:
        """Print text that a shell or an engine will read, such as a job file."""
        self.stdout(text)

    def print_text(self, text: str) -> None:
        """Print text, with control characters as escapes."""
        self.stdout(printable(text, keep="\n\t"))

    def print_message(self, text: str) -> None:
        """Print a message of ddpkit to standard error."""
        self.write_stderr(f"ddpkit: {text}\n")

    def write_stderr(self, text: str) -> None:
        """Write text to standard error, with secrets masked."""
        from ddp_kit.masking import masked  # its regular expressions are slow to compile

        self.stderr(masked(text, self.env))
