"""Wait in an inbox for two signals that the kernel delivers to another thread, and print them."""

import signal
import sys
import threading
import time

from ddp_kit.launcher.agent.inbox import Inbox

inbox = Inbox()
inbox.wake_on_signals()
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, inbox.on_stop_signal)

waiting = threading.get_ident()


def send_both():  # as when the kernel gives them to a thread that does not wait for them
    while sys._current_frames()[waiting].f_code.co_name != "wait_readable":
        time.sleep(0.01)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.pthread_kill(threading.get_ident(), number)


threading.Thread(target=send_both).start()
found = []
while len(found) < 2:
    inbox.wait(None)
    while (item := inbox.take()) is not None:
        found.append(item.number.name)
print(sorted(found), inbox.signals)
