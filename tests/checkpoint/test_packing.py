"""A state comes back from a checkpoint bitwise identical, with its types; a value that cannot be stored is named."""

import json
import math
import random
import struct
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import lr_scheduler

from ddp_kit.checkpoint.format import name_of
from ddp_kit.checkpoint.packing import pack
from ddp_kit.checkpoint.reader import load, unpack
from ddp_kit.checkpoint.saver import Saver
from ddp_kit.errors import CheckpointError

Pair = namedtuple("Pair", "a b")
Same = Callable[[Any, Any], bool]
ODD_NAN = struct.unpack(">d", bytes.fromhex("fff4000000000123"))[0]
DTYPES = [value for value in vars(torch).values() if isinstance(value, torch.dtype)]


def there_and_back(state: Any) -> Any:
    """Without files: through the text of the JSON."""
    packed = pack({"part": state})
    tensors = {(stored.part, stored.name): stored.tensor.contiguous() for stored in packed.tensors}
    assert len(tensors) == len(packed.tensors), "two tensors have one name"
    text = json.loads(json.dumps(packed.text, allow_nan=False))
    return unpack(text, lambda part, name, _: tensors[part, name])["part"]


PLAIN = [
    None, True, False, 0, -1, 2**53 + 1, 2**63 - 1, -(2**63), 2**63, -(10**5000), 0.0, -0.0, 0.1, 5e-324, 1.7e308,
    math.nan, ODD_NAN, math.inf, -math.inf, "", "ü\n\0", "\ud800", "$tensor", b"", bytes(range(256)), 1j,
    complex(ODD_NAN, -0.0), [], (), {}, [[]], ((),), {"$tensor": ["a", "b"]}, {"": 1, "$": 2}, {1: "a", "1": "b"},
    {(1, ("a", None)): 2, None: 3, True: 4, 2.5: 5, b"k": 6},
    OrderedDict([("b", 1), ("a", 2)]), OrderedDict([(2, 1)]), Counter({3: 2, 1: 0}), Counter(),
    np.float32("nan"), np.float64(0.1), np.int8(-3),
    np.bool_(True), np.str_("text"), np.str_(""), np.datetime64("2024-01-01"), np.complex64(1j), np.array(3.5),
    np.arange(6).reshape(2, 3).T, np.arange(9)[::-2], np.zeros((0, 3), np.int16), np.array(["a", "bc"]),
    np.arange(3, dtype=">i4"), np.array([1 + 2j]), np.array(["NaT", 3], "M8[s]"),
    np.array([True, False]), np.float16([1, 2]),
    [0] * 999, [*range(999), -(10**5000)], [*range(999), 10**5000], [*range(999), math.nan], [*range(999), True, 1j],
]  # fmt: skip


@pytest.mark.parametrize("value", PLAIN, ids=map(str, range(len(PLAIN))))
def test_pack_value_loads_bitwise_identical(value: Any, same: Same) -> None:
    assert same(there_and_back({"value": [value]}), {"value": [value]})


@pytest.mark.parametrize("value", [Pair(1, [2]), torch.Size([1, 2])], ids=["namedtuple", "torch.Size"])
def test_pack_subclass_of_tuple_loads_as_tuple(value: Any, same: Same) -> None:
    assert same(there_and_back(value), tuple(value))


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.complex_numbers(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers(), inner),
)


@given(value=VALUES)
def test_pack_any_nesting_loads_bitwise_identical(value: Any, same: Same) -> None:
    assert same(there_and_back(value), value)


TENSORS = {
    "0-dim": torch.tensor(2.5),
    "empty": torch.empty(0, 3),
    "transposed": torch.arange(12.0).reshape(3, 4).T,
    "sliced": torch.arange(20)[3:17:5],
    "expanded": torch.ones(1, 3).expand(4, 3),
    "channels last": torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "conjugate": torch.tensor([1 + 2j, 3j]).conj(),
    "imaginary part of a conjugate": torch.tensor([1 + 2j, 3j]).conj().imag,
    "wants a gradient": torch.randn(3, requires_grad=True) * 2,
    "odd NaN": torch.tensor([0x7FC12345, 0x7F812345, -0x400000], dtype=torch.int32).view(torch.float32)[::2],
}


@pytest.mark.parametrize("tensor", TENSORS.values(), ids=TENSORS.keys())
def test_saved_tensor_of_any_layout_loads_bitwise_identical(tensor: torch.Tensor, tmp_path: Path, same: Same) -> None:
    save_state(tmp_path, {"part": {"a": tensor, "b": [tensor.clone()]}})
    back = load(tmp_path / name_of(1))
    assert same(back, {"part": {"a": tensor.detach(), "b": [tensor.detach()]}})


@pytest.mark.filterwarnings(
    "ignore:ComplexHalf support",
    "ignore:torch.quantize_per_tensor",
    "ignore:BComplex32 support",  # the last: torch 2.15
)
def test_saved_tensor_of_any_dtype_loads_bitwise_identical(tmp_path: Path, same: Same) -> None:
    tensors = {}
    for dtype in DTYPES:
        for shape in ((), (3,), (2, 3), (0,)):
            try:
                tensor = torch.empty(shape, dtype=dtype)
                tensor.reshape(-1).view(torch.uint8).random_(0, 2 if dtype == torch.bool else 256)
            except RuntimeError:  # quantised types have no plain tensors
                continue
            if not tensor.is_quantized:
                tensors[f"{dtype} {shape}"] = tensor
    assert len(tensors) > 60
    save_state(tmp_path, {"part": tensors})
    assert same(load(tmp_path / name_of(1))["part"], tensors)


def save_state(folder: Path, state: dict[str, Any]) -> None:
    with Saver(folder, keep_last=1, background=False) as saver:
        saver.save(1, state)


def test_saved_tied_tensors_are_stored_once_and_load_tied(tmp_path: Path, same: Same) -> None:
    weight = torch.randn(1000)
    save_state(tmp_path, {"model": {"embed": weight, "head": weight.view(1000), "half": weight[:500]}, "ema": [weight]})
    back = load(tmp_path / name_of(1))
    assert back["model"]["embed"] is back["model"]["head"] is back["ema"][0]
    assert same(back["model"]["half"], weight[:500])
    assert not (tmp_path / name_of(1) / "ema.safetensors").exists()
    assert (tmp_path / name_of(1) / "model.safetensors").stat().st_size < 7000


def test_saved_tensors_whose_paths_are_equal_load_separately(tmp_path: Path, same: Same) -> None:
    state = {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}, "__metadata__": torch.ones(2), 1: torch.ones(3),
             "1": torch.ones(4), "a.b#2": torch.ones(5)}  # fmt: skip
    save_state(tmp_path, {"part": state})
    assert same(load(tmp_path / name_of(1))["part"], state)


OPTIMIZERS = [
    kind for kind in vars(torch.optim).values()
    if isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
]  # fmt: skip


@pytest.mark.parametrize("kind", OPTIMIZERS, ids=lambda kind: kind.__name__)
def test_pack_state_of_every_optimizer_loads_bitwise_identical(kind: Any, same: Same) -> None:
    model = nn.Embedding(4, 3, sparse=True) if kind is torch.optim.SparseAdam else nn.Linear(4, 3, bias=False)
    inputs = torch.tensor([1]) if kind is torch.optim.SparseAdam else torch.ones(1, 4)
    optimizer = kind(model.parameters(), lr=0.1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(inputs).square().sum()
        loss.backward()
        return loss

    for _ in range(2):
        optimizer.step(closure)
    assert same(there_and_back(optimizer.state_dict()), optimizer.state_dict())


SCHEDULERS: dict[str, Any] = {
    "LambdaLR": lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "MultiplicativeLR": lambda o: lr_scheduler.MultiplicativeLR(o, lambda _: 0.9),
    "StepLR": lambda o: lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: lr_scheduler.MultiStepLR(o, [1, 1, 3]),
    "ConstantLR": lr_scheduler.ConstantLR,
    "LinearLR": lr_scheduler.LinearLR,
    "ExponentialLR": lambda o: lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lr_scheduler.PolynomialLR,
    "CosineAnnealingLR": lambda o: lr_scheduler.CosineAnnealingLR(o, 5),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 5),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, 0.1, 0.2),
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, 0.1, 9),
    "ReduceLROnPlateau": lr_scheduler.ReduceLROnPlateau,
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o), lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "ChainedScheduler": lambda o: lr_scheduler.ChainedScheduler([lr_scheduler.ConstantLR(o)]),
}


def test_table_of_schedulers_has_all_schedulers_of_torch() -> None:
    kinds = {
        name
        for name, kind in vars(lr_scheduler).items()
        if isinstance(kind, type) and issubclass(kind, lr_scheduler.LRScheduler) and not name.endswith("LRScheduler")
    }
    assert {*SCHEDULERS} == kinds


@pytest.mark.parametrize("name", SCHEDULERS)
def test_pack_state_of_every_scheduler_loads_bitwise_identical(name: str, same: Same) -> None:
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1, momentum=0.9)
    scheduler = SCHEDULERS[name](optimizer)
    for _ in range(3):
        optimizer.step()
        scheduler.step(*[0.5] * (name == "ReduceLROnPlateau"))
    assert same(there_and_back(scheduler.state_dict()), scheduler.state_dict())


def test_pack_random_states_and_module_versions_load_bitwise_identical(same: Same) -> None:
    state = {
        "model": nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)).state_dict(),
        "random": random.getstate(),
        "numpy": np.random.get_state(),
        "generator": np.random.default_rng(0).bit_generator.state,
        "torch": torch.get_rng_state(),
    }
    back = there_and_back(state)
    assert same(back, state)
    assert back["model"]._metadata["1"] == {"version": 2}
    random.setstate(back["random"])
    np.random.set_state(back["numpy"])


LOOP: list[Any] = []
LOOP.append(LOOP)
WITH_ATTRIBUTE: Any = OrderedDict(a=1)
WITH_ATTRIBUTE.name = "x"


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"scheduler": {"lr_lambdas": [lambda step: step]}}, "scheduler.lr_lambdas[0] is a function"),
        ({"model": {"w": torch.ones(3).to_sparse()}}, "model.w is a torch.Tensor (torch.sparse_coo"),
        ({"model": {"w": torch.ones(3, device="meta")}}, "meta"),
        ({"model": {"w": nn.UninitializedParameter()}}, "UninitializedParameter"),
        ({"x": {1: {("a",): Path()}}}, "x[1][('a',)] is a pathlib"),
        ({"x": np.array([object()])}, "x is a numpy.ndarray"),
        ({"x": np.zeros(1, [("a", "i2")])}, "x is a numpy.ndarray"),
        ({"x": np.zeros(1, [("a", "i2")])[0]}, "x is a numpy.void"),
        ({"callbacks": [["Mine", {"last": deque([1], 3)}]]}, "callbacks[0][1].last is a collections.deque"),
        ({"x": defaultdict(list)}, "x is a collections.defaultdict"),
        ({"x": {1, 2}}, "x is a set"),
        ({"x": torch.float32}, "x is a torch.dtype"),
        ({"x": torch.device("cpu")}, "x is a torch.device"),
        ({"x": WITH_ATTRIBUTE}, "x is a collections.OrderedDict"),
        ({"x": {torch.ones(1): 1}}, "x is a torch.Tensor"),
        ({"x": LOOP}, "a container that contains itself"),
        ({"../x": 1}, "a part of the state is called '../x'"),
        ({3: 1}, "a part of the state is called 3"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_pack_value_that_cannot_be_stored_raises_error_with_its_path(state: Any, said: str) -> None:
    with pytest.raises(CheckpointError) as raised:
        pack(state)
    assert said in str(raised.value)


def test_unpack_unknown_tag_raises_error() -> None:
    with pytest.raises(CheckpointError, match="newer version"):
        unpack({"part": {"$quaternion": []}}, lambda *_: torch.ones(1))
