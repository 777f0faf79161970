"""Processes that a script starts by itself, and signals that it sends to itself."""

import json
import os
import signal
import subprocess
import sys
from types import FrameType

caught: list[str] = []


def note(number: int, _: FrameType | None) -> None:
    caught.append(signal.Signals(number).name)


def fork_and_exit() -> int:
    """Fork; the copy leaves through python's own end."""
    child = os.fork()
    if child == 0:
        print("from the copy", flush=True)
        sys.exit(7)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


for signal_number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGALRM, signal.SIGCHLD):
    signal.signal(signal_number, note)
    os.kill(os.getpid(), signal_number)
signal.signal(signal.SIGCHLD, signal.SIG_DFL)
code = "import os, sys; print(sys.argv, sys.path[0], sorted(os.listdir('/proc/self/fd')), os.getpgrp() == os.getpid())"
again = subprocess.run([sys.executable, "-c", code, "word"], capture_output=True, text=True)
shell = subprocess.run("exit 3", shell=True)
with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as cat:
    echoed, _ = cat.communicate(b"to cat")
seen = {
    "again": [again.stdout, again.stderr],
    "shell": shell.returncode,
    "cat": echoed.decode(),
    "system": os.system("exit 4"),
}
seen |= {"copy": fork_and_exit(), "caught": caught}
print(json.dumps(seen))
