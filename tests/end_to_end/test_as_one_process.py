"""What ranks share: scenarios at 1 to 3 ranks against a plain loop over whole global batches."""

import json
import re
import subprocess
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest

from tests.programs import as_one_process
from tests.support.launching import PROGRAMS

Start = Callable[..., "subprocess.CompletedProcess[str]"]
SCRIPT = PROGRAMS / "as_one_process.py"
NOT_BY_HAND = ("a_step_that_is_left_out", "the_compiler_sees_the_wrapper")


def found_by(start: Start, ranks: int) -> dict[str, list[Any]]:
    """What each rank has found, by the scenario's name."""
    run = start("ddpkit", ranks, SCRIPT)
    assert run.returncode == 0, run.stderr
    found: dict[str, list[Any]] = defaultdict(list)
    for line in run.stdout.splitlines():
        _, name, values = json.loads(line)
        found[name].append(values)
    assert all(len(each) == ranks for each in found.values())
    return found


@pytest.mark.parametrize("scenario", [each for each in as_one_process.EXACT if each.__name__ not in NOT_BY_HAND])
def test_scenario_on_one_process_trains_like_a_plain_loop(
    scenario: Callable[[], list[float]], monkeypatch: Any
) -> None:
    one = scenario()
    monkeypatch.setattr(as_one_process, "Training", as_one_process.ByHand)
    assert one == pytest.approx(scenario(), abs=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [3, 2])
def test_scenario_on_several_ranks_has_the_same_result_or_is_refused(start: Start, ranks: int) -> None:
    alone = found_by(start, 1)
    found = found_by(start, ranks)
    assert found["the_compiler_sees_the_wrapper"] == [[1.0]] * ranks
    for each in as_one_process.EXACT:
        for values in found[each.__name__]:
            assert values == pytest.approx(alone[each.__name__][0], abs=1e-9), each.__name__
    for each, said in as_one_process.REFUSED.items():
        for values in found[each.__name__]:
            assert said in values if said else values == [], (each.__name__, values)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "ranks", "said"),
    [
        ("ddp", "one", "rank 0 (it did not make this call"),
        ("fsdp", "one", "rank 0 (it did not make this call"),
        ("pipeline", "one", "on rank 1, but a pipeline broadcasts it before each step"),
        ("ddp", "both", "rank 0 at a comparison of buffers, because they changed: 0.table from (2, 2) float32 to (3"),
    ],
)
def test_buffer_whose_shape_changes_on_some_ranks_is_named(start: Start, strategy: str, ranks: str, said: str) -> None:
    run = start("ddpkit", 2, PROGRAMS / "growing_buffer.py", strategy, ranks)
    assert run.returncode == 1, run.stderr
    where = "the shape of the buffer" if strategy == "pipeline" else "a comparison of buffers, because they changed:"
    assert re.search(rf"{where} 0.table .*from \(2, 2\) (torch\.)?float32 to \(4, 2\) (torch\.)?float32", run.stderr)
    assert said in run.stderr
    assert "register_buffer(..., persistent=False)" in run.stderr
