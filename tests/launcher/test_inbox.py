"""What the agent's loop waits for."""

import sys

import pytest
from launching import run

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
