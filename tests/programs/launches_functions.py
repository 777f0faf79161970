"""Launch functions that return a result, raise an exception, and capture a lock."""

import os
import threading

import function_helpers  # next to this script
import torch
import torch.distributed as dist

from ddp_kit import UsageError, launch


def total(scale, *, times=lambda x: function_helpers.twice(x)):
    dist.init_process_group("gloo")
    value = torch.ones(1) * scale * (1 + dist.get_rank())
    dist.all_reduce(value)
    print(f"rank {dist.get_rank()} is done")
    dist.destroy_process_group()
    return times(value), os.environ["WORLD_SIZE"]


value, ranks = launch(total, 2.0, processes=2)
assert (value.item(), ranks) == (12.0, "2")


class OwnError(Exception):
    pass


def fails(kind):
    if os.environ["RANK"] == "1":
        raise kind("no good")
    threading.Event().wait()


try:
    launch(fails, OwnError, processes=2)
except OwnError as error:
    assert str(error) == "no good"
    assert "in fails" in str(error.__cause__), error.__cause__
else:
    raise AssertionError("nothing was raised")

lock = threading.Lock()


def inner():
    return lock


def captures():
    return inner()


try:
    launch(captures)
except UsageError as error:
    assert "lock is a lock" in str(error), error
else:
    raise AssertionError("it was copied")
print("all is well")
