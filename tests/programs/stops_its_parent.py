"""Send SIGTERM to the parent again and again, on two of three ranks, as preemption handlers do, and end at SIGTERM.

Arguments: a pipe for a line, and one from which a rank reads a byte before it begins.
"""

import os
import signal
import sys
import time
from pathlib import Path


def tell_parent():
    for _ in range(20 * (os.environ["RANK"] != "2")):
        os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(0.02)


def on_sigterm(number, frame):
    os.write(1, b"told to stop\n")
    tell_parent()  # a second signal to the launcher would end the ranks here
    sys.exit(75)


signal.signal(signal.SIGTERM, on_sigterm)
Path(sys.argv[1]).write_text("ready\n")
os.read(os.open(sys.argv[2], os.O_RDONLY), 1)
tell_parent()
signal.pause()
