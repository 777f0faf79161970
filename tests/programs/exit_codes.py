"""Exit on rank 1 with another code in each attempt. Arguments: the file of attempts, and the codes."""

import os
import sys
from pathlib import Path

attempts, codes = Path(sys.argv[1]), sys.argv[2:]
if os.environ["RANK"] == "1":
    done = attempts.read_text().split() if attempts.exists() else []
    code = codes[min(len(done), len(codes) - 1)]
    with attempts.open("a") as file:
        file.write(f"{code} ")
    if code == "137":
        os.kill(os.getpid(), 9)
    sys.exit(int(code))
