"""In-place compilation of a model with torch.compile."""

from collections.abc import Iterable

from torch import nn

from ddp_kit.model.blocks import required_blocks
from ddp_kit.torch_internals import compile_like, compile_module, compiled_module


def compile_in_place(model: nn.Module, what: str) -> None:
    """Compile a model (`what="model"`) or each of its repeated blocks (`what="blocks"`), without replacing modules.

    With "blocks", blocks of the same class share compiled code, which shortens compilation. No compiled graph spans
    several blocks, so DDP's hooks can run between blocks. Raises `ConfigError` if there are no repeated blocks.
    """
    modules: Iterable[nn.Module] = [model]
    if what == "blocks":
        modules = required_blocks(model, "compile='blocks'", "use compile='model'").values()
    elif isinstance(model, nn.ModuleDict | nn.ModuleList):  # has no forward of its own
        modules = model.children()
    for module in modules:
        compile_module(module)


def without_wrappers(model: nn.Module, *, compiled: bool = True) -> nn.Module:
    """Remove the wrappers that `torch.compile` has put around a model or its submodules, and return the plain model.

    The names of weights then no longer contain "_orig_mod". The modules inside the wrappers are compiled in place with
    the wrappers' settings, unless `compiled` is False. A model without wrappers is returned unchanged.
    """
    for name, module in reversed([*model.named_modules(remove_duplicate=False)]):
        plain = compiled_module(module)
        if plain is None:
            continue
        if compiled:
            compile_like(module, plain)
        if not name:
            return plain
        parent, _, child_name = name.rpartition(".")
        setattr(model.get_submodule(parent), child_name, plain)
    return model
