"""Match a regular expression that never ends, with the interpreter lock held. Argument: the file for the stacks."""

import re
import sys

from ddp_kit.launcher.warm.worker import write_stacks_on_signal


def work():
    print("there", flush=True)
    re.match(r"(a+)+$", "a" * 40 + "b")


write_stacks_on_signal(sys.argv[1])
work()
