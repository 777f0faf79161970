"""The guard of a rehearsal: finds a change of a file that existed before the rehearsal, before it happens.

Python announces most changes of files to audit hooks (PEP 578). Native code does not; `watch` names what torch and
safetensors have. Programs that the script starts are not guarded.
"""

import os
import sqlite3
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from stat import S_ISLNK, S_ISREG
from typing import Any

_CHANGES = os.O_WRONLY | os.O_RDWR | os.O_TRUNC
_DISPOSABLE = {"__pycache__", ".cache", ".triton", ".nv"}
"""Folders of caches: a file in them may be replaced at any time."""
_SQLITE_READS = {
    sqlite3.SQLITE_READ,
    sqlite3.SQLITE_SELECT,
    sqlite3.SQLITE_PRAGMA,
    sqlite3.SQLITE_TRANSACTION,
    sqlite3.SQLITE_SAVEPOINT,
    sqlite3.SQLITE_FUNCTION,
    sqlite3.SQLITE_RECURSIVE,
}


class FileGuard:
    """Calls `stop` with the path of a file that existed before `began` and is about to be changed."""

    def __init__(self, own: Sequence[Path], began: float, stop: Callable[[Path], None]) -> None:
        """`own`: the files and folders in which everything may be changed."""
        self._own = [path.resolve() for path in own]
        self._began = began
        self._stop = stop
        self._checks: dict[str, Callable[..., None]] = {
            "open": self._before_open,
            "os.rename": self._before_rename,
            "os.link": lambda source, _target, folder, _folder: self._before_unlink(source, folder),
            "os.remove": self._before_unlink,
            "os.truncate": lambda path, *_: self._before_change(path),
            # These change the time that shows whether a file existed before.
            "os.setxattr": lambda path, *_: self._before_change(path),
            "os.removexattr": lambda path, *_: self._before_change(path),
            "os.chmod": lambda path, _mode, folder: self._before_change(path, folder),
            "os.chown": lambda path, _user, _group, folder: self._before_change(path, folder),
            "os.utime": lambda path, _times, _ns, folder: self._before_change(path, folder),
        }

    def install(self) -> None:
        """Watch this process, and those that it forks, from now on. An audit hook cannot be removed."""

        def hook(event: str, arguments: tuple[Any, ...]) -> None:
            check = self._checks.get(event)
            if check is not None:
                check(*arguments)

        sys.addaudithook(hook)
        # SQLite opens its files in native code. `sqlite3.dbapi2` has the names of `sqlite3`, and libraries use either.
        sqlite3.connect = sqlite3.dbapi2.connect = self._watched(sqlite3.connect)

    def is_own(self, path: Path) -> bool:
        """Whether a path is in a folder of this run alone."""
        return any(path.is_relative_to(folder) for folder in self._own)

    def protects(self, path: Path) -> bool:
        """Whether there is a file that existed before the rehearsal, or a folder that contains one."""
        if self.is_own(path) or not _DISPOSABLE.isdisjoint(path.parts):
            return False
        with suppress(OSError, ValueError):  # no such file
            if path.is_dir() and not path.is_symlink():
                return any(self._existed(each) for each in path.rglob("*"))
            return self._existed(path)
        return False

    def _existed(self, path: Path) -> bool:
        facts = path.lstat()
        # Lock files are empty, and there is nothing to lose. The time is that of the last change, also of the name.
        is_file = S_ISREG(facts.st_mode) or S_ISLNK(facts.st_mode)
        return is_file and facts.st_size > 0 and facts.st_ctime < self._began

    def _before_change(self, name: Any, folder: int = -1) -> None:
        """Before a change of a file, or of the file to which a link points."""
        path = resolved(name, folder)
        if path is not None and self.protects(path.resolve()):
            self._stop(path.resolve())

    def _before_unlink(self, name: Any, folder: int) -> None:
        """Before a name is removed, or given to another file."""
        path = resolved(name, folder)
        if path is not None and self.protects(path):
            self._stop(path)

    def _before_open(self, name: Any, _mode: Any, flags: int) -> None:
        if flags & _CHANGES:
            self._before_change(name)

    def _before_rename(self, source: Any, target: Any, source_folder: int, target_folder: int) -> None:
        self._before_unlink(source, source_folder)
        self._before_unlink(target, target_folder)

    def _watched(self, connect: Callable[..., Any]) -> Callable[..., Any]:
        """A function like `sqlite3.connect`, whose connections may read a protected database, but not change it."""

        def watched(database: Any, *args: Any, **kwargs: Any) -> Any:
            name = database
            if isinstance(name, str):  # a URI, such as file:data.db?mode=ro, has the path between these
                name = name.removeprefix("file:").partition("?")[0]
            file = resolved(name) or Path()
            protected = file != Path() and self.protects(file.resolve())
            connection = connect(database, *args, **kwargs)

            def authorize(action: int, *_: Any) -> int:
                if action not in _SQLITE_READS:
                    self._stop(file.resolve())
                return sqlite3.SQLITE_OK

            if protected:
                connection.set_authorizer(authorize)
            return connection

        return watched


def resolved(name: Any, folder: int = -1) -> Path | None:
    """The absolute path of a file without links in its folders. `folder`: a descriptor, or -1. None: not a path."""
    if isinstance(name, os.PathLike):
        name = os.fspath(name)
    if not isinstance(name, str | bytes):
        return None
    text = os.fsdecode(name)
    with suppress(OSError, ValueError):
        parent = Path(f"/proc/self/fd/{folder}").readlink() if folder >= 0 else Path()
        path = Path(os.path.abspath(parent / text))  # noqa: PTH100  # the last part may be a link
        return path.parent.resolve() / path.name
    return None
