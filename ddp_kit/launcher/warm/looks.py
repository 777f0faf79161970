"""Files, variables and arguments that imports look at: a kept process is used only where they would see the same.

    variables_read     the environment variables that Python code reads
    looks_of           files, the current folder and `sys.argv`

What a compiled library reads cannot be seen: `READ_BY_LIBRARIES` in env.py names the variables.
"""

import json
import os
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from ddp_kit.env import INSTALLED_PACKAGES
from ddp_kit.launcher.warm.imports import USE_ONLY, environ_of_class, reading_module

_READS_ONLY = {**USE_ONLY, "tqdm.utils": "TQDM_"}
_OWN = "ddp_kit.launcher."
_IMPORTER = ("importlib.", "_frozen_importlib", "zipimport")
_STANDARD_LIBRARY = ("<frozen ", f"{sysconfig.get_path('stdlib')}/")
# Nothing here is the user's to change, or it is compared in another way (facts.py, the files of modules).
_NOT_NOTED = ("/proc/", "/sys/", "/dev/", *_STANDARD_LIBRARY)


class Variables:
    """The environment variables that imports have read."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.prefixes: set[str] = {*_READS_ONLY.values()}
        """Prefixes of the variables that code has looked for in the whole environment."""

    def includes(self, name: str) -> bool:
        """Whether an import may have read this variable."""
        return name in self.names or name.startswith(tuple(self.prefixes))


@contextmanager
def variables_read(variables: Variables) -> Iterator[None]:
    """Context manager in which the variables are noted that Python code reads, other than the launcher's own code."""

    class Noting(os._Environ[Any]):
        def __getitem__(self, name: Any) -> Any:
            reader = reading_module()
            if os.fsdecode(name).startswith(_READS_ONLY.get(reader, "")) and not reader.startswith(_OWN):
                variables.names.add(os.fsdecode(name))
            return super().__getitem__(name)

        def __iter__(self) -> Iterator[Any]:
            reader = reading_module()
            if not reader.startswith(_OWN):
                variables.prefixes.add(_READS_ONLY.get(reader, ""))
            return super().__iter__()

    with environ_of_class(Noting):
        yield


class Looks(NamedTuple):
    """Files, folders and arguments that imports looked at, apart from installed packages and Python's own files."""

    files: list[str]
    """The paths of files that they opened or asked about, also of those that do not exist."""
    listed: list[str]
    """The folders that they listed."""
    folder: bool
    """Whether they used the current folder."""
    arguments: bool
    """Whether they read `sys.argv`."""


def looks_of(make_imports: Callable[[], object]) -> Looks | None:
    """Make imports in a fork of this process, where they can be observed without a trace. None: they end the fork.

    Here, a function in place of `os.stat`, or an audit hook, would remain in every worker.
    """
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(read)
            observer = _Observer()
            observer.observe()
            make_imports()
            with os.fdopen(write, "w") as pipe:
                json.dump(observer.looks(), pipe)
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    return Looks(*json.loads(text)) if text else None


class _Observer:
    def __init__(self) -> None:
        self._files: set[str] = set()
        self._listed: set[str] = set()
        self._folder = self._arguments = False

    def looks(self) -> Looks:
        return Looks(sorted(self._files), sorted(self._listed), self._folder, self._arguments)

    def observe(self) -> None:
        """Observe this process from now on."""
        sys.addaudithook(self._audited)
        for name in ("stat", "lstat", "access", "readlink"):
            setattr(os, name, self._noting(getattr(os, name)))
        for name in ("getcwd", "getcwdb"):
            setattr(os, name, self._using_folder(getattr(os, name)))
        sys.argv = self._arguments_noted(sys.argv)

    def _audited(self, event: str, values: tuple[Any, ...]) -> None:
        if event == "open":
            self._note(values[0], self._files)
        elif event in ("os.listdir", "os.scandir"):
            self._note(values[0] or ".", self._listed)

    def _noting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def noting(path: Any, *args: Any, **named: Any) -> Any:
            self._note(path, self._files)
            return function(path, *args, **named)

        return noting

    def _using_folder(self, function: Callable[[], Any]) -> Callable[[], Any]:
        def noting() -> Any:
            self._folder = self._folder or not _is_own()
            return function()

        return noting

    def _arguments_noted(self, arguments: list[str]) -> list[str]:
        def noting(name: str) -> Callable[..., Any]:
            def method(values: list[str], *args: Any) -> Any:
                self._arguments = self._arguments or not _is_own()
                return getattr(list, name)(values, *args)

            return method

        names = ("__getitem__", "__iter__", "__len__", "__contains__", "__eq__", "__repr__", "__add__", "copy", "index")
        return type("Arguments", (list,), {name: noting(name) for name in names})(arguments)  # type: ignore[no-any-return]

    def _note(self, path: Any, where: set[str]) -> None:
        if isinstance(path, int) or _is_own():
            return
        text = ""
        with suppress(TypeError):
            text = os.fsdecode(path)
        if not os.path.isabs(text):  # noqa: PTH117  # without a call of getcwd
            self._folder = True
        elif not text.startswith(_NOT_NOTED) and not any(part in text for part in INSTALLED_PACKAGES):
            where.add(text)


def _is_own() -> bool:
    """Whether the observed call is one of Python's import system, or of the launcher, also through a library."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals.get("__name__") == __name__:
        frame = frame.f_back
    if str(frame.f_globals.get("__name__")).startswith(_IMPORTER):
        return True
    while frame.f_back is not None and _is_standard(frame.f_code.co_filename):
        frame = frame.f_back
    return str(frame.f_globals.get("__name__")).startswith(_OWN)


def _is_standard(file: str) -> bool:
    return file.startswith(_STANDARD_LIBRARY) and not any(part in file for part in INSTALLED_PACKAGES)
