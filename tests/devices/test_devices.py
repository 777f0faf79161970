"""What NVML tells of the GPUs, and what it does not; on machines that are not there, by the real command."""

import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.launching import DDPKIT, PROGRAMS, ROOT, run, seconds, started

pytestmark = pytest.mark.slow

GIB = 1024**3
NOT_A_PROCESS = 4_194_304

Command = Callable[..., "subprocess.CompletedProcess[str]"]
Machine = Callable[[str], dict[str, str]]


def gpu(name: str, used: int = 0, more: str = "") -> str:
    return f"gpu GPU-{name} {80 * GIB} {used * GIB}\n{more}\n"


def shown(ddpkit: Command, env: dict[str, str]) -> list[str]:
    run = ddpkit("devices", env=env)
    assert run.returncode == 0, run.stderr
    return [line.rstrip() for line in run.stdout.splitlines()]


def without_uuids(lines: list[str]) -> list[str]:
    """The table without a column that is different in each test."""
    return [re.sub(r"((GPU|MIG)-\S*|UUID) +(?=state|free|busy)", "", line) for line in lines]


def test_devices_on_a_machine_without_gpus_prints_one_line(ddpkit: Command) -> None:
    assert shown(ddpkit, {"FAKE_NVML": ""}) == ["this machine has no NVIDIA GPU, or no driver for one"]


def test_devices_shows_memory_load_numa_node_and_processes(ddpkit: Command, machine_of: Machine) -> None:
    waits = ["cat", "-", "\x1b[2J"]  # what a terminal would obey is not passed on
    with started(*waits, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as other:
        busy = gpu("a", 41, f"load 98\nnode 1\nprocess {other.pid} {40 * GIB}\nprocess {NOT_A_PROCESS} {GIB}")
        lines = shown(ddpkit, machine_of(busy + gpu("b", 0, "load 0\nnode 0") + gpu("c", 9)))
    name = run("id", "-un").stdout.strip()
    assert without_uuids(lines) == [
        "GPU  name      memory used     load  NUMA  state",
        "0    Fake GPU  41.0 of 80 GiB  98 %  1     busy: 2 processes",
        f"      40.0 GiB, pid {other.pid} of {name}: cat -  [2J",
        f"      1.0 GiB, pid {NOT_A_PROCESS} (user and command unknown)",
        "1    Fake GPU  0.0 of 80 GiB   0 %   0     free",
        "2    Fake GPU  9.0 of 80 GiB   ?     ?     busy: memory is in use, perhaps by a process in another container",
    ]


def test_devices_omits_lost_gpus_and_marks_unknown_values(ddpkit: Command, machine_of: Machine) -> None:
    lines = shown(ddpkit, machine_of(f"gpu GPU-a 0 0\n{gpu('b', 0, 'lost')}{gpu('c')}"))
    assert without_uuids(lines) == [
        "GPU  --gpus  name      memory used    load  NUMA  state",
        "0    0       Fake GPU  ?              ?     ?     free",
        "2    1       Fake GPU  0.0 of 80 GiB  ?     ?     free",
    ]


def test_devices_shows_links_like_nvidia_smi(ddpkit: Command, machine_of: Machine) -> None:
    """Two pairs with NVLinks of their own, each pair at a PCIe switch, the pairs on different NUMA nodes."""
    gpus = [gpu(name, 0, f"nvlink {other}\nnvlink {other}") for name, other in zip("abcd", (1, 0, 3, 2), strict=True)]
    levels = "level 0 1 10\nlevel 2 3 20\nlevel 0 2 50\nlevel 0 3 50\nlevel 1 2 50\nlevel 1 3 50\n"
    lines = shown(ddpkit, machine_of("".join([*gpus, levels])))
    assert lines[6:] == [
        "links",
        "  0: NV2 to 1, SYS to 2-3",
        "  1: NV2 to 0, SYS to 2-3",
        "  2: SYS to 0-1, NV2 to 3",
        "  3: SYS to 0-1, NV2 to 2",
        "  (NV: this many NVLinks; SYS: the connection between NUMA nodes)",
    ]


@pytest.mark.parametrize("count", [8, 16])
def test_devices_shows_nvlink_switches_as_links_between_all_gpus(
    ddpkit: Command, machine_of: Machine, count: int
) -> None:
    lines = shown(ddpkit, machine_of("".join(gpu(str(number), 0, "nvlink switch\n" * 18) for number in range(count))))
    assert [line for line in lines if line.endswith("free")] == lines[1 : count + 1]
    assert f"  0: NV18 to 1-{count - 1}" in lines
    assert f"  3: NV18 to 0-2, 4-{count - 1}" in lines


def test_devices_lists_mig_devices_in_place_of_their_gpu(ddpkit: Command, machine_of: Machine) -> None:
    parts = f"node 1\nmig MIG-x {10 * GIB} {GIB // 2}\nmig MIG-y {10 * GIB} {2 * GIB}\nprocess {NOT_A_PROCESS} {GIB}"
    lines = shown(ddpkit, machine_of(gpu("a", 0, parts) + gpu("b", 0, "mig-mode") + gpu("c")))
    assert [line.split("  ")[0] for line in lines[1:]] == ["0:0", "0:1", "", "1", "2"]
    assert re.search(r"Fake GPU MIG 1g.10gb  0.5 of 10 GiB  \?     1     MIG-\S+  free", lines[1])
    assert lines[2].endswith("busy: 1 process")
    assert lines[4].endswith("in MIG mode without MIG devices")


def test_devices_shows_positions_in_the_users_mask(ddpkit: Command, machine_of: Machine) -> None:
    environment = machine_of(gpu("a") + gpu("b") + gpu("c")) | {"CUDA_VISIBLE_DEVICES": "2,GPU-a"}
    lines = shown(ddpkit, environment)
    assert [line.split()[:2] for line in lines[:4]] == [["GPU", "--gpus"], ["0", "1"], ["1", "-"], ["2", "0"]]
    assert lines[5] == "CUDA_VISIBLE_DEVICES=2,GPU-a: --gpus can use 2 of 3 GPUs"


def test_devices_refuses_arguments_and_has_help(ddpkit: Command) -> None:
    assert "unrecognized arguments: all" in ddpkit("devices", "all").stderr
    assert "links and processes" in " ".join(ddpkit("devices", "--help").stdout.split())


def test_devices_imports_neither_torch_nor_pydantic(machine_of: Machine) -> None:
    code = "import os, sys; from ddp_kit.cli import devices; devices.text(os.environ)"
    names = "print([name for name in ('torch', 'pydantic', 'rich') if name in sys.modules])"
    done = run(sys.executable, "-c", f"{code}; {names}", env=machine_of(gpu("a")), cwd=ROOT)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


@pytest.mark.parametrize("count", [8, 16])
def test_gpu_choice_and_core_binding_follow_nvml(machine_of: Machine, count: int) -> None:
    """Every second GPU is busy; half of them are near the one half of 64 cores, the other half near the other."""
    lines = ""
    for number in range(count):
        cores = "ffffffff" if number < count // 2 else "ffffffff00000000"
        lines += gpu(str(number), 0, f"cpus {cores}" + f"\nprocess {NOT_A_PROCESS} 1" * (number % 2))
    done = run(sys.executable, PROGRAMS / "chooses_gpus.py", env=machine_of(lines))
    assert done.returncode == 0, done.stderr
    half = count // 4
    assert done.stdout.splitlines() == [
        f"{','.join(map(str, range(0, count, 2)))} {32 // half}",
        str([(0, 31)] * half + [(32, 63)] * half),
    ]


def test_devices_with_an_unwritable_output_prints_no_traceback(machine: Callable[..., dict[str, str]]) -> None:
    with Path("/dev/full").open("w") as full, started(DDPKIT, "devices", env=machine(0), stdout=full) as devices:
        _, errors = devices.communicate(timeout=seconds(60))
    assert "Traceback" not in errors
