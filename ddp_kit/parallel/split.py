"""Splits a chain of blocks into consecutive stages, one per device, with an exact algorithm. Does not import torch."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import inf

from ddp_kit.errors import ConfigError
from ddp_kit.sizes import size_text


def split_chain(costs: Sequence[float], sizes: Sequence[float], capacities: Sequence[float]) -> tuple[range, ...]:
    """Divide blocks into one stage per device so that the largest stage cost is minimal.

    `costs`: of each block, not negative, in any unit. `sizes`: bytes of each block. `capacities`: bytes that each
    device can hold, in the order of the stages; `math.inf` for no limit. Ties are broken by the smallest sum of squared
    stage costs. Returns the blocks of each stage; no stage is empty.
    A dynamic program over (stages, blocks), O(n^2 k) for n blocks and k devices.
    Raises `ConfigError` if there are fewer blocks than devices, or if no split fits.
    """
    if not 0 < len(capacities) <= len(costs):
        raise ConfigError(
            f"{len(costs)} blocks cannot be divided among {len(capacities)} devices",
            f"use at least 1 and at most {len(costs)} devices",
        )
    cost_to, size_to = [0.0, *accumulate(costs)], [0.0, *accumulate(sizes)]

    def cost(begin: int, end: int) -> float:
        return cost_to[end] - cost_to[begin]

    def fits(stage: int, begin: int, end: int) -> bool:
        return size_to[end] - size_to[begin] <= capacities[stage]

    def stage_cost(stage: int, begin: int, end: int) -> float:
        return cost(begin, end) if fits(stage, begin, end) else inf

    largest, _ = _best(len(costs), len(capacities), stage_cost, max)
    if largest == inf:
        raise _does_not_fit(sizes, capacities)

    def squared(stage: int, begin: int, end: int) -> float:
        own = stage_cost(stage, begin, end)
        return own * own if own <= largest else inf

    _, ends = _best(len(costs), len(capacities), squared, lambda before, own: before + own)
    return tuple(range(begin, end) for begin, end in zip((0, *ends), ends, strict=False))


def _best(
    blocks: int, stages: int, cost: Callable[[int, int, int], float], combine: Callable[[float, float], float]
) -> tuple[float, list[int]]:
    """The smallest combined cost of all stages, and the end of each. `cost` gets a stage's index, begin and end."""
    best = [cost(0, 0, end) if end else inf for end in range(blocks + 1)]
    begins: list[list[int]] = [[0] * (blocks + 1)]
    for stage in range(1, stages):
        found, begin_of = [inf] * (blocks + 1), [0] * (blocks + 1)
        for end in range(stage + 1, blocks + 1):
            for begin in range(stage, end):
                if best[begin] < inf and (value := combine(best[begin], cost(stage, begin, end))) < found[end]:
                    found[end], begin_of[end] = value, begin
        best = found
        begins.append(begin_of)
    ends = [blocks]
    for begin_of in reversed(begins[1:]):
        ends.append(begin_of[ends[-1]])
    return best[blocks], ends[::-1]


def _does_not_fit(sizes: Sequence[float], capacities: Sequence[float]) -> ConfigError:
    shown = ", ".join(size_text(each, 2) for each in capacities)
    return ConfigError(
        f"the model needs {size_text(sum(sizes), 2)} in {len(sizes)} blocks, the largest of "
        f"{size_text(max(sizes), 2)}, and no split into consecutive stages fits devices of {shown}",
        "use more devices or a smaller model",
    )
