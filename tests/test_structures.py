"""A loss function may take a batch apart; whoever gets the same batch later finds all of it."""

from collections import Counter, OrderedDict, UserDict, namedtuple
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor

from ddp_kit.structures import each_leaf, entries, tensors_in, with_copied_containers
from tests.support.toys import TensorEncoding


@dataclass
class Record:
    fields: dict[str, Tensor]


X = torch.ones(1)
BATCHES: list[Any] = [
    {"labels": X, "x": X},
    OrderedDict(labels=X, x=X),
    UserDict(labels=X, x=X),
    TensorEncoding(labels=X, x=X),
]


@pytest.mark.parametrize("batch", BATCHES, ids=lambda batch: type(batch).__name__)
def test_copied_containers_keep_the_original_batch_complete(batch: Any) -> None:
    for whole in (batch, [batch], Record(batch), TensorEncoding(inner=batch)):
        copied = with_copied_containers(whole)
        assert type(copied) is type(whole)
        inner = next(iter(vars(copied).values())) if isinstance(whole, Record) else copied
        inner = inner[0] if isinstance(whole, list) else inner.get("inner", inner)
        assert inner.pop("labels") is X, "tensors are not copied"
        assert [*batch] == ["labels", "x"]


Pair = namedtuple("Pair", "x y")


@dataclass(frozen=True)
class Frozen:
    x: Tensor
    y: Any = field(init=False)


NESTED = {
    "list": [X, X],
    "tuple": (X, [X]),
    "named tuple": Pair(X, {"y": X}),
    "dict": {"x": X, 1: (X,)},
    "counter": Counter(x=X, y=X),  # type: ignore[arg-type]
    "read-only mapping": MappingProxyType({"x": X, "y": [X]}),
    "dataclass": [Record({"x": X}), X],
    "frozen dataclass without one of its fields": (Frozen(X), X),
}


@pytest.mark.parametrize("value", NESTED.values(), ids=NESTED)
def test_each_leaf_and_tensors_in_find_the_same_leaves(value: Any) -> None:
    assert [*tensors_in(value)] == [X, X]
    filled = each_leaf(lambda leaf: leaf + 1, value)
    assert type(filled) is (dict if isinstance(value, MappingProxyType) else type(value))
    assert [*tensors_in(filled)] == [X + 1, X + 1]
    assert [*tensors_in(value)] == [X, X]


def test_strings_numbers_and_classes_are_leaves() -> None:
    assert [entries(value) for value in ("ab", b"ab", 1, None, Record, X)] == [None] * 6
    assert entries(Frozen(X)) == [("x", X)]
