"""The installed packages that a script imports first, imported once per node before the workers are forked.

    leading_imports     the statements to execute, from the script's source
    run                 executes them in the warm server, and records what each worker has to repeat
    remember, unfit     the packages that cannot be imported this way

A package is imported before the fork only if no worker can tell the difference: it is in IMPORTED_ONCE (env.py), or
`--preload` names it. It is unfit if its import reads a variable that differs between the workers (`RANK`), looks for a
module of the script's own folder, or leaves a trace (traces.py). The server then ends, and the launcher starts another
one, which stops before this package.
"""

import ast
import json
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec, PathFinder
from itertools import takewhile
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from ddp_kit import __version__
from ddp_kit.env import CACHE_FOLDER, IMPORTED_ONCE, INSTALLED_PACKAGES, RANK, set_environment
from ddp_kit.launcher.program import Program
from ddp_kit.launcher.warm.messages import Import
from ddp_kit.launcher.warm.traces import Traces

_UNKNOWN = "not one of the packages that are known to leave nothing behind"

# --- The statements ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ImportStatement:
    """An import of an installed package, with its line in the script."""

    package: str
    node: ast.stmt


def leading_imports(program: Program, stop_before: Collection[str] = ()) -> list[ImportStatement]:
    """The imports of installed packages that a script makes before it does anything else.

    The search ends at the first statement that is not an import, at the first import of one of the user's own modules,
    and at the packages in `stop_before`. Imports of the standard library and of ddp_kit are skipped.
    """
    try:
        body = ast.parse(program.source, program.name).body
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # Python reports the error when the script runs
        return []
    result: list[ImportStatement] = []
    for statement in body:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):  # the docstring
            continue
        if isinstance(statement, ast.Import):
            parts: list[tuple[str, ast.stmt]] = [
                (alias.name, ast.copy_location(ast.Import([alias]), statement)) for alias in statement.names
            ]
        elif isinstance(statement, ast.ImportFrom) and not statement.level and statement.module:
            parts = [(statement.module, statement)]
        else:
            return result
        for name, node in parts:
            package = name.partition(".")[0]
            if package in sys.stdlib_module_names or package == "ddp_kit":
                continue
            if package in stop_before or not is_installed(package, program):
                return result
            result.append(ImportStatement(package, node))
    return result


def statements(request: Import) -> list[ImportStatement]:
    """The import statements to execute for a request."""
    if request.packages is None:
        leading = leading_imports(request.program, request.unfit)
        return list(takewhile(lambda each: each.package in IMPORTED_ONCE, leading))
    names = [name for name in request.packages if name.partition(".")[0] not in request.unfit]
    return [ImportStatement(name.partition(".")[0], ast.parse(f"import {name}").body[0]) for name in names]


def left_out(request: Import, reasons: Mapping[str, str]) -> str:
    """The first package that `statements` leaves out, with the reason; empty if there is none.

    `reasons`: why the packages in `request.unfit` are unfit.
    """
    if request.packages is None:
        wanted = [each.package for each in leading_imports(request.program)]
        known: Collection[str] = IMPORTED_ONCE
    else:
        wanted = known = [name.partition(".")[0] for name in request.packages]
    first = next((package for package in wanted if package in request.unfit or package not in known), None)
    if first is None:
        return ""
    reason = reasons.get(first, f"{_UNKNOWN}; --preload {first} imports it once")
    return f"{first} ({reason})"


def is_installed(package: str, program: Program) -> bool:
    """Whether the script would import this package from a folder of installed packages."""
    return any(part in _origin(package, program) for part in INSTALLED_PACKAGES)


def _origin(package: str, program: Program | None) -> str:
    """The file or folder from which `package` would be imported; empty if there is none."""
    folders = sys.path
    if program is not None and not sys.flags.safe_path:
        folders = [str(program.folder), *folders]
    spec = None
    with suppress(ImportError, ValueError):
        spec = PathFinder.find_spec(package, folders)
    if spec is None:
        return ""
    return spec.origin or next(iter(spec.submodule_search_locations or ()), "")


# --- Their execution in the warm server -------------------------------------------------------------------------------

Fail = Callable[[str, str], NoReturn]
"""A function that is called with an unfit package and the reason, and ends the process."""


@dataclass(frozen=True)
class Imported:
    """Variables that the imports read, and effects of the imports that each worker has to repeat."""

    read: dict[str, str | None] = field(default_factory=dict)
    """The environment variables that they read, with their values; None: not set."""
    changed: dict[str, str | None] = field(default_factory=dict)
    """The environment variables that they set; None: deleted."""
    output: tuple[bytes, ...] = (b"", b"")
    """The content that they wrote to stdout and to stderr."""
    main: ModuleType = field(default_factory=lambda: ModuleType("__main__"))
    """The main module that they saw, in which each worker runs its script; with the warnings that they caused."""
    names: frozenset[str] = frozenset()
    """The names of all top-level modules that they looked for."""

    def variable_that_differs(self, env: Mapping[str, str]) -> str | None:
        """A variable that the imports read, and that has another value in `env`."""
        return next((name for name, value in self.read.items() if env.get(name) != value), None)

    def repeat(self) -> None:
        """Repeat in a worker what is not inherited by a fork: the variables that were set, and the output."""
        for name, value in self.changed.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        for descriptor, written in enumerate(self.output, 1):
            with suppress(OSError):
                while written:
                    written = written[os.write(descriptor, written) :]


def run(request: Import, hidden: Mapping[str, str], fail: Fail) -> Imported:
    """Execute import statements as the script would, with the environment of a worker.

    `hidden`: variables that are set only during the imports, and whose values make no difference to what is imported.
    """
    to_make = statements(request)
    if not to_make:
        return Imported()
    program = request.program
    current = ""
    read: dict[str, str | None] = {}
    changed: dict[str, str | None] = {}

    def fail_now(reason: str) -> NoReturn:
        fail(current, reason)

    def note_read(name: str, value: str | None) -> None:
        if name.startswith(request.differing):
            fail_now(f"it reads {name} when it is imported, which differs between the processes")
        if name not in hidden and name not in changed:
            read.setdefault(name, value)

    own_modules = _OwnModules(program, fail_now)
    main = ModuleType("__main__")
    traces = Traces()
    names: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
    with (
        _environment({**request.env, **hidden}, note_read, changed),
        _as_main_program(program, main, own_modules),
        _captured_output() as output,
        traces,
    ):
        for each in to_make:
            current = each.package
            try:
                exec(compile(ast.Module([each.node], []), program.name, "exec", dont_inherit=True), names)  # noqa: S102
            except BaseException as error:  # the workers will show it
                fail_now(f"its import fails ({type(error).__name__})")
            if (trace := traces.new()) is not None:
                fail_now(f"its import {trace}")
            if request.packages is None:
                for name in sorted(own_modules.found()):
                    is_known = name.lstrip("_") in IMPORTED_ONCE  # _brotli is the native code of brotli
                    if not is_known and is_installed(name, program):
                        fail_now(f"it imports {name}, {_UNKNOWN}")
        written = output()
    if "__warningregistry__" in names:
        vars(main)["__warningregistry__"] = names["__warningregistry__"]
    return Imported(read, changed, written, main, frozenset(own_modules.names))


# Modules that copy all variables when they are imported, but use only those with this prefix.
USE_ONLY = {"fsspec.config": "FSSPEC_"}


def reading_module() -> str:
    """The name of the module that accesses `os.environ`."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals["__name__"] in ("os", "collections.abc"):
        frame = frame.f_back
    return str(frame.f_globals["__name__"])


@contextmanager
def environ_of_class(kind: type["os._Environ[Any]"]) -> Iterator[None]:
    """Context manager in which `os.environ` and `os.environb` belong to this class."""
    plain = os.environ.__class__
    for environ in (os.environ, os.environb):
        environ.__class__ = kind
    try:
        yield
    finally:
        for environ in (os.environ, os.environb):
            environ.__class__ = plain


@contextmanager
def _environment(
    env: Mapping[str, str], note_read: Callable[[str, str | None], None], changed: dict[str, str | None]
) -> Iterator[None]:
    """Context manager in which the process has the environment `env`, and accesses of Python code to it are noted."""

    class Noting(os._Environ[Any]):
        def __getitem__(self, name: Any) -> Any:
            if os.fsdecode(name).startswith(USE_ONLY.get(reading_module(), "")):
                value = self._data.get(os.fsencode(name))  # type: ignore[attr-defined]
                if value is not None:
                    value = os.fsdecode(value)
                note_read(os.fsdecode(name), value)
            return super().__getitem__(name)

        def __iter__(self) -> Iterator[Any]:
            yield from super().__iter__()
            if reading_module() not in USE_ONLY:
                yield self.decodekey(RANK.encode())  # code that reads all also reads this one

        def __setitem__(self, name: Any, value: Any) -> None:
            changed[os.fsdecode(name)] = os.fsdecode(value)
            super().__setitem__(name, value)

        def __delitem__(self, name: Any) -> None:
            changed[os.fsdecode(name)] = None
            super().__delitem__(name)

    before = dict(os.environ)
    set_environment(env)
    try:
        with environ_of_class(Noting):
            yield
    finally:
        set_environment(before)


class _OwnModules:
    """A finder that finds nothing, and fails if a package looks for a module that the script's folder has."""

    def __init__(self, program: Program, fail_now: Callable[[str], NoReturn]) -> None:
        self._fail_now = fail_now
        self._own = modules_in(program.folder)
        self.names: set[str] = set()
        """The names of the top-level modules that were looked for."""

    def found(self) -> set[str]:
        """The top-level modules that were looked for and imported."""
        return self.names & sys.modules.keys()

    def find_spec(self, name: str, path: object = None, _target: object = None) -> ModuleSpec | None:
        if path is None:
            self.names.add(name)
        if path is None and name in self._own and name not in sys.modules:
            self._fail_now(f"it looks for a module {name}, which is also in the script's folder")
        return None


def modules_in(folder: Path) -> set[str]:
    """The names of the files and folders in `folder` that Python could import."""
    try:
        paths = list(folder.iterdir())
    except OSError:
        return set()
    return {path.name.removesuffix(".py") for path in paths if path.suffix == ".py" or path.is_dir()}


@contextmanager
def _as_main_program(program: Program, main: ModuleType, own_modules: _OwnModules) -> Iterator[None]:
    """Context manager in which `sys.argv` and `sys.path` are those of the script, and `main` is the main module."""
    argv = sys.argv[:]
    main_before = sys.modules["__main__"]
    path = sys.path[:]
    sys.argv[:] = program.argv
    sys.modules["__main__"] = main
    if not program.module:
        main.__file__ = str(Path.cwd() / program.name)
    if not sys.flags.safe_path:
        sys.path.insert(0, str(program.folder))
    sys.meta_path.insert(0, own_modules)
    try:
        yield
    finally:
        sys.meta_path.remove(own_modules)
        sys.argv[:] = argv
        sys.modules["__main__"] = main_before
        sys.path[:] = path


@contextmanager
def _captured_output() -> Iterator[Callable[[], tuple[bytes, ...]]]:
    """Context manager in which stdout and stderr are files in memory; the function returns what they contain."""
    kept = [os.dup(descriptor) for descriptor in (1, 2)]
    files = [os.memfd_create("output") for _ in kept]
    for descriptor, file in enumerate(files, 1):
        os.dup2(file, descriptor)
    try:
        yield lambda: tuple(os.pread(file, os.fstat(file).st_size, 0) for file in files)
    finally:
        for descriptor, (file, before) in enumerate(zip(files, kept, strict=True), 1):
            os.dup2(before, descriptor)
            os.close(before)
            os.close(file)


# --- Unfit packages ---------------------------------------------------------------------------------------------------


def unfit(env: Mapping[str, str]) -> dict[str, str]:
    """The packages that earlier launches found to be unfit, and why; without those that have changed since."""
    file = _file_of_unfit_packages(env)
    if file is None:
        return {}
    entries = _unfit_packages_in(file)
    return {package: entry["reason"] for package, entry in entries.items() if entry["version"] == _version(package)}


def remember(package: str, reason: str, env: Mapping[str, str]) -> None:
    """Remember an unfit package for later launches of this user. Failures to write are ignored."""
    file = _file_of_unfit_packages(env)
    if file is None:
        return
    entries = _unfit_packages_in(file) | {package: {"version": _version(package), "reason": reason}}
    with suppress(OSError):
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        new = file.with_name(f"{file.name}.{os.getpid()}")
        new.touch(mode=0o600)
        new.write_text(json.dumps(entries, indent=1))
        new.replace(file)


def _unfit_packages_in(file: Path) -> dict[str, dict[str, str]]:
    """The content of the file, without damaged entries."""
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    if not isinstance(content, dict):
        return {}
    fields = {"version", "reason"}
    return {package: entry for package, entry in content.items() if isinstance(entry, dict) and entry.keys() == fields}


def _file_of_unfit_packages(env: Mapping[str, str]) -> Path | None:
    """The file with the unfit packages; None for a user without a home folder."""
    cache = env.get(CACHE_FOLDER, "")
    if not cache.startswith("/"):
        try:
            cache = str(Path.home() / ".cache")
        except RuntimeError:  # no HOME, and no entry in the list of users, as in some containers
            return None
    return Path(cache, "ddpkit", "imports.json")


def _version(package: str) -> str:
    """A text that changes with the version of a package, of the interpreter that has it, or of the rules here."""
    origin = Path(_origin(package, None))
    with suppress(OSError):
        return f"{origin} {origin.stat().st_mtime_ns} {__version__}"
    return "not installed"
