"""A DataLoader whose data set is a class of the script, with every way to start its workers."""

import json
import os
import random
import sys

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info


class Squares(Dataset[dict[str, object]]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> dict[str, object]:
        info = get_worker_info()
        return {
            "square": index * index,
            "worker": None if info is None else [info.id, info.num_workers, info.seed],
            "drawn": [random.random() if info else 0.0, torch.rand(1).item(), float(np.random.rand()) if info else 0.0],
            "threads": torch.get_num_threads(),
            "main": [__name__, sys.argv, sys.path[0]],
            "child": os.getpid() != MAIN if "MAIN" in globals() else None,
        }


def first(items: list[dict[str, object]]) -> dict[str, object]:
    return items[0]


if __name__ == "__main__":
    MAIN = os.getpid()
    seen = {}
    for method in ("none", "fork", "spawn", "forkserver"):
        ways = {"num_workers": 0} if method == "none" else {"num_workers": 2, "multiprocessing_context": method}
        torch.manual_seed(7)
        seen[method] = [*DataLoader(Squares(), collate_fn=first, shuffle=True, **ways)]
    print(json.dumps(seen))
