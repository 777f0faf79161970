"""Start a child, print its process id, and end the first thread of this process while another one lives.

So does a killed process whose other threads take longer to end: it stays a zombie, and keeps its child.
"""

import ctypes
import platform
import subprocess
import threading
import time

threading.Thread(target=time.sleep, args=[1000]).start()
print(subprocess.Popen(["sleep", "1000"], stdout=subprocess.DEVNULL).pid, flush=True)
ctypes.CDLL(None).syscall({"x86_64": 60, "aarch64": 93}[platform.machine()], 0)  # exit, of this thread alone
