"""The benchmarks still run to their end, as short as they can be. What they measure is not looked at."""

import sys

import pytest

from tests.support.launching import ROOT, run, seconds

pytestmark = [pytest.mark.slow, pytest.mark.timeout(seconds(700))]


@pytest.mark.parametrize(
    "words",
    [
        "checkpoint.py --ways ddpkit",
        "launch.py",
        "losses.py",
        "published.py",
        "train.py --only mlp --peers by_hand,ddpkit",
    ],
)
def test_benchmark_runs_to_its_end(words: str) -> None:
    name, *flags = words.split()
    done = run(sys.executable, ROOT / "benchmarks" / name, "--quick", *flags, cwd=ROOT, timeout=seconds(600))
    assert done.returncode == 0, done.stderr
    assert " ddpkit " in done.stdout
