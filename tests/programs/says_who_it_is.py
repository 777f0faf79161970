"""Print on both streams which rank this is, and leave the environment in a file in the current folder."""

import json
import os
import sys
from pathlib import Path

rank, attempt = os.environ["RANK"], int(os.environ["TORCHELASTIC_RESTART_COUNT"])
Path(f"environment.{rank}.{attempt}").write_text(json.dumps(dict(os.environ)))
os.write(1, f"out {rank} of {__name__} {sys.argv[1:]}\napple, {rank}\n".encode())
os.write(2, f"err {rank}\nkiwi {rank}\n".encode())
