"""torch.compile for a model, which stays the same object."""

from torch import nn

from ddp_kit.blocks import repeated_blocks
from ddp_kit.errors import ConfigError


def compile_in_place(model: nn.Module, what: str) -> None:
    """torch.compile for the whole "model", or for each of its repeated "blocks"; the modules stay the same objects.

    Blocks are compiled once for all of a kind, so it takes less time, and graphs end where DDP's hooks have to run.
    """
    if what == "model":
        whole = [*model.children()] if isinstance(model, nn.ModuleDict | nn.ModuleList) else [model]  # has no forward
        for each in whole:
            each.compile()
        return
    blocks = repeated_blocks(model)
    if not blocks:
        raise ConfigError(
            f"compile='blocks' needs repeated blocks, but {type(model).__name__} has no ModuleList or Sequential with "
            "several children of one class that have submodules",
            "use compile='model'",
        )
    for block in blocks.values():
        block.compile()
