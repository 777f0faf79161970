"""The MFU does not depend on how the model is spread over ranks."""

import re

import pytest

from tests.support.launching import PROGRAMS, launch

SCRIPT = PROGRAMS / "utilised.py"


@pytest.mark.slow
def test_flops_under_every_strategy_are_those_of_the_plain_model() -> None:
    run = launch("--nproc-per-node", 2, SCRIPT, timeout=280)
    assert run.returncode == 0, run.stderr[-3000:]
    found = re.findall(r"(\w+): (\d+|none) (same|other)", run.stdout)
    first, rest = 2 * 8 * 8, 2 * (2 * 2 * 8 * 16 + 8)
    per_device = (2 * first + 3 * rest) // 2
    expected = dict.fromkeys(("ddp", "zero1", "fsdp", "tensor"), per_device)
    expected["pipeline"] = per_device + first // 2  # the second stage also runs the layer before the blocks
    assert sorted(found) == sorted([(name, str(flops), "same") for name, flops in expected.items()] * 2), run.stdout
