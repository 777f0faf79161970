"""Print a number of lines, then create a file named after the rank. Arguments: the number, and the file's folder."""

import os
import sys
from pathlib import Path

for number in range(int(sys.argv[1])):
    print(number, "x" * 40)
Path(sys.argv[2], os.environ["RANK"]).touch()
