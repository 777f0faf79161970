"""Which modules of a model are its repeated blocks."""

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
