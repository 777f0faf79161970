"""A launch from a kept process of which any process is killed at any moment ends with one verdict, and leaves nothing.

`python -m tests.support.killed` kills fifty of each.
"""

import pytest

from tests.support.killed import VICTIMS, Victim, killed
from tests.support.launching import seconds

pytestmark = [pytest.mark.slow, pytest.mark.timeout(seconds(300))]


@pytest.mark.parametrize("victim", VICTIMS)
def test_launch_with_a_process_killed_at_random_leaves_nothing_and_the_next_one_works(victim: Victim) -> None:
    assert killed(victim, runs=3, seed=0).total() == 3
