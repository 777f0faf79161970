"""torch.compile for a model, which stays the same object."""

from collections import Counter

from torch import nn

from ddp_kit.errors import ConfigError


def compile_in_place(model: nn.Module, what: str) -> None:
    """torch.compile for the whole "model", or for each of its repeated "blocks"; the modules stay the same objects.

    Blocks are compiled once for all of a kind, so it takes less time, and graphs end where DDP's hooks have to run.
    """
    if what == "model":
        model.compile()
        return
    blocks = _repeated_blocks(model)
    if not blocks:
        raise ConfigError(
            f"compile='blocks', but {type(model).__name__} has no ModuleList or Sequential with several children of "
            "one kind that have children of their own",
            "use compile='model'",
        )
    for block in blocks:
        block.compile()


def _repeated_blocks(model: nn.Module) -> list[nn.Module]:
    found: list[nn.Module] = []
    for parent in model.modules():
        if isinstance(parent, nn.ModuleList | nn.Sequential):
            kinds = Counter(type(child) for child in parent)
            found.extend(child for child in parent if kinds[type(child)] > 1 and any(child.children()))
    inner = {module for block in found for module in block.modules() if module is not block}
    return [block for block in dict.fromkeys(found) if block not in inner]
