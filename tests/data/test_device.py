"""Whatever batches are made of, they reach the device."""

from collections import Counter, namedtuple
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils._python_dispatch import TorchDispatchMode

from ddp_kit.data import device, on_device

CPU = torch.device("cpu")


Pair = namedtuple("Pair", "left right")


class Movable:
    def __init__(self) -> None:
        self.moved_to: object = None

    def to(self, device: object) -> "Movable":
        self.moved_to = device
        return self


def test_on_device_moves_any_nesting_and_keeps_its_structure() -> None:
    batch = {"pair": Pair(torch.ones(2), [torch.zeros(1, dtype=torch.int64), "text", None]), "own": Movable()}
    (moved,) = on_device([batch], CPU, None, ahead=2)
    assert isinstance(moved["pair"], Pair)
    assert moved["pair"].right[1:] == ["text", None]
    assert moved["own"].moved_to == CPU


class Named(dict[str, Tensor]):
    """What some collate functions return."""


@dataclass
class ImageSample:
    image: Tensor
    name: str


def test_on_device_converts_subclasses_of_containers_and_dataclasses() -> None:
    batch = [Named(x=torch.ones(1)), ImageSample(torch.ones(1), "one"), pack_sequence([torch.ones(2), torch.ones(1)])]
    ((named, sample, packed),) = on_device([batch], CPU, torch.bfloat16, ahead=0)
    assert (type(named), named["x"].dtype) == (Named, torch.bfloat16)
    assert (sample.image.dtype, sample.name) == (torch.bfloat16, "one")
    assert isinstance(packed, PackedSequence)


@dataclass(frozen=True)
class ScaledBatch:
    x: Tensor
    made: list[int] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "x", self.x / 255)


def test_on_device_does_not_run_constructors_of_containers_again() -> None:
    scaled, counter = ScaledBatch(torch.full((1,), 255.0)), Counter(a=1, b=2)
    scaled.made.append(7)
    ((moved, counted),) = on_device([(scaled, counter)], CPU, None, ahead=0)
    assert (moved.x.item(), moved.made, counted) == (1.0, [7], Counter(a=1, b=2))


def test_on_device_converts_floats_and_never_integers() -> None:
    (moved,) = on_device([(torch.ones(2), torch.ones(2, dtype=torch.int64))], CPU, torch.bfloat16, ahead=0)
    assert [leaf.dtype for leaf in moved] == [torch.bfloat16, torch.int64]


class Conversions(TorchDispatchMode):
    """Notes the conversions of tensors: to which device and which type each goes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[str, torch.dtype]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default:
            self.seen.append((result.device.type, result.dtype))
        return result


def test_on_device_converts_dtypes_on_the_device() -> None:
    with Conversions() as conversions:
        moved = device._moved(torch.ones(2), torch.device("meta"), torch.bfloat16)
    assert conversions.seen == [("meta", torch.float32), ("meta", torch.bfloat16)]
    assert moved.dtype == torch.bfloat16


def test_on_device_copies_only_dense_host_tensors_ahead() -> None:
    sparse, elsewhere, own = torch.ones(2, 2).to_sparse(), torch.ones(2, device="meta"), Movable()
    nested = torch.nested.nested_tensor([torch.ones(2), torch.ones(1)], layout=torch.jagged)
    dense, *others = device._ahead([torch.ones(2), sparse, elsewhere, nested, own, "text"], torch.device("meta"), None)
    assert dense.is_meta
    assert all(found is given for found, given in zip(others, [sparse, elsewhere, nested, own, "text"], strict=True))
    assert own.moved_to is None
