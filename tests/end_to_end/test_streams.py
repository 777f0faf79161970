"""Streams of unequal lengths: every sample once, and each step's gradient that of all its samples over all ranks."""

import json
import subprocess
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.programs import streams
from tests.programs.toys import flat, momentum_sgd, small_network
from tests.support.launching import PROGRAMS

Start = Callable[..., "subprocess.CompletedProcess[str]"]
SCRIPT = PROGRAMS / "streams.py"

USUAL = {
    "global_batch": 4,
    "accumulation": 1,
    "epochs": 1,
    "max_steps": None,
    "weighted": False,
    "workers": 0,
    "left_after": 0,
}
CASES = [
    {"lengths": [5, 9, 7]},
    {"lengths": [9, 5, 1], "weighted": True},
    {"lengths": [0, 6, 3]},
    {"lengths": [6, 0, 0], "weighted": True, "epochs": 2},
    {"lengths": [0, 0, 5], "accumulation": 2, "global_batch": 6},
    {"lengths": [7, 4, 7], "global_batch": 5, "epochs": 2},
    {"lengths": [7, 11, 2], "global_batch": 7, "accumulation": 3, "weighted": True, "epochs": 2},
    {"lengths": [8, 8, 8], "epochs": 3, "max_steps": 4},
    {"lengths": [5, 9, 9], "left_after": 2, "epochs": 2},
    {"lengths": [5, 9, 2], "left_after": 5, "epochs": 2, "weighted": True, "accumulation": 2, "global_batch": 8},
    {"lengths": [5, 9, 4], "workers": 1, "epochs": 2},
    {"lengths": [5, 10, 0], "workers": 2, "epochs": 2, "weighted": True, "global_batch": 7},
    {"lengths": [9, 5, 6], "workers": 2, "epochs": 2, "left_after": 1},
]


def streams_by_hand(case: dict[str, Any], passes: list[tuple[int, list[int]]], steps: int) -> list[float]:
    """The same steps, each of all its samples at once. `passes`: of all ranks, with the step that each belongs to."""
    model = small_network()
    optimizer = momentum_sgd(model.parameters())
    for number in range(steps):
        numbers = list(chain.from_iterable(seen for step, seen in passes if step == number))
        x = torch.stack([streams.sample(one)[1] for one in numbers])
        weights = streams.weights_of(torch.tensor(numbers)) if case["weighted"] else torch.ones(len(numbers))
        optimizer.zero_grad()
        ((model(x).squeeze(1) ** 2 * weights).sum() / weights.sum().clamp(min=1e-9)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return flat(model.parameters()).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_streams_of_unequal_lengths_train_exactly(start: Start, tmp_path: Path, ranks: int) -> None:
    cases = [USUAL | case | {"lengths": case["lengths"][:ranks]} for case in CASES if any(case["lengths"][:ranks])]
    (tmp_path / "cases.json").write_text(json.dumps(cases))
    run = start("ddpkit", ranks, SCRIPT, str(tmp_path / "cases.json"), str(tmp_path))
    assert run.returncode == 0, run.stderr
    results = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(ranks)]
    for case, *found in zip(cases, *results, strict=True):
        passes = [(step, seen) for one in found for step, seen in one["passes"]]
        used = sorted(number for _, seen in passes for number in seen)
        every = [
            10_000 * epoch + 1000 * rank + number
            for epoch in range(case["epochs"])
            for rank, length in enumerate(case["lengths"])
            for number in range(length)
        ]
        if case["max_steps"] is None:
            assert used == every, case
        else:
            assert len(set(used)) == len(used) == case["max_steps"] * case["global_batch"], case
            assert set(used) < set(every)
        for one in found:
            assert (one["steps"], one["samples"]) == (found[0]["steps"], len(used)), case
            expected = streams_by_hand(case, passes, one["steps"])
            assert one["weights"] == pytest.approx(expected, abs=1e-12, rel=0), case
