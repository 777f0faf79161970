"""What the agent's loop waits for."""

import sys

import pytest
from launching import run

from ddp_kit.launcher.agent.nodes import RunningClock

WAITS = """
import signal, sys, threading, time
from ddp_kit.launcher.agent.inbox import Inbox

inbox = Inbox()
inbox.wake_on_signals()
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, inbox.on_stop_signal)

waiting = threading.get_ident()

def both():  # as when the kernel gives them to a thread that does not wait for them
    while sys._current_frames()[waiting].f_code.co_name != "wait_readable":
        time.sleep(0.01)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.pthread_kill(threading.get_ident(), number)

threading.Thread(target=both).start()
found = []
while len(found) < 2:
    inbox.wait(None)
    while (item := inbox.take()) is not None:
        found.append(item.number.name)
print(sorted(found), inbox.signals)
"""


@pytest.mark.slow
def test_signals_wake_the_one_who_waits_whichever_thread_they_are_given_to() -> None:
    done = run(sys.executable, "-c", WAITS, timeout=60)
    assert done.stdout == "['SIGINT', 'SIGTERM'] 2\n", done.stderr


def test_running_clock_does_not_count_the_time_in_which_its_process_was_suspended() -> None:
    readings = iter([100.0, 101.0, 102.5, 122.5, 123.0, 200.0])
    clock = RunningClock(max_gap=1.5, read=lambda: next(readings))
    assert [clock.now() for _ in range(5)] == [101.0, 102.5, 102.5, 103.0, 103.0]
