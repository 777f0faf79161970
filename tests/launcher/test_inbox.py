"""What the agent's loop waits for."""

import sys

import pytest

from ddp_kit.launcher.agent.nodes import RunningClock
from tests.support.launching import PROGRAMS, run


@pytest.mark.slow
def test_signals_wake_the_waiting_thread_whichever_thread_receives_them() -> None:
    done = run(sys.executable, PROGRAMS / "waits_for_signals.py", timeout=60)
    assert done.stdout == "['SIGINT', 'SIGTERM'] 2\n", done.stderr


def test_running_clock_does_not_count_time_while_suspended() -> None:
    readings = iter([100.0, 101.0, 102.5, 122.5, 123.0, 200.0])
    clock = RunningClock(max_gap=1.5, read=lambda: next(readings))
    assert [clock.now() for _ in range(5)] == [101.0, 102.5, 102.5, 103.0, 103.0]
