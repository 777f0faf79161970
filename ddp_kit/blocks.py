"""The repeated blocks of a model, such as the layers of a transformer: the units of compilation and sharding."""

from collections import Counter

from torch import nn


def repeated_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Name -> module of the model's repeated blocks, in registration order; empty if there are none.

    A block is a child of a ModuleList or Sequential, has children of its own, and has siblings of the same class. Of
    nested blocks only the outermost count, except that a ModuleList or Sequential that contains blocks is not a block.
    """
    found: dict[str, nn.Module] = {}
    for prefix, parent in model.named_modules():
        if isinstance(parent, nn.ModuleList | nn.Sequential):
            kinds = Counter(type(child) for child in parent)
            for number, child in parent.named_children():
                if kinds[type(child)] > 1 and any(child.children()):
                    found[f"{prefix}.{number}" if prefix else number] = child
    blocks = {
        name: block
        for name, block in found.items()
        if not (isinstance(block, nn.ModuleList | nn.Sequential) and _has_below(name, found))
    }
    return {name: block for name, block in blocks.items() if not any(name.startswith(f"{other}.") for other in blocks)}


def _has_below(name: str, found: dict[str, nn.Module]) -> bool:
    return any(other.startswith(f"{name}.") for other in found)


def work_of(module: nn.Module, *, recurse: bool = True) -> float:
    """An estimate of a module's computation: multiplications per position of its input.

    Each weight counts as one multiplication, except those of embeddings, which are lookups. `recurse`: include
    submodules.
    """
    parts = module.modules() if recurse else [module]
    multiplying = (part for part in parts if not isinstance(part, nn.Embedding | nn.EmbeddingBag))
    return float(sum(each.numel() for part in multiplying for each in part.parameters(recurse=False)))
