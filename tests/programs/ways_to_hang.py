"""Functions in which a process makes no progress. Imported by the programs of test_hangs.py."""

import ctypes
import os
import re
import signal
import time


def regex() -> None:
    re.match(r"(a+)+$", "a" * 40 + "b")


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def sleep() -> None:
    time.sleep(600)


def pause() -> None:
    ctypes.CDLL(None).pause()
