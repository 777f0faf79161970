"""The digest of a Subset's indices: the one in checkpoints, computed once for equal indices."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import Subset

from ddp_kit.data import comparison
from ddp_kit.data.comparison import facts_of_data, subset_digest
from ddp_kit.distributed.consistency import digest_of

DATA = [*range(2000)]


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Lengths of the texts that are hashed."""
    lengths: list[int] = []

    def counting(content: bytes) -> int:
        lengths.append(len(content))
        return digest_of(content)

    monkeypatch.setattr(comparison, "_DIGESTS", {})
    monkeypatch.setattr(comparison, "digest_of", counting)
    return lengths


INDICES: dict[str, Callable[[], Any]] = {
    "list": lambda: [3, 1, 2],
    "range": lambda: range(5, 9),
    "array": lambda: np.array([3, 1, 2]),
    "narrow array": lambda: np.array([3, 1, 2], dtype=np.int32),
    "every other": lambda: np.arange(8)[::2],
    "list of NumPy's integers": lambda: [*np.array([3, 1, 2])],
    "tensor": lambda: torch.tensor([3, 1, 2]),
    "none": lambda: [],
    "names": lambda: ["b", "a"],
    "numbers and names": lambda: [1, "a"],
    "names of numbers": lambda: ["1", "a"],
    "pairs": lambda: [(1, 2), (3, 4)],
    "large": lambda: [2**70, 1],
}


@pytest.mark.parametrize("indices", INDICES.values(), ids=INDICES)
def test_digest_is_that_of_earlier_checkpoints(indices: Callable[[], Any], hashed: list[int]) -> None:
    for other in INDICES.values():
        subset_digest(Subset(DATA, other()))
    hashed.clear()
    subset = Subset(DATA, indices())
    nested = Subset(subset, [1, 0])
    assert subset_digest(subset) == digest_of(repr([[*indices()]]).encode())
    assert subset_digest(nested) == digest_of(repr([[1, 0], [*indices()]]).encode())
    assert subset_digest(DATA) is None


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
@pytest.mark.parametrize("count", [10, 1000])
def test_text_of_equal_indices_is_made_once(kind: Callable[..., Any], count: int, hashed: list[int]) -> None:
    subset = Subset(DATA, kind([*range(count)]))
    first = subset_digest(subset)
    for _ in range(20):
        assert subset_digest(subset) == first
        assert subset_digest(Subset(DATA, kind([*range(count)]))) == first
        assert facts_of_data({"train_data": subset})["the indices of the Subset train_data"] == str(first)
    assert len(hashed) == 1


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_indices_that_change_in_place_have_another_digest(kind: Callable[..., Any], hashed: list[int]) -> None:
    indices = kind([5, 6, 7])
    nested = Subset(Subset(DATA, indices), [0, 2])
    first = subset_digest(nested)
    indices[1] = 8
    changed = subset_digest(nested)
    assert changed == digest_of(repr([[0, 2], [*kind([5, 8, 7])]]).encode())
    indices[1] = 6
    assert subset_digest(nested) == first != changed
    assert len(hashed) == 2
