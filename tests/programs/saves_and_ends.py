"""Save twice, the second time with 80 MB that are still being written, then end. Arguments: the folder; how it ends.

How: "killed", "_exit", "exit" or "error" end the process; "signals" sends signals to its group and its writer and
closes the saver. "forks, killed" and "forks, closes" do so while a forked child has the descriptors of the parent.
"""

import os
import signal
import sys

import torch
from say import say

from ddp_kit.checkpoint.saver import Saver

folder, ending = sys.argv[1:]
if ending == "signals":
    os.setsid()
saver = Saver(folder, keep_last=2)
saver.save(1, {"model": torch.ones(10)})
saver.wait()
say("writer", saver._writer.pid)
saver.save(2, {"model": torch.ones(20_000_000)})
say("begun")
if ending.startswith("forks"):
    child = os.fork()
    if child == 0:
        os.close(1)
        os.close(2)
        signal.alarm(600)  # nothing of it is left, whatever ends the test
        signal.pause()
    say("child", child)
if ending.endswith("killed"):
    os.kill(os.getpid(), signal.SIGKILL)
elif ending == "_exit":
    os._exit(0)
elif ending == "error":
    raise OSError
elif ending == "signals":
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, lambda *_: None)
        os.killpg(0, number)
        os.kill(saver._writer.pid, number)
    saver.close()
    say("closed")
elif ending == "forks, closes":
    saver.close()
    os.kill(child, 0)
    say("closed")
    os.kill(child, signal.SIGKILL)
