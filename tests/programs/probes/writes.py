"""Writes to its standard streams in every way: python's, the system's, C's, and those of a program it starts."""

import ctypes
import os
import subprocess
import sys

libc = ctypes.CDLL(None)
for number, stream in ((1, sys.stdout), (2, sys.stderr)):
    print("printed, and ünïcode", file=stream)
    os.write(number, b"written\n")
    stream.buffer.write(b"through the buffer\n")
    subprocess.run(f"echo from a program >&{number}", shell=True)
    print("without an end of line", end="", file=stream)
    os.write(number, b"\xff\x00 bytes that are no text\n")
    print(stream.isatty(), stream.encoding, stream.line_buffering, stream.write_through, file=stream)
print("x" * 300_000)
libc.printf(b"left in C's buffer\n")
