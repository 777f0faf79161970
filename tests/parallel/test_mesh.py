"""Which sizes fit how many ranks, and where each rank is."""

from itertools import product
from typing import Any

import pytest

from ddp_kit import ConfigError
from ddp_kit.config.settings import ParallelConfig
from ddp_kit.parallel.strategy import Sizes, sizes_of


@pytest.mark.parametrize(
    ("settings", "ranks", "sizes"),
    [
        ({}, 4, Sizes(4, 1, 1, 1)),
        ({"strategy": "fsdp"}, 4, Sizes(1, 4, 1, 1)),
        ({"strategy": "fsdp", "replicate": 2}, 8, Sizes(2, 4, 1, 1)),
        ({"shard": 2}, 4, Sizes(2, 2, 1, 1)),
        ({"tensor": 2}, 4, Sizes(2, 1, 2, 1)),
        ({"shard": 2, "tensor": 2, "pipeline": 2}, 8, Sizes(1, 2, 2, 2)),
        ({"replicate": 1, "shard": 2}, 2, Sizes(1, 2, 1, 1)),
    ],
)
def test_sizes_of_remaining_ranks_replicate_or_shard(settings: dict[str, Any], ranks: int, sizes: Sizes) -> None:
    assert sizes_of(ParallelConfig(**settings), ranks) == sizes


@pytest.mark.parametrize(
    ("settings", "ranks", "found"),
    [
        ({"shard": 3}, 4, "shard 3 = 3, but there are 4 ranks"),
        ({"shard": 2, "tensor": 4}, 4, "tensor 4 x shard 2 = 8, but there are 4 ranks"),
        ({"replicate": 2, "shard": 2}, 8, "replicate 2 x shard 2 = 4, but there are 8 ranks"),
        ({"tensor": 2}, 1, "there is 1 rank"),
        ({"pipeline": 2, "tensor": 2, "shard": 2}, 6, "tensor 2 x pipeline 2 x shard 2 = 8, but there are 6 ranks"),
    ],
)
def test_sizes_that_do_not_fit_are_refused_with_the_arithmetic(
    settings: dict[str, Any], ranks: int, found: str
) -> None:
    with pytest.raises(ConfigError, match=found) as refused:
        sizes_of(ParallelConfig(**settings), ranks)
    assert "start" in refused.value.hint


def test_coordinates_of_a_tensor_group_are_neighbouring_ranks() -> None:
    sizes = Sizes(replicate=2, shard=3, tensor=2, pipeline=2)
    places = [sizes.coordinates(rank) for rank in range(24)]
    assert places == [*product(range(2), range(2), range(3), range(2))]
    assert [sizes.rank(*place) for place in places] == [*range(24)]


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        ({"strategy": "ddp", "shard": 2}, "need 'fsdp'"),
        ({"strategy": "zero1", "tensor": 2}, "need 'tensor'"),
        ({"shard": 0}, "1 or more"),
        ({"shard": -1, "replicate": -1}, "only one of the two"),
    ],
)
def test_parallel_config_with_contradictory_settings_is_refused(settings: dict[str, Any], found: str) -> None:
    with pytest.raises(ConfigError, match=found):
        ParallelConfig(**settings)


def test_parallel_config_of_a_strategy_equals_that_of_its_sizes() -> None:
    assert ParallelConfig(strategy="fsdp") == ParallelConfig(shard=-1, replicate=1)
    assert ParallelConfig(**ParallelConfig(strategy="fsdp").model_dump()) == ParallelConfig(strategy="fsdp")
