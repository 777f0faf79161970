"""A loss function may take a batch apart; whoever gets the same batch later finds all of it."""

from collections import OrderedDict, UserDict
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from ddp_kit.structures import with_copied_containers


class Encoding(UserDict[str, Any]):
    """As Hugging Face's BatchEncoding: a mapping that is not a dict, with a `to` method."""

    def to(self, device: object) -> "Encoding":
        return self


@dataclass
class Record:
    fields: dict[str, Tensor]


X = torch.ones(1)
BATCHES: list[Any] = [
    {"labels": X, "x": X},
    OrderedDict(labels=X, x=X),
    UserDict(labels=X, x=X),
    Encoding(labels=X, x=X),
]


@pytest.mark.parametrize("batch", BATCHES, ids=lambda batch: type(batch).__name__)
def test_copied_containers_keep_the_original_batch_complete(batch: Any) -> None:
    for whole in (batch, [batch], Record(batch), Encoding(inner=batch)):
        copied = with_copied_containers(whole)
        assert type(copied) is type(whole)
        inner = next(iter(vars(copied).values())) if isinstance(whole, Record) else copied
        inner = inner[0] if isinstance(whole, list) else inner.get("inner", inner)
        assert inner.pop("labels") is X, "tensors are not copied"
        assert [*batch] == ["labels", "x"]
