"""The repeated blocks of a model, such as the layers of a transformer: what is compiled, recomputed, sharded as one."""

from collections import Counter

from torch import nn


def repeated_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The model's repeated blocks by name, in the order in which they are registered; empty where there are none.

    A block is a child of a ModuleList or Sequential that has children of its own and is one of several of its class.
    Of blocks within blocks the outer ones count, but a ModuleList or Sequential that holds blocks is none itself.
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
    """How long a module computes, in multiplications per position of its input, as far as its weights tell.

    Each weight multiplies once, except an embedding's, which are looked up. `recurse`: with the modules inside it.
    """
    parts = module.modules() if recurse else [module]
    multiplying = (part for part in parts if not isinstance(part, nn.Embedding | nn.EmbeddingBag))
    return float(sum(each.numel() for part in multiplying for each in part.parameters(recurse=False)))
