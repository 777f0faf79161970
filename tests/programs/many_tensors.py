"""Load batches with so many tensors in memory that the process ends slowly. Argument: a pipe for a line."""

import sys
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader

if __name__ == "__main__":
    tensors = [torch.ones(4) for _ in range(200_000)]
    batches = iter(DataLoader(range(10**8), num_workers=2))
    next(batches)
    Path(sys.argv[1]).write_text("started\n")
    for _ in batches:
        time.sleep(0.001)
