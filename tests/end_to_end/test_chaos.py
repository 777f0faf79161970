"""A run that is killed at random ends as if nothing had been. `make chaos` has a hundred of them."""

from pathlib import Path

import pytest

from tests.support.chaos import check_samples, disturbed, undisturbed
from tests.support.launching import seconds

pytestmark = [pytest.mark.slow, pytest.mark.timeout(seconds(600))]


def test_run_killed_at_random_ends_bitwise_identical_with_every_sample_once(tmp_path: Path) -> None:
    expected = undisturbed(tmp_path / "undisturbed")
    ended, faults = disturbed(tmp_path / "disturbed", seed=0)
    assert ended == expected, faults
    check_samples(tmp_path / "disturbed")
