"""Multiply matrices in four threads, which end later than the first one does. Argument: a pipe for a line."""

import subprocess
import sys
import threading
import time
from pathlib import Path

import torch


def busy():
    matrix = torch.ones(300, 300)
    while True:
        torch.mm(matrix, matrix)


for _ in range(4):
    threading.Thread(target=busy, daemon=True).start()
for _ in range(2):
    subprocess.Popen(["sleep", "1000"])
Path(sys.argv[1]).write_text("started\n")
time.sleep(1000)
