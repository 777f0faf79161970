"""What the agent's loop waits for."""

import subprocess
import sys

import pytest

WAITS = """
import signal, threading
from ddp_kit.launcher.agent.inbox import Inbox

inbox = Inbox()
inbox.wake_on_signals()
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, inbox.on_stop_signal)

def both():  # as when the kernel gives them to a thread that does not wait for them
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.pthread_kill(threading.get_ident(), number)

threading.Timer(0.2, both).start()
found = []
while len(found) < 2:
    inbox.wait(None)
    while (item := inbox.take()) is not None:
        found.append(item.number.name)
print(sorted(found), inbox.signals)
"""


@pytest.mark.slow
def test_signals_wake_the_one_who_waits_whichever_thread_they_are_given_to() -> None:
    run = subprocess.run([sys.executable, "-c", WAITS], capture_output=True, text=True, timeout=60)
    assert run.stdout == "['SIGINT', 'SIGTERM'] 2\n", run.stderr
