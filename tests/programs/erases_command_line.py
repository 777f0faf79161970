"""Erase the command line that the system shows of this process, print a line and wait."""

import ctypes
import signal
from pathlib import Path

fields = Path("/proc/self/stat").read_text().rpartition(") ")[2].split()
start, end = int(fields[45]), int(fields[46])  # where the command line is
ctypes.memset(start, 0, end - start)
print("ready", flush=True)
signal.pause()
