"""Memory for activations is saved under every way of training, and the result stays the same."""

import pytest

from tests.support.launching import PROGRAMS, launch

SCRIPT = PROGRAMS / "activations.py"
RUNS = ("ddp", "auto", "bf16", "fp16", "skip", "fully_shard")


@pytest.mark.slow
def test_activation_memory_settings_train_bitwise_identical_at_two_ranks() -> None:
    run = launch("--nproc-per-node", 2, SCRIPT, *RUNS, timeout=280)
    assert run.returncode == 0, run.stderr[-3000:]
    assert run.stdout.count("same") == 2 * 5 * len(RUNS), run.stdout
    assert "other" not in run.stdout
