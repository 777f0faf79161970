"""Log the traceback of an exception that is caught, and print another line on standard error."""

import logging
import sys

logging.basicConfig(format="%(message)s")
try:
    print(1 / 0)
except ZeroDivisionError:
    logging.exception("caught")
print("continues", file=sys.stderr)
