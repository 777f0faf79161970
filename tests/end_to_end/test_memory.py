"""The largest micro-batch that fits is found, and a step that runs out of memory is done again, exactly once."""

import json
import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from tests.support.launching import PROGRAMS

Start = Callable[..., "subprocess.CompletedProcess[str]"]
SCRIPT = PROGRAMS / "memory.py"

UNDISTURBED = {"at": None, "ranks": [], "step": 0, "fits": 0, "auto": False}
# (what, the micro-batch that it ends with at 2 ranks, each of which has 12 samples of a global batch)
CASES: list[tuple[dict[str, Any], int]] = [
    ({"at": None, "ranks": [], "step": 0, "fits": 0}, 12),  # all of it fits
    ({"at": "forward", "ranks": [1], "step": 0, "fits": 5}, 4),  # found before the first step
    ({"at": "backward", "ranks": [0, 1], "step": 0, "fits": 3}, 2),
    ({"at": "forward", "ranks": [1], "step": 3, "fits": 7}, 6),  # halved later, while the other rank reduces
    ({"at": "backward", "ranks": [1], "step": 3, "fits": 7}, 6),
    ({"at": "backward", "ranks": [0], "step": 5, "fits": 2}, 2),  # 12, 6, 3, 2
    ({"at": "backward", "ranks": [0, 1], "step": 2, "fits": 11}, 6),
]


@pytest.mark.slow
def test_out_of_memory_in_any_place_does_not_change_the_result(start: Start) -> None:
    kinds: list[dict[str, Any]] = [{}, {"weighted": True, "optimizer": "adam"}, {"buffers": True}]
    kinds += [{"strategy": "zero1", "offload": "optimizer"}, {"parallel": {"find_unused_parameters": True}}]
    cases = [
        ({"auto": True} | case | kind, UNDISTURBED | kind, size)
        for number, (case, size) in enumerate(CASES)
        for kind in (kinds if number in (3, 4) else kinds[number % 3 :][:1])
    ]
    run = start("ddpkit", 2, SCRIPT, json.dumps([case for case, _, _ in cases]))
    assert run.returncode == 0, run.stderr
    expected = start("ddpkit", 2, SCRIPT, json.dumps([case for _, case, _ in cases]))
    assert expected.returncode == 0, expected.stderr
    found = zip(cases, json.loads(run.stdout), json.loads(expected.stdout), strict=True)
    for (case, _, size), ours, undisturbed in found:
        assert ours["micro_batch"] == size, case
        assert ours["samples"] == undisturbed["samples"]
        for what in ("weights", "losses"):
            assert ours[what] == pytest.approx(undisturbed[what], abs=1e-12, rel=0), (what, case)


@pytest.mark.slow
def test_out_of_memory_on_some_of_three_ranks_does_not_change_the_result(start: Start) -> None:
    late = {"at": "backward", "ranks": [1], "step": 3, "fits": 5}
    first = {"at": "loss", "ranks": [2], "step": 1, "fits": 5}  # found by the search, which is before the first step
    kinds: list[tuple[dict[str, Any], dict[str, Any]]] = [
        (late, {}),
        (late, {"weighted": True, "optimizer": "adam", "buffers": True}),
        (late | {"at": "forward"}, {"twice": True, "buffers": True}),  # the others send buffers in a second call, too
        (late | {"at": "loss"}, {"weighted": True, "buffers": True}),
        (first, {"weighted": True}),
    ]
    run = start("ddpkit", 3, SCRIPT, json.dumps([{"auto": True} | case | kind for case, kind in kinds]))
    assert run.returncode == 0, run.stderr
    expected = start("ddpkit", 3, SCRIPT, json.dumps([UNDISTURBED | kind for _, kind in kinds]))
    for kind, ours, undisturbed in zip(kinds, json.loads(run.stdout), json.loads(expected.stdout), strict=True):
        assert ours["micro_batch"] == 4, kind
        for what in ("weights", "losses"):
            assert ours[what] == pytest.approx(undisturbed[what], abs=1e-12, rel=0), (what, kind)


@pytest.mark.slow
def test_out_of_memory_with_one_sample_says_that_nothing_smaller_exists(start: Start) -> None:
    case = {"at": "forward", "ranks": [1], "step": 3, "fits": 0, "auto": True}
    run = start("ddpkit", 2, SCRIPT, json.dumps([case]))
    assert run.returncode == 1
    assert "CUDA out of memory (a pretence)" in run.stderr
    assert "the micro-batch of 2 is halved" in run.stderr
    assert "hint: there is no smaller micro-batch" in run.stderr  # although it is not rank 0 that says so
