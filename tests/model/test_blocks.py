"""Which modules of a model are its repeated blocks."""

import sys

import pytest
import torch
from torch import nn

from ddp_kit.model.blocks import repeated_blocks


class BlockWithHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList([nn.Sequential(nn.Linear(2, 2)) for _ in range(2)])


def test_repeated_blocks_of_nested_blocks_are_the_outer_ones() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.ModuleList([BlockWithHeads(), BlockWithHeads()]), nn.Linear(2, 2))
    assert (*repeated_blocks(model),) == ("1.0", "1.1")


def test_repeated_blocks_in_several_groups_exclude_the_groups() -> None:
    stages = nn.Sequential(
        nn.Sequential(BlockWithHeads(), BlockWithHeads()), nn.Sequential(BlockWithHeads(), BlockWithHeads())
    )
    assert (*repeated_blocks(nn.ModuleDict({"stages": stages})),) == (
        "stages.0.0",
        "stages.0.1",
        "stages.1.0",
        "stages.1.1",
    )
    layers = [nn.Sequential(nn.Linear(2, 2), nn.ReLU()) for _ in range(3)]
    assert (*repeated_blocks(nn.Sequential(*layers)),) == ("0", "1", "2")


def test_repeated_blocks_exclude_single_layers_and_blocks() -> None:
    assert (*repeated_blocks(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))),) == ()
    assert (*repeated_blocks(nn.Sequential(BlockWithHeads(), nn.Linear(2, 2))),) == ("0.heads.0", "0.heads.1")


@pytest.mark.parametrize("nested", [False, True])
def test_repeated_blocks_take_calls_in_proportion_to_the_modules(nested: bool) -> None:
    assert calls(4 * 200, nested=nested) < 4.5 * calls(200, nested=nested)


def calls(blocks: int, *, nested: bool) -> int:
    """The number of calls, and of resumed generators, that finding this number of blocks takes."""
    with torch.device("meta"):
        layers = [nn.Sequential(nn.Linear(2, 2)) for _ in range(blocks)]
    model = nn.Sequential(*layers)
    if nested:
        model = nn.Sequential(*(nn.Sequential(*layers[at : at + 4]) for at in range(0, blocks, 4)))
    count = 0

    def add(*_event: object) -> None:
        nonlocal count
        count += 1

    sys.setprofile(add)
    try:
        found = repeated_blocks(model)
    finally:
        sys.setprofile(None)
    assert len(found) == blocks
    return count
