"""Launch a function that reads standard input, then read the input of this process."""

import os
import sys

from ddp_kit import launch


def reads():
    assert sys.stdin.read() == ""
    assert os.read(0, 1) == b""
    return input("name? ")


try:
    launch(reads, processes=2)
except EOFError as error:
    print("EOFError", error)
print("still there:", sys.stdin.readline())
