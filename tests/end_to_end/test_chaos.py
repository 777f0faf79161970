"""Runs that are killed at random end as if nothing had been. `make chaos` has a hundred of them."""

from pathlib import Path

import pytest
from chaos import check_samples, disturbed, undisturbed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_runs_killed_at_random_end_with_the_same_bits_and_every_sample_once(tmp_path: Path) -> None:
    expected = undisturbed(tmp_path / "undisturbed")
    for seed in range(2):
        ended, faults = disturbed(tmp_path / str(seed), seed)
        assert ended == expected, f"seed {seed}: {faults}"
        check_samples(tmp_path / str(seed))
