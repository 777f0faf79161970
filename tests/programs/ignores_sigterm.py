"""Load batches forever, with children that are hard to end.

The rank and its DataLoader workers ignore SIGTERM; a grandchild has left its session, and another its parent, too.
Arguments: a pipe for the process id once all have started; "file_system" for batches in named shared memory.
"""

import os
import signal
import subprocess
import sys
from multiprocessing import shared_memory
from pathlib import Path

import torch
import torch.multiprocessing
from torch.utils.data import DataLoader, Dataset

if "file_system" in sys.argv:
    torch.multiprocessing.set_sharing_strategy("file_system")


class Endless(Dataset):
    def __len__(self):
        return 10**8

    def __getitem__(self, index):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return torch.ones(1000)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    memory = shared_memory.SharedMemory(create=True, size=1000)
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    subprocess.run("setsid sleep 1000 & exit", shell=True)
    batches = iter(DataLoader(Endless(), num_workers=2, batch_size=4))
    for _ in range(8):
        next(batches)
    Path(sys.argv[1]).write_text(f"{os.getpid()}\n")
    for _ in batches:
        pass
