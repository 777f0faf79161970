"""Scan a script's source before it runs: what it will import, and which variables it sets too late."""

import ast
import re
from collections.abc import Mapping
from functools import lru_cache
from itertools import takewhile
from pathlib import Path

from ddp_kit.env import ALLOCATOR, ALLOCATOR_OLDER, IMPORT_TIME_VARIABLES
from ddp_kit.launcher.warm.messages import Program

_IMPORTS_TORCH = re.compile(r"from torch\b|import (.*, )?torch\b")
_SETTING = re.compile(
    r"environ(\['\w+'\] = ('[^'\\]*'$)?| \|= .*|\.update\(.*|\.setdefault\('\w+'(, '[^'\\]*'\))?)", re.MULTILINE
)
_NAME_AND_LITERAL = re.compile(r"(\w+)(?:(?:'\] = |': |', |=)'([^'\\]*)'(?=[,)}]|$))?")  # the literal may be missing
_OPTIMIZER = re.compile(r"\boptim(izer)?\b")
# Prefixes of the variables that the modules of `later_imports` read.
_READ_LATER = ("TORCHDYNAMO_", "TORCH_DYNAMO_", "TORCHINDUCTOR_", "TORCH_COMPILE", "LOGURU_")


def later_imports(program: Program) -> tuple[str, ...]:
    """The modules besides torch that every worker will import, for an optimizer or a Trainer."""
    return _later_imports(_text(program))


def variable_set_too_late(program: Program, env: Mapping[str, str]) -> str:
    """A variable that the script changes although a preloaded module has already read it; empty: none.

    A variable that is set to the value it already has is not changed; torch's allocator has one under several names.
    `env`: the environment at its start. Only the script's own source is checked, not the modules it imports.
    """

    def changes(name: str, default: bool, literal: str) -> bool:
        value = env.get(name, env.get(ALLOCATOR) if name in ALLOCATOR_OLDER else None)
        return not (default and name in env) and (not literal or literal != value)

    return next((setting[0] for setting in _sets(_text(program)) if changes(*setting)), "")


def _text(program: Program) -> str:
    """The source of the main file; empty if it cannot be found from the module's name."""
    path = Path(program.name)
    if program.module:
        path = Path(program.name.replace(".", "/"))
        path = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _later_imports(text: str) -> tuple[str, ...]:
    if "ddp_kit" in text and "Trainer" in text:
        return ("torch._dynamo", "ddp_kit.trainer.trainer")
    return ("torch._dynamo",) if _OPTIMIZER.search(text) else ()


@lru_cache(maxsize=1)
def _sets(text: str) -> list[tuple[str, bool, str]]:
    """The import-time variables that the script sets: name, whether only as a default, string literal if it is one."""
    if "environ" not in text:
        return []
    try:
        statements = list(map(ast.unparse, ast.parse(text).body))  # in one style, without comments
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # Python shows it when the script runs
        return []
    too_late = _READ_LATER if _later_imports(text) else ()
    before_torch = len(list(takewhile(lambda statement: not _IMPORTS_TORCH.match(statement), statements)))
    return [
        (name, "setdefault" in setting[0], literal)
        for number, statement in enumerate(statements)
        for setting in _SETTING.finditer(statement)
        for name, literal in _NAME_AND_LITERAL.findall(setting[0])
        if name.startswith(too_late) or (number < before_torch and name.startswith(IMPORT_TIME_VARIABLES))
    ]
