"""Decide whether a program can run in a fork of the warm server, by a scan of its source.

The scan finds the modules that the script will import, and the variables that it sets too late. It follows the user's
own modules in the order in which Python imports them, up to the first import of torch. It does not follow installed
packages.
"""

import ast
import os
import re
import sys
from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import resolve_name
from itertools import accumulate
from pathlib import Path

from ddp_kit.env import ALLOCATOR, ALLOCATOR_OLDER, IMPORT_TIME_VARIABLES, INSTALLED_PACKAGES
from ddp_kit.launcher.program import Program

_SETTING = re.compile(
    r"environ(\['\w+'\] = ('[^'\\]*'$)?| \|= .*|\.update\(.*|\.setdefault\('\w+'(, '[^'\\]*'\))?)", re.MULTILINE
)
_NAME_AND_LITERAL = re.compile(r"(\w+)(?:(?:'\] = |': |', |=)'([^'\\]*)'(?=[,)}]|$))?")  # the literal may be missing
_OPTIMIZER = re.compile(r"\boptim(izer)?\b")
# Prefixes of the variables that the modules of `later_imports` read.
_READ_LATER = ("TORCHDYNAMO_", "TORCH_DYNAMO_", "TORCHINDUCTOR_", "TORCH_COMPILE", "LOGURU_")
_NOT_USERS = (os.path.dirname(os.__file__), *INSTALLED_PACKAGES)  # noqa: PTH120
_RUNS_LATER = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


@dataclass(frozen=True)
class _Setting:
    """A statement that sets an environment variable which modules read when they are imported."""

    file: str
    name: str
    is_default: bool
    """Whether the statement uses `setdefault`."""
    literal: str
    """The value, if it is a literal; else empty."""

    def changes(self, env: Mapping[str, str]) -> bool:
        """Whether the statement may change the variable in this environment."""
        value = env.get(self.name)
        if value is None and self.name in ALLOCATOR_OLDER:
            value = env.get(ALLOCATOR)
        return not (self.is_default and self.name in env) and (not self.literal or self.literal != value)


class _Scan:
    """Scan of a program and of the modules that it imports from its own folder or from PYTHONPATH."""

    def __init__(self, program: Program) -> None:
        folder = program.folder
        user_paths = [path for path in sys.path if path and not any(part in path for part in _NOT_USERS)]
        self._folders = list(dict.fromkeys([folder, *map(Path, user_paths)]))
        self._seen = {"ddp_kit"}
        self.settings: list[_Setting] = []
        with suppress(RecursionError, MemoryError):  # deeply nested code or imports: keep what has been found
            self._scan(program)

    def _scan(self, program: Program) -> None:
        if not program.module:
            self._scan_file(Path(program.name), "", is_main=True)
        else:
            main = f"{program.name}.__main__"
            if self._file(main) is None:
                main = program.name
            package = main.rpartition(".")[0]
            path = self._file(main)
            if path is not None and not self._imports_torch(package):
                self._scan_file(path, package, is_main=True)

    def _file(self, module: str) -> Path | None:
        """The file of one of the user's own modules; None for any other module."""
        for folder in self._folders:
            path = folder.joinpath(*module.split("."))
            for file in (path / "__init__.py", path.with_name(f"{path.name}.py")):
                if file.is_file():
                    return file
        return None

    def _imports_torch(self, module: str) -> bool:
        """Scan a module and the packages that contain it. Return whether torch is imported at the end of that."""
        if module.partition(".")[0] == "torch":
            return True
        for name in accumulate(module.split("."), "{}.{}".format):
            if not name or name in self._seen:
                continue
            self._seen.add(name)
            file = self._file(name)
            if file is None:
                continue
            package = name if file.name == "__init__.py" else name.rpartition(".")[0]
            if self._scan_file(file, package):
                return True
        return False

    def _scan_file(self, path: Path, package: str, is_main: bool = False) -> bool:
        """Collect the settings in a file up to the first import of torch. Return whether the file imports torch.

        In the main file, settings of variables that later imports read are also collected after that.
        """
        try:
            text = path.read_text(errors="replace")
            statements = ast.parse(text).body
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
            return False  # Python reports the error when the script runs
        lines = text.splitlines()
        read_later = _READ_LATER if is_main and _later_imports(text) else ()
        prefixes = (*read_later, *IMPORT_TIME_VARIABLES)
        has_torch = False
        for statement in statements:
            if any("environ" in line for line in lines[statement.lineno - 1 : statement.end_lineno]):
                self._add_settings(path, ast.unparse(statement), prefixes)  # in one style, without comments
            if has_torch:
                continue
            modules = map(self._imports_torch, _modules(statement, package))
            if not isinstance(statement, ast.Import | ast.ImportFrom):
                deque(modules, maxlen=0)  # a condition may skip the import of torch
            elif any(modules):
                if not read_later:
                    return True
                has_torch = True
                prefixes = read_later
        return has_torch

    def _add_settings(self, path: Path, statement: str, prefixes: tuple[str, ...]) -> None:
        file = str(path) if path.name == "__init__.py" else path.name
        for setting in _SETTING.finditer(statement):
            for name, literal in _NAME_AND_LITERAL.findall(setting[0]):
                if name.startswith(prefixes):
                    self.settings.append(_Setting(file, name, "setdefault" in setting[0], literal))


def _modules(statement: ast.stmt, package: str) -> Iterator[str]:
    """The modules that a statement imports when it runs; for `from a import b`, also `a.b`, which may be a module."""
    waiting: list[ast.AST] = [statement]
    while waiting:
        node = waiting.pop(0)
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            with suppress(ImportError):  # from above the package; Python reports the error when the script runs
                base = resolve_name("." * node.level + (node.module or ""), package)
                yield from (base, *(f"{base}.{alias.name}" for alias in node.names))
        elif not isinstance(node, _RUNS_LATER) and not (
            isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING")
        ):
            waiting += ast.iter_child_nodes(node)


def later_imports(program: Program) -> tuple[str, ...]:
    """The modules, in addition to torch, that a program will import because it uses an optimizer or a Trainer."""
    return _later_imports(program.source)


def variable_set_too_late(program: Program, env: Mapping[str, str]) -> _Setting | None:
    """The first statement that changes an environment variable after a preloaded module has read it, or None.

    Setting a variable to its current value does not count as a change. The variable for torch's allocator has
    older names, which count as the same variable. `env`: the script's initial environment.
    """
    return next((setting for setting in _settings(program, program.source) if setting.changes(env)), None)


@lru_cache(maxsize=1)
def _settings(program: Program, _text: str) -> list[_Setting]:
    return _Scan(program).settings


def _later_imports(text: str) -> tuple[str, ...]:
    if "ddp_kit" in text and "Trainer" in text:
        return ("torch._dynamo", "ddp_kit.trainer.trainer")
    return ("torch._dynamo",) if _OPTIMIZER.search(text) else ()


def reason_for_cold_start(program: Program, env: Mapping[str, str], preloaded: frozenset[str]) -> str:
    """Why this program needs a new interpreter, or an empty string if it can run in a fork of the warm server.

    `env`: the program's environment. `preloaded`: the top-level modules that the warm server has imported.
    """
    if not program.module and (not program.name.endswith(".py") or not Path(program.name).is_file()):
        return f"{program.name} is not a .py file"
    setting = variable_set_too_late(program, env)
    if setting is not None:
        return f"{setting.file} sets {setting.name}, which torch reads when it is imported"
    folder = program.folder
    if sys.flags.safe_path:
        return ""
    try:
        entries = list(folder.iterdir())
    except OSError as error:
        return f"{folder} cannot be listed ({error.strerror})"
    for path in entries:
        name = path.name.removesuffix(".py")
        if name in preloaded and (path.suffix == ".py" or (path / "__init__.py").exists()):
            origin = getattr(sys.modules[name], "__file__", None) or ""
            if Path(origin) not in (path, path / "__init__.py"):
                return f"{path.name} in {folder} has the name of a module that torch imports"
    return ""
