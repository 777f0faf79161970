"""Print what Linux says of this process, apart from what differs between any two processes."""

import json
import os
import sys
from pathlib import Path

import torch

from ddp_kit.launcher.warm.facts import facts_of, own_facts

# Lines of /proc/self/status of one process, or of what it has done.
OF_ONE_PROCESS = (
    "Name", "State", "Tgid", "Ngid", "Pid", "PPid", "FDSize", "NStgid", "NSpid", "NSpgid", "NSsid", "Vm", "Rss", "Rss",
    "HugetlbPages", "CoreDumping", "Threads", "SigQ", "SigPnd", "ShdPnd", "SigCgt", "voluntary", "nonvoluntary",
    "x86_Thread_features",
)  # fmt: skip
FILES = (
    "limits", "cgroup", "oom_score_adj", "coredump_filter", "personality", "timerslack_ns", "loginuid", "sessionid",
    "attr/current", "setgroups", "uid_map", "gid_map", "projid_map", "timens_offsets", "mountinfo", "cpuset",
)  # fmt: skip


def attributes() -> dict[str, object]:
    folder = Path("/proc/self")
    lines = (folder / "status").read_text().splitlines()
    found: dict[str, object] = {"lines": [line for line in lines if not line.startswith(OF_ONE_PROCESS)]}
    for name in FILES:
        try:
            found[name] = (folder / name).read_text()
        except OSError as error:
            found[name] = error.errno
    for link in sorted([*(folder / "ns").iterdir(), folder / "root", folder / "cwd"]):
        found[link.name] = str(link.readlink())
    found["scheduling"] = [os.sched_getscheduler(0), os.sched_getparam(0).sched_priority, os.nice(0)]
    return {**found, **facts_of(os.getpid()), **own_facts()}


if __name__ == "__main__":
    assert torch.__version__
    print(json.dumps(attributes()))
    sys.exit(0)
