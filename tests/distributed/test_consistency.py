"""The checksum of weights that are on several ranks."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ddp_kit.distributed import consistency

CPU = torch.device("cpu")


def rows_of_ranks(*weights: torch.Tensor, lr: float = 0.1) -> Any:
    """The row of each rank, given its part of the weights."""
    optimizer = torch.optim.SGD([torch.ones(1)], lr=lr)
    return torch.stack([consistency.row("weights", optimizer, [each], CPU) for each in weights]).numpy()


def checksum(rows: Any, groups: Sequence[Sequence[int]]) -> str | None:
    return consistency.weights_checksum(rows, consistency.first_ranks(groups, len(rows)))


def test_weights_checksum_is_the_same_for_any_number_of_replicas() -> None:
    whole = torch.arange(4.0)
    alone = checksum(rows_of_ranks(whole), [range(1)])
    assert alone == checksum(rows_of_ranks(whole, whole, whole), [range(3)])
    assert alone is not None
    assert len(alone) == 14
    assert alone != checksum(rows_of_ranks(whole + 1e-6), [range(1)])


def test_weights_checksum_covers_the_shards_of_all_ranks() -> None:
    first, second = torch.arange(2.0), torch.arange(2.0, 4.0)
    replicas = [range(0, 4, 2), range(1, 4, 2)]
    found = checksum(rows_of_ranks(first, second, first, second), replicas)
    assert found is not None
    assert found[14:] == "/2"
    assert found != checksum(rows_of_ranks(first, second + 1, first, second + 1), replicas)
    assert found != checksum(rows_of_ranks(second, first, second, first), replicas)


def test_weights_checksum_of_a_rank_without_weights_is_known() -> None:
    assert checksum(rows_of_ranks(torch.ones(3), torch.ones(0)), [range(1), range(1, 2)]) is not None
    assert consistency.bits([torch.ones(0), torch.ones(3, dtype=torch.bool)]) == consistency.bits(
        [torch.ones(3, dtype=torch.bool)]
    )


def test_weights_checksum_is_unknown_if_the_ranks_do_not_compare_weights() -> None:
    optimizer = torch.optim.SGD([torch.ones(1)], lr=0.1)
    assert checksum(consistency.row("off", optimizer, [], CPU).numpy()[None], [range(1)]) is None
    assert checksum(np.zeros((1, 0)), [range(1)]) is None


def test_checksums_of_many_shards_differ_if_one_does() -> None:
    rows = np.arange(8192 * 4, dtype=np.float64).reshape(8192, 4)
    groups = [range(8192)[part::4096] for part in range(4096)]
    rows[4096:] = rows[:4096]
    found = checksum(rows, groups)
    rows[4095, 3] += 1
    assert found is not None
    assert found[14:] == "/4096"
    assert checksum(rows, groups) not in (None, found)


def test_differing_checksum_is_named() -> None:
    firsts = consistency.first_ranks([range(0, 4, 2), range(1, 4, 2)], 4)
    assert firsts.tolist() == [0, 1, 0, 1]
    own = consistency.first_ranks([], 4)
    assert own.tolist() == [0, 1, 2, 3]
    rows = np.repeat([[1.0, 2.0]], 4, axis=0)
    rows = np.hstack([rows, [[1, 2], [3, 4], [1, 2], [3, 4]], [[number, number] for number in range(4)]])
    assert consistency.differing(rows, firsts, own) is None
    assert consistency.differing(rows[:, :0], firsts, own) is None
    assert consistency.differing(rows, firsts, firsts) == "the state of the optimizer"
    rows[2, 3] = 5
    assert consistency.differing(rows, firsts, own) == "the weights of the model"
    rows[3, 0] = 5
    assert consistency.differing(rows, firsts, own) == "the learning rates"
