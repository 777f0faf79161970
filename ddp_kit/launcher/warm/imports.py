"""The installed packages that a script imports first, imported once per node before the workers are forked.

    leading_imports     the statements to execute, from the script's source
    run                 executes them in the warm server, and records what each worker has to repeat
    remember, unfit     the packages that cannot be imported this way

A package is imported before the fork only if no worker can tell the difference. It is unfit if its import reads a
variable that differs between the workers (`RANK`), looks for a module of the script's own folder, or leaves a thread, a
process, an open file, an initialised GPU, or changed signal handlers behind. The server then ends, and the launcher
starts another one, which stops before this package.
"""

import ast
import json
import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from ddp_kit.env import CACHE_FOLDER, INSTALLED_PACKAGES, RANK, set_environment
from ddp_kit.launcher.program import Program
from ddp_kit.launcher.warm.cleanup import has_children
from ddp_kit.launcher.warm.messages import Import

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
        return leading_imports(request.program, request.unfit)
    names = [name for name in request.packages if name.partition(".")[0] not in request.unfit]
    return [ImportStatement(name.partition(".")[0], ast.parse(f"import {name}").body[0]) for name in names]


def is_installed(package: str, program: Program) -> bool:
    """Whether the script would import this package from a folder of installed packages."""
    return any(part in _origin(package, program) for part in INSTALLED_PACKAGES)


def _origin(package: str, program: Program | None) -> str:
    """The file or folder from which `package` would be imported; empty if there is none."""
    folders = sys.path if program is None or sys.flags.safe_path else [str(program.folder), *sys.path]
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
    """What the imports read, and what they did that each worker has to repeat."""

    read: dict[str, str | None] = field(default_factory=dict)
    """The environment variables that they read, with their values; None: not set."""
    changed: dict[str, str | None] = field(default_factory=dict)
    """The environment variables that they set; None: deleted."""
    output: tuple[bytes, bytes] = (b"", b"")
    """What they wrote to stdout and stderr."""
    warnings: dict[Any, Any] = field(default_factory=dict)
    """The registry of the warnings that the import statements have caused."""
    names: frozenset[str] = frozenset()
    """The names of all top-level modules that they looked for."""

    def variable_that_differs(self, env: Mapping[str, str]) -> str | None:
        """A variable that the imports read, and that has another value in `env`."""
        return next((name for name, value in self.read.items() if env.get(name) != value), None)

    def repeat(self) -> None:
        """Repeat in a worker what is not inherited by a fork: the variables that were set, and the output."""
        for name, value in self.changed.items():
            if value is not None:
                os.environ[name] = value
            else:
                os.environ.pop(name, None)
        for descriptor, written in enumerate(self.output, 1):
            with suppress(OSError):
                while written:
                    written = written[os.write(descriptor, written) :]


def run(request: Import, hidden: Mapping[str, str], fail: Fail) -> Imported:
    """Execute import statements as the script would, with the environment of a worker.

    `hidden`: variables that are set only during the imports, and whose values make no difference to what is imported.
    """
    program, current = request.program, ""
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
    names: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
    with (
        _environment({**request.env, **hidden}, note_read, changed),
        _place_of(program, own_modules),
        _captured_output() as output,
    ):
        before = _traces()
        for each in statements(request):
            current = each.package
            try:
                exec(compile(ast.Module([each.node], []), program.name, "exec", dont_inherit=True), names)  # noqa: S102
            except BaseException as error:  # the workers will show it
                fail_now(f"its import fails ({type(error).__name__})")
            if (trace := _new_trace(before, _traces())) is not None:
                fail_now(f"its import {trace}")
        written = output()
    return Imported(read, changed, written, names.get("__warningregistry__", {}), frozenset(own_modules.names))


# Modules that copy all variables when they are imported, but use only those with this prefix.
_USE_ONLY = {"fsspec.config": "FSSPEC_"}


class _Environ(os._Environ[str]):
    """The class of `os.environ` during the imports: reports each variable that Python code reads or sets."""

    def __getitem__(self, name: str) -> str:
        if not name.startswith(_USE_ONLY.get(_caller(), "")):
            return super().__getitem__(name)
        value = self._data.get(self.encodekey(name))  # type: ignore[attr-defined]
        self.note_read(name, None if value is None else self.decodevalue(value))  # type: ignore[attr-defined]
        return super().__getitem__(name)

    def __iter__(self) -> Iterator[str]:
        yield from super().__iter__()
        if _caller() not in _USE_ONLY:
            yield RANK  # code that reads all variables also reads this one

    def __setitem__(self, name: str, value: str) -> None:
        self.changed[name] = value  # type: ignore[attr-defined]
        super().__setitem__(name, value)

    def __delitem__(self, name: str) -> None:
        self.changed[name] = None  # type: ignore[attr-defined]
        super().__delitem__(name)


def _caller() -> str:
    """The name of the module that accesses `os.environ`."""
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_globals["__name__"] in ("os", "collections.abc"):
        frame = frame.f_back
    return str(frame.f_globals["__name__"])


@contextmanager
def _environment(
    env: Mapping[str, str], note_read: Callable[[str, str | None], None], changed: dict[str, str | None]
) -> Iterator[None]:
    """Context manager in which the process has the environment `env`, and accesses to it are noted."""
    before = dict(os.environ)
    set_environment(env)
    plain = os.environ.__class__
    recorded = {"note_read": note_read, "changed": changed}
    vars(os.environ).update(recorded)
    os.environ.__class__ = _Environ
    try:
        yield
    finally:
        os.environ.__class__ = plain
        for name in recorded:
            del vars(os.environ)[name]
        set_environment(before)


class _OwnModules:
    """A finder that finds nothing, and fails if a package looks for a module that the script's folder has."""

    def __init__(self, program: Program, fail_now: Callable[[str], NoReturn]) -> None:
        self._fail_now = fail_now
        self._own = modules_in(program.folder)
        self.names: set[str] = set()
        """The names of the top-level modules that were looked for."""

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
def _place_of(program: Program, own_modules: _OwnModules) -> Iterator[None]:
    """Context manager in which `sys.argv`, `sys.path` and the main module are those of the script."""
    argv, main, path = sys.argv[:], sys.modules["__main__"], sys.path[:]
    sys.argv[:] = ["-m" if program.module else program.name, *program.arguments]
    sys.modules["__main__"] = ModuleType("__main__")
    if not program.module:
        sys.modules["__main__"].__file__ = str(Path.cwd() / program.name)
    if not sys.flags.safe_path:
        sys.path.insert(0, str(program.folder))
    sys.meta_path.insert(0, own_modules)
    try:
        yield
    finally:
        sys.meta_path.remove(own_modules)
        sys.argv[:], sys.modules["__main__"], sys.path[:] = argv, main, path


@contextmanager
def _captured_output() -> Iterator[Callable[[], tuple[bytes, bytes]]]:
    """Context manager in which stdout and stderr are files in memory; the function returns what they contain."""
    kept = [os.dup(descriptor) for descriptor in (1, 2)]
    files = [os.memfd_create("output") for _ in kept]
    for descriptor, file in enumerate(files, 1):
        os.dup2(file, descriptor)
    try:
        yield lambda: (_content(files[0]), _content(files[1]))
    finally:
        for descriptor, (file, before) in enumerate(zip(files, kept, strict=True), 1):
            os.dup2(before, descriptor)
            os.close(before)
            os.close(file)


def _content(file: int) -> bytes:
    return os.pread(file, os.fstat(file).st_size, 0)


# --- What an import leaves behind -------------------------------------------------------------------------------------


def _traces() -> dict[str, Any]:
    """What an import may leave behind in the process, and what a fork would share or lose."""
    status = Path("/proc/self/status").read_text()
    return {
        "opens a GPU": has_opened_a_gpu(),
        "leaves a thread running": has_started_a_thread(),
        "leaves a process running": has_children(),
        "leaves a file or connection open": _descriptors(),
        "changes the handling of signals": [
            line for line in status.splitlines() if line.startswith(("SigBlk", "SigIgn", "SigCgt"))
        ],
        "changes sys.path": tuple(sys.path),
        "changes the working directory": os.getcwd(),  # noqa: PTH109
    }


def _new_trace(before: Mapping[str, Any], after: Mapping[str, Any]) -> str | None:
    return next((what for what, value in after.items() if value != before[what]), None)


def has_opened_a_gpu() -> bool:
    """Whether this process has initialised CUDA, which its forks could not use then, or NVML, which starts a thread."""
    return sys.modules["torch"].cuda.is_initialized() or any(" /dev/nvidia" in each for each in _descriptors())


def has_started_a_thread() -> bool:
    """Whether this process has threads that its forks would lack."""
    names = []
    for path in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # the thread has just ended
            names.append(Path(path, "comm").read_text().strip())
    return len([name for name in names if name != _JEMALLOC]) > 1


# The thread of pyarrow's allocator: jemalloc prepares itself for forks, and works without this thread in them.
_JEMALLOC = "jemalloc_bg_thd"


def _descriptors() -> set[str]:
    """The open descriptors, each with its file."""
    result = set()
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        with suppress(OSError):  # the descriptor of the listing itself
            result.add(f"{name} {os.readlink(f'/proc/self/fd/{name}')}")  # noqa: PTH115
    return result


# --- Unfit packages ---------------------------------------------------------------------------------------------------


def unfit(env: Mapping[str, str]) -> dict[str, str]:
    """The packages that earlier launches found to be unfit, and why; without those that have changed since."""
    file = _file(env)
    entries = {} if file is None else _entries(file)
    return {package: entry["reason"] for package, entry in entries.items() if entry["version"] == _version(package)}


def remember(package: str, reason: str, env: Mapping[str, str]) -> None:
    """Remember an unfit package for later launches of this user. Failures to write are ignored."""
    file = _file(env)
    if file is None:
        return
    entries = _entries(file) | {package: {"version": _version(package), "reason": reason}}
    with suppress(OSError):
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        new = file.with_name(f"{file.name}.{os.getpid()}")
        new.touch(mode=0o600)
        new.write_text(json.dumps(entries, indent=1))
        new.replace(file)


def _entries(file: Path) -> dict[str, dict[str, str]]:
    """The content of the file, without damaged entries."""
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    entries = content.items() if isinstance(content, dict) else ()
    fields = {"version", "reason"}
    return {package: entry for package, entry in entries if isinstance(entry, dict) and entry.keys() == fields}


def _file(env: Mapping[str, str]) -> Path | None:
    """The file with the unfit packages; None for a user without a home folder."""
    cache = env.get(CACHE_FOLDER, "")
    if not cache.startswith("/"):
        try:
            cache = str(Path.home() / ".cache")
        except RuntimeError:  # no HOME, and no entry in the list of users, as in some containers
            return None
    return Path(cache, "ddpkit", "imports.json")


def _version(package: str) -> str:
    """A text that changes when another version of a package is installed, or the package of another interpreter."""
    origin = Path(_origin(package, None))
    with suppress(OSError):
        return f"{origin} {origin.stat().st_mtime_ns}"
    return "not installed"
