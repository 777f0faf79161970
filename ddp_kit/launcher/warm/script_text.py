"""What a script's text tells of it before it runs."""

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
        statements = list(map(ast.unparse, ast.parse(text).body))  # in one style, without comments
    except (SyntaxError, ValueError, RecursionError, MemoryError):  # Python will show it
        return []
    too_late = _READ_LATER if _imported_later(text) else ()
    before_torch = len(list(takewhile(lambda statement: not _IMPORTS_TORCH.match(statement), statements)))
    return [
        (name, "setdefault" in setting[0])
        for number, statement in enumerate(statements)
        for setting in _SETTING.finditer(statement)
        for name in re.findall(r"\w+", setting[0])
        if name.startswith(too_late) or (number < before_torch and name.startswith(IMPORT_TIME_VARIABLES))
    ]
