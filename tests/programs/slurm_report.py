"""Print the ranks, the node and the arguments of this process as one line of JSON.

Arguments, among others: with "fail" rank 0 exits with 7 and the others do not end; with "fail-once" that happens in the
first attempt alone; with "hang-last" the last task of an array exits with 124.
"""

import json
import os
import sys
import time
from pathlib import Path

variables = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "GROUP_RANK", "SLURMD_NODENAME")}
sys.stdout.write(json.dumps(variables | {"words": sys.argv[1:]}) + "\n")  # one piece, whoever else writes
begun = Path(f"started-on-{variables['SLURMD_NODENAME']}")
is_first = not begun.exists()
begun.touch()
if "hang-last" in sys.argv and os.environ.get("SLURM_ARRAY_TASK_ID") == "1":
    sys.exit(124)
if "fail" in sys.argv or ("fail-once" in sys.argv and is_first):
    while len(list(Path().glob("started-on-*"))) < 2:
        time.sleep(0.05)
    if variables["RANK"] == "0":
        sys.exit(7)
    time.sleep(600)
