"""Tensors shared with processes that the script starts, and a process group of one."""

import json
import os
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def doubles(_: int, shared: torch.Tensor, asked: Any, answered: Any) -> None:
    """Double what is shared, and answer with a tensor; live until it was read."""
    shared *= 2
    answered.put(asked.get() + torch.get_num_threads())
    asked.get()


def through(method: str) -> dict[str, object]:
    context = mp.get_context(method)
    shared, asked, answered = torch.ones(2).share_memory_(), context.Queue(), context.Queue()
    started = mp.start_processes(doubles, (shared, asked, answered), nprocs=1, join=False, start_method=method)
    asked.put(torch.tensor([1.0, 2.0]))
    answer = answered.get().tolist()
    asked.put(None)
    while not started.join():
        pass
    return {"shared": shared.tolist(), "answer": answer}


if __name__ == "__main__":
    seen: dict[str, object] = {method: through(method) for method in ("fork", "spawn")}
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    total = torch.ones(3)
    dist.all_reduce(total)
    dist.destroy_process_group()
    print(json.dumps(seen | {"all-reduce": total.tolist()}))
