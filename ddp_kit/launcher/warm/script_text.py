"""Scan a script's source before it runs: what it will import, and which variables it sets too late."""

import ast
import re
from collections.abc import Mapping
from functools import lru_cache
from itertools import takewhile
from pathlib import Path

from ddp_kit.env import IMPORT_TIME_VARIABLES
from ddp_kit.launcher.warm.messages import Program

_IMPORTS_TORCH = re.compile(r"from torch\b|import (.*, )?torch\b")
_SETTING = re.compile(r"environ(\['\w+'\] = | \|= .*|\.update\(.*|\.setdefault\('\w+')")
_OPTIMIZER = re.compile(r"\boptim(izer)?\b")
# Prefixes of the variables that the modules of `later_imports` read.
_READ_LATER = ("TORCHDYNAMO_", "TORCH_DYNAMO_", "TORCHINDUCTOR_", "TORCH_COMPILE", "LOGURU_")


def later_imports(program: Program) -> tuple[str, ...]:
    """The modules besides torch that every worker will import, for an optimizer or a Trainer."""
    return _later_imports(_text(program))


def variable_set_too_late(program: Program, env: Mapping[str, str]) -> str:
    """A variable that the script sets although a preloaded module has already read it; empty: none.

    `env`: the environment at its start. Only the script's own source is checked, not the modules it imports.
    """
    return next((name for name, default in _sets(_text(program)) if not (default and name in env)), "")


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
def _sets(text: str) -> list[tuple[str, bool]]:
    """The import-time variables that the script sets, each with whether it only sets a default."""
    if "environ" not in text:
        return []
    try:
        statements = list(map(ast.unparse, ast.parse(text).body))  # in one style, without comments
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # Python shows it when the script runs
        return []
    too_late = _READ_LATER if _later_imports(text) else ()
    before_torch = len(list(takewhile(lambda statement: not _IMPORTS_TORCH.match(statement), statements)))
    return [
        (name, "setdefault" in setting[0])
        for number, statement in enumerate(statements)
        for setting in _SETTING.finditer(statement)
        for name in re.findall(r"\w+", setting[0])
        if name.startswith(too_late) or (number < before_torch and name.startswith(IMPORT_TIME_VARIABLES))
    ]
