"""The repeated blocks of a model, and how a chain of them is divided into stages."""

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import accumulate
from math import inf

from torch import nn

from ddp_kit.errors import ConfigError
from ddp_kit.model.names import full_name, parents
from ddp_kit.texts import size_text

# --- Repeated blocks --------------------------------------------------------------------------------------------------


def repeated_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Name -> module of the model's repeated blocks, in registration order; empty if there are none.

    A block is a child of a ModuleList or Sequential, has children of its own, and has siblings of the same class. If
    blocks are nested, only the outermost ones count; a ModuleList or Sequential that contains blocks is not a block.
    """
    repeated: dict[str, nn.Module] = {}
    for prefix, parent in model.named_modules():
        if isinstance(parent, nn.ModuleList | nn.Sequential):
            kinds = Counter(type(child) for child in parent)
            for number, child in parent.named_children():
                if kinds[type(child)] > 1 and any(child.children()):
                    repeated[full_name(prefix, number)] = child
    with_inner_blocks = {outer for name in repeated for outer in parents(name)}
    blocks: dict[str, nn.Module] = {}
    for name, block in repeated.items():  # from the outside in
        is_list = isinstance(block, nn.ModuleList | nn.Sequential)
        contains_blocks = is_list and name in with_inner_blocks
        if not contains_blocks and blocks.keys().isdisjoint(parents(name)):
            blocks[name] = block
    return blocks


def required_blocks(model: nn.Module, setting: str, hint: str) -> dict[str, nn.Module]:
    """The repeated blocks. Raises `ConfigError` if there are none. `setting`: the setting that needs them."""
    blocks = repeated_blocks(model)
    if not blocks:
        raise ConfigError(
            f"{setting} needs repeated blocks, but {type(model).__name__} has no ModuleList or Sequential with several "
            "children of one class that have submodules",
            hint,
        )
    return blocks


def work_of(module: nn.Module, *, recurse: bool = True) -> float:
    """An estimate of a module's computation: the number of multiplications per position (token) of the input.

    Each weight counts as one multiplication, except the weights of embeddings, which are only looked up. `recurse`:
    whether submodules are included.
    """
    modules = module.modules() if recurse else [module]
    multiplying = (layer for layer in modules if not isinstance(layer, nn.Embedding | nn.EmbeddingBag))
    return float(sum(weight.numel() for layer in multiplying for weight in layer.parameters(recurse=False)))


# --- Split of a chain of blocks ---------------------------------------------------------------------------------------
# Divides blocks into consecutive stages, one per device, with an exact algorithm.


def split_chain(costs: Sequence[float], sizes: Sequence[float], capacities: Sequence[float]) -> tuple[range, ...]:
    """Divide a chain of blocks into consecutive stages, one per device, so that the largest stage cost is minimal.

    `costs`: the cost of each block, not negative, in any unit. `sizes`: bytes of each block. `capacities`: bytes that
    each device can hold, in the order of the stages; `math.inf` for no limit. Ties are broken by the smallest sum of
    squared stage costs. Returns the blocks of each stage; no stage is empty.
    Uses dynamic programming over stages and blocks, in O(n^2 k) time for n blocks and k devices.
    Raises `ConfigError` if there are fewer blocks than devices, or if no split fits.
    """
    if not 0 < len(capacities) <= len(costs):
        raise ConfigError(
            f"{len(costs)} blocks cannot be divided among {len(capacities)} devices",
            f"use at least 1 and at most {len(costs)} devices",
        )
    cost_to = [0.0, *accumulate(costs)]
    size_to = [0.0, *accumulate(sizes)]

    def stage_cost(stage: int, begin: int, end: int) -> float:
        if size_to[end] - size_to[begin] > capacities[stage]:
            return inf
        return cost_to[end] - cost_to[begin]

    largest, _ = _best_division(len(costs), len(capacities), stage_cost, max)
    if largest == inf:
        raise ConfigError(
            f"the model needs {size_text(sum(sizes), 2)} in {len(sizes)} blocks, and the largest block needs "
            f"{size_text(max(sizes), 2)}: no split into consecutive stages fits on devices with "
            f"{', '.join(size_text(capacity, 2) for capacity in capacities)}",
            "use more devices or a smaller model",
        )

    def squared(stage: int, begin: int, end: int) -> float:
        cost = stage_cost(stage, begin, end)
        return cost * cost if cost <= largest else inf

    _, ends = _best_division(len(costs), len(capacities), squared, lambda before, cost: before + cost)
    return tuple(range(begin, end) for begin, end in zip((0, *ends), ends, strict=False))


def _best_division(
    blocks: int, stages: int, cost: Callable[[int, int, int], float], combine: Callable[[float, float], float]
) -> tuple[float, list[int]]:
    """Find the division with the smallest combined cost; returns this cost, and the end of each stage.

    `cost`: a function that returns the cost of a stage from the index, begin and end of the stage. `combine`: a
    function that combines the cost of the earlier stages with the cost of the next stage.
    """
    best = [cost(0, 0, end) if end else inf for end in range(blocks + 1)]
    begins: list[list[int]] = [[0] * (blocks + 1)]
    for stage in range(1, stages):
        next_best = [inf] * (blocks + 1)
        begin_of = [0] * (blocks + 1)
        for end in range(stage + 1, blocks + 1):
            for begin in range(stage, end):
                if best[begin] == inf:
                    continue
                value = combine(best[begin], cost(stage, begin, end))
                if value < next_best[end]:
                    next_best[end] = value
                    begin_of[end] = begin
        best = next_best
        begins.append(begin_of)
    ends = [blocks]
    for begin_of in reversed(begins[1:]):
        ends.append(begin_of[ends[-1]])
    return best[blocks], ends[::-1]
