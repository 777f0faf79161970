"""Names of modules, parameters and buffers, and errors about them."""

import fnmatch
from collections.abc import Iterable, Sequence

from torch import nn

from ddp_kit.errors import ConfigError, suggestion
from ddp_kit.texts import some


def full_name(module: str, name: str) -> str:
    """The name in the model of what is called `name` in a module. `module`: the module's name; "" for the model."""
    return f"{module}.{name}" if module else name


def matching(pattern: str, names: Iterable[str], model: nn.Module, setting: str, kind: str = "module") -> list[str]:
    """The names that a pattern of a setting matches. Raises `ConfigError` if there are none.

    `kind`: what the names stand for.
    """
    known = [*names]
    matches = fnmatch.filter(known, pattern)
    if not matches:
        raise ConfigError(
            f"{setting} names {pattern!r}, but the model {type(model).__name__} has no such {kind}",
            suggestion(pattern, [name for name in known if name], f"{kind}s"),
        )
    return matches


def refuse(names: Sequence[str], problem: str, hint: str) -> None:
    """Raise `ConfigError` if there are names of something that is not supported. `hint`: what to do instead."""
    if names:
        raise ConfigError(f"{problem}: {some(names)}", hint)
