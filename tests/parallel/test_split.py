"""Chains of blocks divided among devices, against every division there is."""

import math
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_kit import ConfigError
from ddp_kit.model.blocks import split_chain

blocks = st.lists(st.tuples(st.integers(0, 20), st.integers(0, 20)), min_size=1, max_size=9)


def divisions(number: int, stages: int) -> list[tuple[range, ...]]:
    """Every division into consecutive stages none of which is empty."""
    return [
        tuple(range(begin, end) for begin, end in zip((0, *cuts), (*cuts, number), strict=True))
        for cuts in combinations(range(1, number), stages - 1)
    ]


def stage_costs(division: tuple[range, ...], costs: list[int]) -> list[int]:
    return [sum(costs[block] for block in stage) for stage in division]


@given(blocks, st.data())
def test_split_chain_minimises_the_largest_cost_and_then_is_most_even(
    chain: list[tuple[int, int]], data: st.DataObject
) -> None:
    costs, sizes = [cost for cost, _ in chain], [size for _, size in chain]
    stages = data.draw(st.integers(1, len(chain)))
    capacities = data.draw(st.lists(st.integers(0, 60) | st.just(math.inf), min_size=stages, max_size=stages))
    fitting = [
        division
        for division in divisions(len(chain), stages)
        if all(own <= capacity for own, capacity in zip(stage_costs(division, sizes), capacities, strict=True))
    ]
    if not fitting:
        with pytest.raises(ConfigError, match="no split into consecutive stages fits"):
            split_chain(costs, sizes, capacities)
        return
    found = split_chain(costs, sizes, capacities)
    assert found in fitting

    def value(division: tuple[range, ...]) -> tuple[int, int]:
        own = stage_costs(division, costs)
        return max(own), sum(each * each for each in own)

    assert value(found) == min(map(value, fitting))


def test_split_chain_that_does_not_fit_shows_needed_and_available_bytes() -> None:
    gib = 1024**3
    with pytest.raises(ConfigError, match="needs 5.00 GiB in 3 blocks, .* block needs 3.00 .* with 2.00 GiB, 2.50"):
        split_chain([1, 1, 1], [gib, gib, 3 * gib], [2 * gib, 2.5 * gib])


@pytest.mark.parametrize("devices", [0, 3])
def test_split_chain_with_more_devices_than_blocks_is_refused(devices: int) -> None:
    with pytest.raises(ConfigError, match=f"2 blocks cannot be divided among {devices} devices"):
        split_chain([1, 1], [1, 1], [1.0] * devices)
