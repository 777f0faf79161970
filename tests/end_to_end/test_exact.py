"""The same answer at 1, 2 and 3 ranks: weights, losses, metrics, whatever divides or does not."""

import json
import random
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Start = Callable[..., "subprocess.CompletedProcess[str]"]
SCRIPT = Path(__file__).with_name("exact.py")


def cases(count: int) -> list[dict[str, Any]]:
    draw = random.Random(2)
    corners = [(1, 1, 1), (2, 1, 1), (7, 4, 1), (7, 32, 3), (5, 5, 2), (64, 16, 4)]  # fewer samples than ranks first
    sizes = corners + [(draw.randint(1, 90), draw.randint(1, 40), draw.randint(1, 5)) for _ in range(count)]
    return [
        {
            "samples": samples,
            "global_batch": global_batch,
            "accumulation": accumulation,
            "weighted": draw.random() < 0.5,
            "clip": draw.choice([None, 0.3]),
            "optimizer": draw.choice(["sgd", "adam"]),
            "buffers": draw.random() < 0.3,
            "workers": 1 if number == 3 else 0,
        }
        for number, (samples, global_batch, accumulation) in enumerate(sizes)
    ]


@pytest.mark.slow
def test_weights_losses_and_metrics_are_the_same_at_every_number_of_ranks(start: Start) -> None:
    tried = cases(30)
    runs = {processes: start("ddpkit", processes, SCRIPT, json.dumps(tried)) for processes in (1, 2, 3)}
    for run in runs.values():
        assert run.returncode == 0, run.stderr
    alone, *several = (json.loads(run.stdout) for run in runs.values())
    for others in several:
        for case, expected, found in zip(tried, alone, others, strict=True):
            assert found["counts"] == expected["counts"], case
            for what in ("weights", "losses", "metrics"):
                assert found[what] == pytest.approx(expected[what], abs=1e-11, rel=0, nan_ok=True), (what, case)
