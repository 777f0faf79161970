"""The repeated blocks of a model, such as the layers of a transformer."""

from collections import Counter

from torch import nn


def repeated_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The outermost children of one kind in a ModuleList or Sequential that have children of their own, by name."""
    found: dict[nn.Module, str] = {}
    for prefix, parent in model.named_modules():
        if isinstance(parent, nn.ModuleList | nn.Sequential):
            kinds = Counter(type(child) for child in parent)
            for name, child in parent.named_children():
                if kinds[type(child)] > 1 and any(child.children()):
                    found.setdefault(child, f"{prefix}.{name}" if prefix else name)
    inner = {module for block in found for module in block.modules() if module is not block}
    return {name: block for block, name in found.items() if block not in inner}
