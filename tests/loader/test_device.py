"""Whatever batches are made of, they reach the device."""

from collections import Counter, namedtuple
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from ddp_kit.loader import on_device

CPU = torch.device("cpu")


Pair = namedtuple("Pair", "left right")


class Movable:
    def __init__(self) -> None:
        self.moved_to: object = None

    def to(self, device: object) -> "Movable":
        self.moved_to = device
        return self


def test_any_nesting_reaches_the_device_and_keeps_its_shape() -> None:
    batch = {"pair": Pair(torch.ones(2), [torch.zeros(1, dtype=torch.int64), "text", None]), "own": Movable()}
    (moved,) = on_device([batch], CPU, None, ahead=2)
    assert isinstance(moved["pair"], Pair)
    assert moved["pair"].right[1:] == ["text", None]
    assert moved["own"].moved_to == CPU


class Named(dict[str, Tensor]):
    """What some collate functions return."""


@dataclass
class Sample:
    image: Tensor
    name: str


def test_subclasses_of_containers_and_dataclasses_are_converted_too() -> None:
    batch = [Named(x=torch.ones(1)), Sample(torch.ones(1), "one"), pack_sequence([torch.ones(2), torch.ones(1)])]
    ((named, sample, packed),) = on_device([batch], CPU, torch.bfloat16, ahead=0)
    assert (type(named), named["x"].dtype) == (Named, torch.bfloat16)
    assert (sample.image.dtype, sample.name) == (torch.bfloat16, "one")
    assert isinstance(packed, PackedSequence)


@dataclass(frozen=True)
class Scaled:
    x: Tensor
    made: list[int] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "x", self.x / 255)


def test_a_container_s_constructor_is_not_run_again() -> None:
    scaled, counter = Scaled(torch.full((1,), 255.0)), Counter(a=1, b=2)
    scaled.made.append(7)
    ((moved, counted),) = on_device([(scaled, counter)], CPU, None, ahead=0)
    assert (moved.x.item(), moved.made, counted) == (1.0, [7], Counter(a=1, b=2))


def test_floating_point_is_converted_where_asked_and_whole_numbers_never() -> None:
    (moved,) = on_device([(torch.ones(2), torch.ones(2, dtype=torch.int64))], CPU, torch.bfloat16, ahead=0)
    assert [leaf.dtype for leaf in moved] == [torch.bfloat16, torch.int64]
