"""The checksum of weights that are on several ranks."""

import torch

from ddp_kit.distributed import consistency

CPU = torch.device("cpu")


def rows_of_ranks(*weights: torch.Tensor) -> list[list[float]]:
    """The row of each rank, given its part of the weights."""
    optimizer = torch.optim.SGD([torch.ones(1)], lr=0.1)
    return [consistency.row("weights", optimizer, [each], CPU).tolist() for each in weights]


def test_weights_checksum_is_the_same_for_any_number_of_replicas() -> None:
    whole = torch.arange(4.0)
    alone = consistency.weights_checksum(rows_of_ranks(whole), [range(1)])
    assert alone == consistency.weights_checksum(rows_of_ranks(whole, whole, whole), [range(3)])
    assert alone is not None
    assert len(alone) == 14
    assert alone != consistency.weights_checksum(rows_of_ranks(whole + 1e-6), [range(1)])


def test_weights_checksum_covers_the_shards_of_all_ranks() -> None:
    first, second = torch.arange(2.0), torch.arange(2.0, 4.0)
    replicas = [range(0, 4, 2), range(1, 4, 2)]
    found = consistency.weights_checksum(rows_of_ranks(first, second, first, second), replicas)
    assert found is not None
    assert found[14:] == "/2"
    assert found != consistency.weights_checksum(rows_of_ranks(first, second + 1, first, second + 1), replicas)
    assert found != consistency.weights_checksum(rows_of_ranks(second, first, second, first), replicas)


def test_weights_checksum_of_a_rank_without_weights_is_known() -> None:
    assert (
        consistency.weights_checksum(rows_of_ranks(torch.ones(3), torch.ones(0)), [range(1), range(1, 2)]) is not None
    )
    assert consistency.bits([torch.ones(0), torch.ones(3, dtype=torch.bool)]) == consistency.bits(
        [torch.ones(3, dtype=torch.bool)]
    )


def test_weights_checksum_is_unknown_if_the_ranks_do_not_compare_weights() -> None:
    optimizer = torch.optim.SGD([torch.ones(1)], lr=0.1)
    assert consistency.weights_checksum([consistency.row("off", optimizer, [], CPU).tolist()], [range(1)]) is None
    assert consistency.weights_checksum([()], [range(1)]) is None
