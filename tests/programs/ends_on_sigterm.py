"""Wait for signals, print them, and end at SIGTERM. Argument: a pipe for a line.

CODE: the exit code. DEAF: the rank without a handler of SIGUSR1.
"""

import os
import signal
import sys
from pathlib import Path

from say import say

rank = os.environ["RANK"]


def exit_on_signal(number, frame):
    say("told", rank, signal.Signals(number).name)
    sys.exit(int(os.environ.get("CODE", "0")))


if rank != os.environ.get("DEAF"):
    signal.signal(signal.SIGUSR1, lambda number, frame: say("warned", rank))
signal.signal(signal.SIGTERM, exit_on_signal)
wakes, wake = os.pipe()
os.set_blocking(wake, False)
signal.set_wakeup_fd(wake)
Path(sys.argv[1]).write_text("ready\n")
while True:
    os.read(wakes, 1)  # not signal.pause(), which a signal just before it would not end
