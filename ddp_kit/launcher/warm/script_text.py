"""What a script's text tells of it before it runs."""

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path

from ddp_kit.env import IMPORT_TIME_VARIABLES
from ddp_kit.launcher.warm.messages import Program

_OPTIMIZER = re.compile(r"\boptim(izer)?\b")
# By what `imported_later` names.
_READ_LATER = ("TORCHDYNAMO_", "TORCH_DYNAMO_", "TORCHINDUCTOR_", "TORCH_COMPILE", "LOGURU_")


def imported_later(program: Program) -> tuple[str, ...]:
    """What `import torch` leaves out and the script imports in every worker: with its first optimizer, or a Trainer."""
    return _imported_later(_text(program))


def set_too_late(program: Program, env: Mapping[str, str]) -> str:
    """The variable that the script, which begins with `env`, sets for an import that is done by then; empty for none.

    Only what its own text says: a module that it imports may do so unseen.
    """
    return next((name for name, default in _sets(_text(program)) if not (default and name in env)), "")


def _text(program: Program) -> str:
    """Of its main file; empty where that is not found by the module's name alone."""
    path = Path(program.name)
    if program.module:
        path = Path(program.name.replace(".", "/"))
        path = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _imported_later(text: str) -> tuple[str, ...]:
    if "ddp_kit" in text and "Trainer" in text:
        return ("torch._dynamo", "ddp_kit.trainer.trainer")
    return ("torch._dynamo",) if _OPTIMIZER.search(text) else ()


@lru_cache(maxsize=1)
def _sets(text: str) -> list[tuple[str, bool]]:
    """Each variable that an import reads, and whether it is only set where it is not set yet."""
    if "environ" not in text:
        return []
    try:
        tree = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # Python will show it
        return []
    torch_line = min((node.lineno for node in tree.body if _imports_torch(node)), default=sys.maxsize)
    early = _READ_LATER if _imported_later(text) else ()
    return [
        (name, default)
        for node in ast.walk(tree)
        for name, default in _set_by(node)
        if name.startswith(early) or (name.startswith(IMPORT_TIME_VARIABLES) and node.lineno < torch_line)  # type: ignore[attr-defined]
    ]


def _imports_torch(node: ast.stmt) -> bool:
    names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
    names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
    return any(name.partition(".")[0] == "torch" for name in names)


def _set_by(node: ast.AST) -> Iterator[tuple[str, bool]]:
    """os.environ[name] = ..., |= {name: ...}, .update({name: ...}), .update(name=...), .setdefault(name, ...)"""
    if isinstance(node, ast.Assign):
        for target in node.targets:
            if isinstance(target, ast.Subscript) and _is_environ(target.value):
                yield from _texts([target.slice], False)
    elif isinstance(node, ast.AugAssign) and _is_environ(node.target) and isinstance(node.value, ast.Dict):
        yield from _texts(node.value.keys, False)
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and _is_environ(node.func.value):
        if node.func.attr == "setdefault":
            yield from _texts(node.args[:1], True)
        elif node.func.attr == "update":
            yield from ((each.arg, False) for each in node.keywords if each.arg)
            for each in node.args:
                yield from _texts(each.keys if isinstance(each, ast.Dict) else [], False)


def _is_environ(node: ast.expr) -> bool:
    return ast.unparse(node) in ("os.environ", "environ")


def _texts(nodes: "list[ast.expr] | list[ast.expr | None]", default: bool) -> Iterator[tuple[str, bool]]:
    for node in nodes:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value, default
