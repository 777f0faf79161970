"""Take memory on rank 1 until the kernel kills it; the others wait."""

import os
import signal

if os.environ["RANK"] == "1":
    blocks = []
    while True:
        blocks.append(bytearray(b"x") * (64 << 20))
signal.pause()
