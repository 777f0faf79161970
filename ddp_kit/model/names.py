"""Names of modules, parameters and buffers, and errors about them."""

import fnmatch
from collections.abc import Iterable, Iterator, Sequence

from torch import nn

from ddp_kit.errors import ConfigError, suggestion
from ddp_kit.texts import some


def full_name(module: str, name: str) -> str:
    """The name in the model of what is called `name` in a module. `module`: the module's name; "" for the model."""
    return f"{module}.{name}" if module else name


def parents(name: str) -> Iterator[str]:
    """The names of the modules that contain what has this name, from the outside in, without the model."""
    return (name[:end] for end, character in enumerate(name) if character == ".")


def matching(pattern: str, names: Iterable[str], model: nn.Module, setting: str, kind: str = "module") -> list[str]:
    """The names that a pattern of a setting matches. Raises `ConfigError` if there are none.

    `kind`: what the names stand for.
    """
    matches = fnmatch.filter(names, pattern)
    if not matches:
        raise unknown_name(pattern, names, model, setting, kind)
    return matches


def unknown_name(name: str, names: Iterable[str], model: nn.Module, setting: str, kind: str = "module") -> ConfigError:
    """The error for a name in a setting that is not among the `names` in the model."""
    return ConfigError(
        f"{setting} names {name!r}, but the model {type(model).__name__} has no such {kind}",
        suggestion(name, [known for known in names if known], f"{kind}s"),
    )


def trained_embeddings(model: nn.Module) -> dict[str, nn.Embedding | nn.EmbeddingBag]:
    """The embeddings whose weights are trained, by name."""
    return {
        name or "the model": layer
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.weight.requires_grad
    }


def refuse(names: Sequence[str], problem: str, hint: str) -> None:
    """Raise `ConfigError` if there are names of something that is not supported. `hint`: what to do instead."""
    if names:
        raise ConfigError(f"{problem}: {some(names)}", hint)
