"""The script that faults.py launches: `python faults_worker.py FOLDER raise|far|speak|stubborn`.

`raise`: an exception on rank 3 in the middle of a loop of all_reduces. `far`: exit code 7 on the last rank. `speak`:
100,000 lines. `stubborn`: two data loader workers that ignore SIGTERM, and a grandchild in a session of its own.
"""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

folder, what = Path(sys.argv[1]), sys.argv[2]
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def note(name: str) -> None:
    new = folder / f"{name}.new"
    new.write_text(str(time.monotonic()))  # one clock for all processes of this machine
    new.rename(folder / name)


if what == "speak":
    for number in range(100_000):
        print(f"rank {rank} line {number} {'x' * 60}")
    sys.exit()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch.utils.data import DataLoader, Dataset  # noqa: E402

dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)


class Endless(Dataset):
    def __len__(self) -> int:
        return 10**8

    def __getitem__(self, index: int) -> torch.Tensor:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return torch.ones(1000)


if what == "stubborn":
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
    for number, _ in enumerate(DataLoader(Endless(), num_workers=2)):
        if number == 8:
            note(f"ready.{rank}")
elif rank == (3 if what == "raise" else size - 1):
    note("failed")
    if what == "raise":
        raise ValueError("no luck")
    sys.exit(7)
for _ in range(100_000):
    dist.all_reduce(total)
