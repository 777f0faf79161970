"""Sleep on rank 1 uninterruptibly, as the parent of a vfork does until its child ends, and on the others as usual."""

import ctypes
import os
import time

CLONE_VFORK, SIGCHLD = 0x4000, 17
if os.environ["RANK"] == "1":
    clone = {"x86_64": 56, "aarch64": 220}[os.uname().machine]
    if ctypes.PyDLL(None).syscall(clone, CLONE_VFORK | SIGCHLD, 0, 0, 0, 0) == 0:
        time.sleep(600)
        os._exit(0)
time.sleep(600)
