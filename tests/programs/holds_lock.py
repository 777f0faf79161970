"""Hold the lock of a folder until standard input closes. Arguments: the folder; "fork" for a child that stays."""

import os
import sys
from pathlib import Path

from ddp_kit.checkpoint.lock import FolderLock

lock = FolderLock(Path(sys.argv[1]), "their-job", "their-job/run")
lock.acquire(resuming=True)
ours, theirs = os.pipe()
child = os.fork() if "fork" in sys.argv else 1  # as a DataLoader worker
if child == 0:
    os.write(theirs, b"!")
    os.read(0, 1)  # until the test, which has the other end, is over
if child > 1:
    os.read(ours, 1)  # what happens in a fork has happened
print(child, flush=True)
os.read(0, 1)
