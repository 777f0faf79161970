"""A state that was packed before is packed sooner, and never otherwise than one that is seen for the first time."""

import math
import random
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from types import MappingProxyType
from typing import Any
from warnings import catch_warnings, simplefilter

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from ddp_kit.checkpoint import repacking
from ddp_kit.checkpoint.repacking import Repacker
from ddp_kit.errors import CheckpointError

Same = Callable[[Any, Any], bool]

with catch_warnings():
    simplefilter("ignore")  # a prototype
    NESTED = torch.nested.nested_tensor([torch.ones(3), torch.ones(5)])
BASE, COMPLEX = torch.arange(8.0), torch.tensor([1 + 2j, 3j])
TENSORS = [
    BASE, BASE.view(8), BASE.clone(), BASE.view(2, 4), BASE[:4], BASE[:4].clone(), BASE[:8:2], BASE[4:],
    BASE.view(torch.int32), torch.zeros(8, dtype=torch.int32), torch.zeros(()), torch.empty(0), torch.empty(0),
    torch.empty(0, 3), BASE[:0], BASE.requires_grad_(False).detach(), COMPLEX, COMPLEX.conj(), COMPLEX.imag,
    COMPLEX.conj().imag, COMPLEX.imag.clone(), nn.Parameter(torch.ones(8)), torch.zeros(8, device="meta"),
    torch.ones(8).to_sparse(), NESTED,
]  # fmt: skip
LEAVES = [
    0, False, 0.0, -0.0, 1, True, 1.0, math.nan, -math.nan, math.inf, None, "1", "", '"', 2**63 - 1, 2**63, 10**30,
    1000, b"", b"1", 1j, torch.Size([1]), torch.float32, np.float32(1), np.float64(1), np.int64(1), np.ones(2), {1},
    len, frozenset({BASE}), Counter({1: 2}),
]  # fmt: skip
KEYS = ["a", "b", "1", 1, 0, True, 1.0, None, (1,), "$tensor", "a.b", "__metadata__"]


def any_value(dice: random.Random, depth: int = 3) -> Any:
    match dice.randrange(4 if depth else 2):
        case 0:
            return dice.choice(TENSORS[:8] if dice.random() < 0.8 else TENSORS)
        case 1:
            return deque([1]) if dice.random() < 0.1 else dice.choice(LEAVES[:19] if dice.random() < 0.8 else LEAVES)
        case 2:
            return dice.choice([list, tuple])(any_value(dice, depth - 1) for _ in range(dice.randrange(4)))
    keys = dice.sample(KEYS[:5] if dice.random() < 0.8 else KEYS, dice.randrange(4))
    return dice.choice([dict, OrderedDict])((key, any_value(dice, depth - 1)) for key in keys)


def changed(dice: random.Random, value: Any, often: float) -> Any:
    """The same value, with something else in it here and there; or the same objects, changed themselves."""
    if dice.random() < often:
        return any_value(dice, depth=1)
    if isinstance(value, deque):
        value.append(dice.choice([2.0, BASE, len]) if dice.random() < 0.2 else 3)
    if type(value) in (list, tuple):
        kind = dice.choice([list, tuple]) if dice.random() < often else type(value)
        return kind(changed(dice, one, often) for one in value)
    if type(value) not in (dict, OrderedDict):
        return value
    items = [(key, changed(dice, one, often)) for key, one in value.items()]
    if dice.random() < often:
        dice.shuffle(items)
    if dice.random() < often:
        items = [(dice.choice(KEYS), one) for _, one in items]
    other = (dice.choice([dict, OrderedDict]) if dice.random() < often else type(value))(items)
    if type(other) is OrderedDict:
        vars(other).update(getattr(value, "__dict__", {}))
        if dice.random() < often:
            other.attribute = any_value(dice, depth=1)
    return other


def outcome(repacker: Repacker, state: Any) -> tuple[Any, Any]:
    try:
        prepared = repacker.prepare(state)
    except CheckpointError as error:
        return str(error), []
    return (prepared.layout, prepared.text), prepared.tensors


@settings(max_examples=300)
@example(seed=2909)  # a deque that held a tensor for a while
@example(seed=261453)  # the same other names of a tensor, in another order
@given(seed=st.integers(0, 2**32))
def test_what_was_packed_before_makes_no_difference(seed: int, same: Same) -> None:
    dice = random.Random(seed)
    repacker = Repacker()
    state = {"model": any_value(dice), "optimizer": any_value(dice)}
    for _ in range(8):
        for _ in range(dice.randrange(1, 4)):
            (result, tensors), (expected, fresh) = outcome(repacker, state), outcome(Repacker(), state)
            assert result == expected
            assert same(tensors, fresh)
            assert [tensor.data_ptr() for tensor in tensors if any(tensor is one for one in TENSORS)] == [
                tensor.data_ptr() for tensor in fresh if any(tensor is one for one in TENSORS)
            ]
        state = {part: changed(dice, value, often=0.1) for part, value in state.items()}


SQUARE = torch.arange(4.0).view(2, 2)
ZERO, NOUGHT = torch.zeros(4), torch.zeros(4)
DIFFERENT = {
    "type of a key": ({1: 0}, {True: 0}),
    "order of keys": ({"a": 0, "b": 0}, {"b": 0, "a": 0}),
    "place of a leaf": ([[], [1]], [[1], []]),
    "sign of zero": ([0.0], [-0.0]),
    "truth, not a number": ([1], [True]),
    "type": (ZERO, ZERO.view(torch.int32)),
    "shape": (SQUARE, SQUARE.view(4)),
    "device": (torch.zeros(4), torch.zeros(4, device="meta")),
    "layout": (torch.ones(4), torch.ones(4).to_sparse()),
    "which are the same": ([ZERO, ZERO, NOUGHT, NOUGHT], [ZERO, NOUGHT, ZERO, NOUGHT]),
    "same memory, transposed": ([SQUARE, SQUARE], [SQUARE, SQUARE.T]),
    "same memory, negated": ([COMPLEX.imag, COMPLEX.imag], [COMPLEX.imag, COMPLEX.conj().imag]),
    "kind of mapping": ({"a": 0}, OrderedDict({"a": 0})),
}


@pytest.mark.parametrize("pair", DIFFERENT.values(), ids=DIFFERENT.keys())
def test_the_smallest_difference_is_seen(pair: tuple[Any, Any], same: Same) -> None:
    for one, other in (pair, pair[::-1]):
        repacker = Repacker()
        for value in (one, one, one, other):
            result, expected = outcome(repacker, {"part": value}), outcome(Repacker(), {"part": value})
            assert result[0] == expected[0]
            assert same(result[1], expected[1])


def test_a_state_may_be_any_mapping() -> None:
    repacker = Repacker()
    results = [outcome(repacker, MappingProxyType({"part": [step, BASE]}))[0] for step in (1, 1, 1, 2)]
    assert results[-1] == outcome(Repacker(), {"part": [2, BASE]})[0]


def test_a_training_state_is_packed_sooner_from_the_third_time_on(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Embedding(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 5, bias=False))
    model[2].weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])
    repacker = Repacker()
    for step in range(6):
        model(torch.tensor([1, 2])).sum().backward()
        optimizer.step()
        scheduler.step()
        state = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
            "position": {"step": step, "samples": 1000 + step, "loss": [math.nan, 0.5 * step]},
            "random": [f"{step}"],
        }
        expected = Repacker().prepare(state)
        if step == 2:
            layout = repacker.prepare(state).layout
        with monkeypatch.context() as patch:
            if step > 2:
                patch.setattr(repacking, "_dumps", _only_leaves(repacking._dumps))
                patch.setattr(repacking, "lay_out", None)
            prepared = repacker.prepare(state)
        assert prepared.text == expected.text
        assert prepared.layout == expected.layout
        assert [one.data_ptr() for one in prepared.tensors] == [one.data_ptr() for one in expected.tensors]
        assert step < 3 or prepared.layout is layout


def _only_leaves(dumps: Callable[[Any], str]) -> Callable[[Any], str]:
    def dumped(value: Any) -> str:
        assert not isinstance(value, dict) or "model" not in value, "the whole state is packed again"
        return dumps(value)

    return dumped


def test_a_state_as_deep_as_can_be_packed_at_all() -> None:
    def deep(levels: int) -> Any:
        value: Any = 1
        for _ in range(levels):
            value = [value]
        return {"part": value}

    failed = 0
    for levels in range(20, 1200, 20):
        repacker, results = Repacker(), []
        for _ in range(3):
            results.append(outcome(repacker, deep(levels)))
        assert results[0] == results[1] == results[2]
        failed += isinstance(results[0][0], str)
    assert failed
