"""Changes of gradients and weights around the optimizer step have the same effect at every placement; see hooks.py.

Or it is refused in words: hooks of an optimizer that does not hold the model's own, whole parameters.
"""

import json
import subprocess
from collections.abc import Callable

import pytest

from ddp_kit.config.settings import STRATEGIES
from tests.programs import hooks
from tests.support.launching import PROGRAMS

Start = Callable[..., "subprocess.CompletedProcess[str]"]
SCRIPT = PROGRAMS / "hooks.py"


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_gradient_and_weight_changes_at_every_placement_equal_one_process(start: Start, ranks: int) -> None:
    assert hooks.PARALLEL.keys() == STRATEGIES.keys(), "the table has all placements"
    expected = {name: hooks.reference(*changes[:2]) for name, changes in {**hooks.CALLBACKS, **hooks.HOOKS}.items()}
    run = start("ddpkit", ranks, SCRIPT)
    assert run.returncode == 0, run.stderr
    rows = [json.loads(line) for line in run.stdout.splitlines() if line.startswith('["')]
    placements = [
        (strategy, offload) for strategy, offload, name, found in rows if not name and isinstance(found, list)
    ]
    if ranks > 1:
        assert {strategy for strategy, _ in placements} == {*(hooks.PARALLEL if ranks == 2 else hooks.COMBINED)}
        assert {*hooks.MEMORY} <= {offload for _, offload in placements}
    changed = {(strategy, offload, name): found for strategy, offload, name, found in rows if name}
    assert {*changed} == {(*placement, name) for placement in placements for name in hooks.names(ranks)}
    problems = {}
    for (strategy, offload, name), found in changed.items():
        whole = not offload and (ranks == 1 or strategy in ("ddp", "device_map"))
        if name in hooks.HOOKS and not whole:
            assert "has hooks around its step (predictions_after.<locals>.<lambda>)" in found
            assert "on_gradients(trainer, gradients)" in found
            assert ranks == 4 or (offload or strategy) in found
        elif name == "skipped on the model" and "on_gradients replaced `grad` of blocks." in found:
            assert not whole, "the optimizer holds the model's own parameters"
            assert "gradients[name] = other" in found
        elif isinstance(found, str) or found != [pytest.approx(row) for row in expected[name]]:
            problems[strategy, offload, name] = found
    assert not problems
