"""The command `ray`, with a node that may take long to start. Arguments: the seconds, then those of `ray`.

Ray itself gives up after 30 s, whatever is set.
"""

import sys
import time

from ray._private import services
from ray.scripts.scripts import main

look, deadline = services.get_node, time.monotonic() + float(sys.argv.pop(1))


def get_node(*arguments):
    while True:
        try:
            return look(*arguments)
        except RuntimeError:  # not yet
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


services.get_node = get_node
sys.exit(main())
