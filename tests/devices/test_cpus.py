"""Which cores there are for a launch, read from the files of a machine that has others than this one."""

import os
from pathlib import Path

import pytest

from ddp_kit.devices import cpus
from ddp_kit.devices.cpus import Cpus


def files(root: Path, contents: dict[str, str]) -> Path:
    for name, text in contents.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


def test_cores_are_those_of_the_launchers_affinity(tmp_path: Path) -> None:
    assert set(cpus.here().core_of) == os.sched_getaffinity(0)


def test_threads_of_one_core_are_counted_once(tmp_path: Path) -> None:
    usable = sorted(os.sched_getaffinity(0))
    siblings = {
        f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": f"{usable[0]},999\n" for cpu in usable
    }
    assert set(cpus.here(files(tmp_path, siblings)).core_of.values()) == {usable[0]}
    assert dict(cpus.here(tmp_path / "empty").core_of) == {cpu: cpu for cpu in usable}


@pytest.mark.parametrize(
    ("contents", "quota"),
    [
        ({}, None),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/cpu.max": "250000 100000\n"}, 2.5),
        (
            {
                "proc/self/cgroup": "0::/a\n",
                "sys/fs/cgroup/a/cpu.max": "max 100000\n",
                "sys/fs/cgroup/cpu.max": "400000 100000",
            },
            4.0,
        ),
        (
            {
                "proc/self/cgroup": "4:memory:/m\n2:cpu,cpuacct:/docker/1234\n",  # a path of the host's
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "300000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
                "sys/fs/cgroup/cpu/m/cpu.cfs_quota_us": "100000\n",
                "sys/fs/cgroup/cpu/m/cpu.cfs_period_us": "100000\n",
            },
            3.0,
        ),
        (
            {
                "proc/self/cgroup": "1:cpu:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            None,
        ),
    ],
    ids=["none", "v2", "v2, of a group around", "v1, in a container", "v1, unlimited"],
)
def test_quota_is_the_smallest_of_all_enclosing_control_groups(
    tmp_path: Path, contents: dict[str, str], quota: float | None
) -> None:
    assert cpus.here(files(tmp_path, contents)).quota == quota


def test_quota_is_divided_among_the_processes() -> None:
    core_of = {cpu: cpu for cpu in range(32)}
    assert cpus.threads_each(Cpus(core_of), [()] * 4) == 8
    assert cpus.threads_each(Cpus(core_of, quota=10.5), [()] * 4) == 2
    assert cpus.threads_each(Cpus(core_of, quota=0.5), [()] * 4) == 1
