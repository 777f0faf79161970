"""The Python program of a worker.

`ddpkit launch` imports this module before it hands a launch over to a kept process, so that its import must be fast.
`Program` and the classes of spec.py are therefore not dataclasses: `dataclasses` imports `inspect`, which is slow.
"""

from pathlib import Path
from typing import NamedTuple


class Program(NamedTuple):
    """The Python program of a worker: `python -u script.py arguments` or `python -u -m module arguments`."""

    python: str
    """The interpreter's path, as `ps` shows it."""
    name: str
    """The path of a script, or the name of a module."""
    arguments: tuple[str, ...]
    module: bool = False

    @property
    def command_line(self) -> tuple[str, ...]:
        """The equivalent command line."""
        options = ("-u", "-m") if self.module else ("-u",)
        return (self.python, *options, self.name, *self.arguments)

    @property
    def argv(self) -> list[str]:
        """`sys.argv` while Python starts the program."""
        return ["-m" if self.module else self.name, *self.arguments]

    @property
    def folder(self) -> Path:
        """The folder that is first in the program's sys.path."""
        return Path.cwd() if self.module else Path(self.name).resolve().parent

    @property
    def source(self) -> str:
        """The source of the main file; empty if the file cannot be found or read."""
        path = Path(self.name)
        if self.module:
            path = Path(self.name.replace(".", "/"), "__main__.py")
            if not path.parent.is_dir():
                path = path.parent.with_suffix(".py")
        try:
            return path.read_text(errors="replace")
        except OSError:
            return ""
