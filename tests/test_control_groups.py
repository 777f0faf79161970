"""The memory that is left, given the machine's memory and the limits of the control groups."""

from pathlib import Path

import pytest

from ddp_kit.control_groups import available_memory

GROUPS = {
    "none": ("0::/", {}, 8_192_000),
    "version 2": (
        "0::/job/step",
        {
            "sys/fs/cgroup/job/memory.max": "6000000",
            "sys/fs/cgroup/job/memory.current": "4000000",
            "sys/fs/cgroup/job/memory.stat": "anon 3000000\ninactive_file 500000\n",
            "sys/fs/cgroup/job/step/memory.max": "max",
        },
        2_500_000,
    ),
    "version 2, more than the machine has": (
        "0::/",
        {"sys/fs/cgroup/memory.max": "90000000", "sys/fs/cgroup/memory.current": "1"},
        8_192_000,
    ),
    "version 2, used up": (
        "0::/",
        {"sys/fs/cgroup/memory.max": "4000", "sys/fs/cgroup/memory.current": "5000"},
        0,
    ),
    "version 1": (
        "4:memory:/job",
        {
            "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "5000000",
            "sys/fs/cgroup/memory/job/memory.usage_in_bytes": "2000000",
            "sys/fs/cgroup/memory/job/memory.stat": "inactive_file 7\ntotal_inactive_file 250000\n",
        },
        3_000_007,
    ),
}


@pytest.mark.parametrize("name", GROUPS)
def test_available_memory_is_the_least_that_a_group_and_the_machine_leave(name: str, tmp_path: Path) -> None:
    groups, files, expected = GROUPS[name]
    meminfo = "MemTotal:       16000 kB\nMemFree:         1000 kB\nMemAvailable:    8000 kB\n"
    for path, content in {"proc/self/cgroup": groups, "proc/meminfo": meminfo, **files}.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(content)
    assert available_memory(tmp_path) == expected
