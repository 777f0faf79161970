"""`ddpkit doctor`: each check on a machine made up of files and records, and the real command on this one."""

import getpass
import json
import os
import re
import resource
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from ddp_kit.devices.gpus import Gpu
from ddp_kit.doctor import checks, machine
from ddp_kit.doctor import command as doctor
from ddp_kit.doctor.checks import CheckResult, Status
from ddp_kit.doctor.machine import Card, Driver, Machine, ProbeResult, Probes
from ddp_kit.texts import GIB
from tests.support.launching import clean_environment, free_port, run, seconds, started

Command = Callable[..., "subprocess.CompletedProcess[str]"]

TORCH = {"version": "2.13.0", "cuda": "12.8", "architectures": ["sm_80", "sm_90", "compute_90"], "nccl": "2.27.3"}
TEN_GIB = (10 * GIB, 10 * GIB)


def gpu(index: int, uuid: str = "") -> Gpu:
    return Gpu(index, uuid or f"GPU-{index}{index}", "H100", 80 * GIB, memory_used=0, processes=0)


def driver(count: int) -> Driver:
    cards = tuple(Card(gpu(index), ecc_errors=0, capability=(9, 0)) for index in range(count))
    return Driver(version="570.1", cuda=(12, 8), cards=cards)


def said(error: str = "", **facts: object) -> Callable[[], ProbeResult]:
    return lambda: ProbeResult(facts, error)


ALL_WELL = Probes(
    host=said(addresses=["10.0.0.1"], own=True),
    torch=said(**TORCH),
    gloo=said(),
    nccl=said(),
    products={"GPU-00": said(), "GPU-11": said()},
)


@pytest.fixture
def healthy(tmp_path: Path) -> Machine:
    """A machine on which all is well, with two GPUs."""
    for folder in ("proc/self", "sys/fs/cgroup", "dev/shm", "checkpoints"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "proc/meminfo").write_text(f"MemFree: 1 kB\nMemTotal: {64 * 1024**2} kB\n")
    (tmp_path / "proc/self/cgroup").write_text("0::/\n")
    return Machine(
        env={},
        checkpoints=tmp_path / "checkpoints",
        driver=driver(2),
        probes=ALL_WELL,
        host="node1",
        python=(3, 12, 4),
        cores=16,
        usable_cores=16,
        open_files=(65536, 65536),
        locked_memory=(-1, -1),
        clock_synchronised=True,
        space=lambda _: TEN_GIB,
        kept_processes="1 process kept",
        root=tmp_path,
    )


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def assert_result(result: CheckResult | None, status: Status, *words: str) -> None:
    assert result is not None
    assert result.status == status, result
    for word in words:
        assert word in f"{result.found} -> {result.fix}"
    assert bool(result.fix) == (status != Status.OK), "what is wrong comes with what fixes it, and nothing else does"


def test_doctor_on_a_good_machine_reports_ok_for_every_check(healthy: Machine) -> None:
    results = [check(healthy) for name, check in doctor.CHECKS.items() if name != "ports"]
    assert [result for result in results if result is None or result.status != Status.OK] == []


def test_doctor_without_a_gpu_reports_one_line(healthy: Machine) -> None:
    healthy = replace(
        healthy, driver=Driver(error="NVML Shared Library Not Found", absent=True), probes=replace(ALL_WELL, nccl=None)
    )
    assert_result(checks.driver(healthy), Status.OK, "no NVIDIA GPU: training runs on the CPU")
    of_gpus = (
        checks.visible_gpus,
        checks.orphaned_processes,
        checks.ecc,
        checks.torch_and_driver,
        checks.torch_and_gpus,
        checks.nccl,
        checks.all_reduce_of_gpus,
        checks.matrix_product,
    )
    assert [check(healthy) for check in of_gpus] == [None] * len(of_gpus)


def test_doctor_with_an_old_python_fails(healthy: Machine) -> None:
    assert_result(checks.python(replace(healthy, python=(3, 9, 2))), Status.FAIL, "Python 3.9.2", "python3.11 -m")


@pytest.mark.parametrize(
    ("own", "group", "file"),
    [
        ("0::/job/step\n", "job", "memory.max"),
        ("4:memory:/job/step\n0::/\n", "memory/job/step", "memory.limit_in_bytes"),
        ("4:memory:/docker/0123\n0::/\n", "memory", "memory.limit_in_bytes"),  # a container sees its own as the root
    ],
    ids=["version 2, an outer group", "version 1", "version 1, in a container"],
)
@pytest.mark.parametrize(("limit", "status"), [(4 * GIB, Status.OK), (GIB, Status.WARN)])
def test_doctor_reports_the_memory_limit_of_a_container_or_job(
    healthy: Machine, own: str, group: str, file: str, limit: int, status: Status
) -> None:
    (healthy.root / "proc/self/cgroup").write_text(own)
    root = healthy.root / "sys/fs/cgroup"
    write(root / group, **{file: f"{limit}\n"})
    write(root / "job/step", **{"memory.max": "max\n"})
    write(root / "memory", **({} if group == "memory" else {"memory.limit_in_bytes": "9223372036854771712\n"}))
    assert_result(checks.memory(healthy), status, f"{limit / GIB:.1f} GiB of the machine's 64.0 GiB")


def test_doctor_without_a_memory_limit_reports_the_machines_memory(healthy: Machine) -> None:
    (healthy.root / "proc/self/cgroup").write_text("4:memory:/\n0::/\n")
    write(healthy.root / "sys/fs/cgroup/memory", memory__limit_in_bytes="9223372036854771712\n")
    result = checks.memory(healthy)
    assert_result(result, Status.OK)
    assert result.found == "memory: 64.0 GiB"


@pytest.mark.parametrize(
    ("own", "files", "status", "found"),
    [
        ("0::/job\n", {"job/cpu.max": "200000 100000"}, Status.OK, "limited by a quota to 2 of the machine's 16"),
        ("0::/job\n", {"job/cpu.max": "50000 100000"}, Status.WARN, "limited by a quota to 0.5"),
        ("0::/job\n", {"job/cpu.max": "max 100000"}, Status.OK, "CPU cores: 16"),
        (
            "3:cpu,cpuacct:/job\n",
            {"cpu/job/cpu.cfs_quota_us": "150000", "cpu/job/cpu.cfs_period_us": "100000"},
            Status.OK,
            "limited by a quota to 1.5",
        ),
        ("3:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1", "cpu/cpu.cfs_period_us": "100000"}, Status.OK, "CPU cores: 16"),
    ],
)
def test_doctor_reports_the_cpu_quota_of_a_container_or_job(
    healthy: Machine, own: str, files: dict[str, str], status: Status, found: str
) -> None:
    (healthy.root / "proc/self/cgroup").write_text(own)
    for name, text in files.items():
        path = healthy.root / "sys/fs/cgroup" / name
        write(path.parent, **{path.name: text})
    assert_result(checks.cpu(healthy), status, found)


def test_doctor_reports_cores_that_the_process_may_not_use(healthy: Machine) -> None:
    assert_result(checks.cpu(replace(healthy, usable_cores=4)), Status.OK, "4 of the machine's 16 may be used")


@pytest.mark.parametrize(
    ("soft", "hard", "status", "fix"),
    [
        (-1, -1, Status.OK, "no limit"),
        (
            1024,
            1048576,
            Status.WARN,
            "open files: the limit is 1,024; DataLoader workers may need more -> ulimit -n 65536",
        ),
        (1024, 8192, Status.WARN, "ulimit -n 8192"),
        (1024, 1024, Status.WARN, "--ulimit nofile=65536"),
    ],
)
def test_doctor_with_a_low_limit_of_open_files_warns(
    healthy: Machine, soft: int, hard: int, status: Status, fix: str
) -> None:
    assert_result(checks.open_files(replace(healthy, open_files=(soft, hard))), status, fix)


def test_doctor_without_infiniband_accepts_little_locked_memory(healthy: Machine) -> None:
    usual = replace(healthy, locked_memory=(8 * 1024**2, -1))
    assert_result(checks.locked_memory(usual), Status.OK, "8.0 MiB")
    assert_result(
        checks.locked_memory(replace(healthy, locked_memory=(65536, -1))), Status.WARN, "64.0 KiB", "memlock=-1"
    )
    (healthy.root / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    assert_result(
        checks.locked_memory(usual), Status.WARN, "InfiniBand needs it to be unlimited", "ulimit -l unlimited"
    )


def test_doctor_with_small_or_missing_shared_memory_warns_or_fails(healthy: Machine) -> None:
    small = replace(healthy, space=lambda _: (64 * 1024**2, 64 * 1024**2))
    assert_result(checks.shared_memory(small), Status.WARN, "64.0 MiB", "--shm-size=8g", "--ipc=host")
    full = replace(healthy, space=lambda _: (10 * GIB, 0))
    assert_result(checks.shared_memory(full), Status.WARN, "0 bytes of 10.0 GiB", "are free")
    (healthy.root / "dev/shm").rmdir()
    assert_result(checks.shared_memory(healthy), Status.FAIL, "does not exist", "mount -t tmpfs")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_doctor_with_unwritable_shared_memory_fails(healthy: Machine) -> None:
    (healthy.root / "dev/shm").chmod(0o555)
    assert_result(checks.shared_memory(healthy), Status.FAIL, "cannot be written to", "chmod 1777")


def test_doctor_checks_the_checkpoint_folder_and_its_space(healthy: Machine) -> None:
    assert_result(checks.checkpoints(healthy), Status.OK, "10.0 GiB free")
    full = replace(healthy, space=lambda _: (500 * GIB, 3 * GIB))
    assert_result(checks.checkpoints(full), Status.WARN, "3.0 GiB free", "--dir")
    elsewhere = replace(healthy, checkpoints=healthy.checkpoints / "my run")
    assert_result(checks.checkpoints(elsewhere), Status.FAIL, "No such file", f"mkdir -p '{elsewhere.checkpoints}'")
    assert list(healthy.checkpoints.iterdir()) == [], "what was written to try it is gone"
    file = replace(healthy, checkpoints=healthy.checkpoints / "model.pt")
    file.checkpoints.touch()
    assert_result(checks.checkpoints(file), Status.FAIL, "Not a directory", "--dir DIR")


def test_doctor_with_an_unsynchronised_clock_warns(healthy: Machine) -> None:
    assert_result(checks.clock(replace(healthy, clock_synchronised=False)), Status.WARN, "set-ntp true")
    assert_result(checks.clock(replace(healthy, clock_synchronised=None)), Status.OK, "unknown")


def test_doctor_with_a_host_name_that_does_not_resolve_here_warns(healthy: Machine) -> None:
    lost = replace(healthy, probes=replace(ALL_WELL, host=said("gaierror: [Errno -2] Name or service not known")))
    fix = 'echo "127.0.1.1 node1" >> /etc/hosts'
    assert_result(checks.host_name(lost), Status.WARN, "does not resolve", fix)
    foreign = replace(healthy, probes=replace(ALL_WELL, host=said(addresses=["10.0.0.9"], own=False)))
    assert_result(checks.host_name(foreign), Status.WARN, "10.0.0.9, which is not this machine", "getent hosts")


def test_doctor_names_the_process_that_uses_a_port(healthy: Machine) -> None:
    port = free_port()
    with socket.create_server(("127.0.0.1", port)):
        held = checks.ports(healthy, (port,))
        assert_result(held, Status.WARN, f"port {port} is in use by pid {os.getpid()}", f"--master-port {port + 1}")
    assert_result(checks.ports(healthy, (port,)), Status.OK, "free")


@pytest.mark.parametrize(
    ("files", "error", "found", "fix"),
    [
        (["dev/nvidia0"], "Driver Not Loaded", "{}/dev/nvidia0 exists", "sudo modprobe nvidia"),
        (["dev/nvidia0"], "RM has detected an NVML/RM version mismatch.", "version mismatch", "sudo reboot"),
        (["dev/nvidia0"], "GPU is lost", "GPU is lost", "sudo reboot"),
        (["dev/nvidia3", "proc/driver/nvidia/version"], "NVML Shared Library Not Found", "/dev/nvidia3", "--gpus all"),
        (["sys/bus/pci/devices/0000:01:00.0"], "Driver Not Loaded", "0000:01:00.0 on the PCI bus", "sudo modprobe"),
        ([], "GPU is lost", "NVML is installed, but NVIDIA's driver does not work: GPU is lost", "sudo reboot"),
        (["dev/nvidia0"], "", "the driver reports no GPU", "sudo modprobe nvidia"),
    ],
)
def test_doctor_with_a_gpu_without_a_working_driver_fails(
    healthy: Machine, tmp_path: Path, files: list[str], error: str, found: str, fix: str
) -> None:
    for name in files:
        if "pci" in name:
            write(tmp_path / name, vendor="0x10de\n", **{"class": "0x030200\n"})
        else:
            write((tmp_path / name).parent, **{Path(name).name: ""})
    assert_result(checks.driver(replace(healthy, driver=Driver(error=error))), Status.FAIL, found.format(tmp_path), fix)


def test_doctor_ignores_sound_cards_and_control_nodes_of_gpus(healthy: Machine) -> None:
    write(healthy.root / "sys/bus/pci/devices/0000:01:00.1", vendor="0x10de\n", **{"class": "0x040300\n"})
    write(healthy.root / "sys/bus/pci/devices/0000:00:02.0", vendor="0x8086\n", **{"class": "0x030000\n"})
    write(healthy.root / "dev", nvidiactl="")
    assert_result(checks.driver(replace(healthy, driver=Driver(error="no", absent=True))), Status.OK, "no NVIDIA GPU")


@pytest.mark.parametrize(
    ("words", "status", "found"),
    [
        ("1", Status.OK, "CUDA_VISIBLE_DEVICES=1: 1 of 2 GPUs visible"),
        ("1, GPU-0", Status.OK, "2 of 2 GPUs visible"),
        ("", Status.WARN, "hides all GPUs"),
        ("-1", Status.WARN, "hides all GPUs"),
        ("0,7,1", Status.FAIL, "no GPU '7', so CUDA ignores it and the rest of the list; visible GPUs: 1"),
        ("0,0", Status.FAIL, "lists a GPU twice, so CUDA shows no GPU"),
        ("GPU-0,0", Status.FAIL, "lists a GPU twice"),
        ("GPU-77", Status.FAIL, "no GPU 'GPU-77'"),
        ("MIG-1234", Status.OK, "1 MIG device visible"),
    ],
)
def test_doctor_explains_cuda_visible_devices(healthy: Machine, words: str, status: Status, found: str) -> None:
    assert_result(checks.visible_gpus(replace(healthy, env={"CUDA_VISIBLE_DEVICES": words})), status, found)


def with_processes(healthy: Machine, **processes: tuple[int, str]) -> Machine:
    """Its first GPU runs these: by pid, the parent's pid and the command."""
    for name, (parent, command) in processes.items():
        folder = healthy.root / "proc" / name.removeprefix("pid")
        write(folder, stat=f"{folder.name} (a (strange) name) S {parent} 1 1", cmdline=command.replace(" ", "\0"))
    pids = tuple(int(name.removeprefix("pid")) for name in processes)
    cards = (replace(healthy.driver.cards[0], processes=pids), healthy.driver.cards[1])
    return replace(healthy, driver=replace(healthy.driver, cards=cards))


def test_doctor_names_orphaned_processes(healthy: Machine) -> None:
    busy = with_processes(
        healthy, pid70=(1, "python old.py"), pid71=(60, "python new.py"), pid72=(1, "python older.py")
    )
    found = f"GPU 0: pid 70 of {getpass.getuser()}, python old.py; GPU 0: pid 72"
    assert_result(checks.orphaned_processes(busy), Status.WARN, found, "kill 70 72")
    assert "new.py" not in str(checks.orphaned_processes(busy))


def test_doctor_names_a_process_on_a_gpu_that_no_longer_exists(healthy: Machine) -> None:
    gone = with_processes(healthy, pid70=(1, "python"))
    shutil.rmtree(healthy.root / "proc/70")
    assert_result(checks.orphaned_processes(gone), Status.WARN, "GPU 0: pid 70, which is not in", "nvidia-smi")


def test_doctor_in_a_container_does_not_call_workers_of_process_1_orphans(healthy: Machine) -> None:
    write(healthy.root / "proc/1", cmdline="/usr/bin/python3.12\0/usr/bin/ddpkit\0launch\0train.py")
    assert_result(checks.orphaned_processes(with_processes(healthy, pid70=(1, "python train.py"))), Status.OK)


def test_doctor_with_memory_errors_fails(healthy: Machine) -> None:
    cards = (healthy.driver.cards[0], replace(healthy.driver.cards[1], ecc_errors=3))
    bad = replace(healthy, driver=replace(healthy.driver, cards=cards))
    assert_result(checks.ecc(bad), Status.FAIL, "GPU 1: 3 uncorrected", "sudo nvidia-smi --gpu-reset -i 1  #")


@pytest.mark.parametrize(
    ("facts", "cuda", "status", "words"),
    [
        ({"cuda": None}, (12, 8), Status.FAIL, ["built without CUDA", "--force-reinstall torch --index-url", "cu128"]),
        ({"cuda": "13.0"}, (12, 4), Status.FAIL, ["built for CUDA 13.0, and the driver supports up to 12.4", "cu126"]),
        ({"cuda": "12.8"}, (12, 4), Status.OK, ["12.8"]),  # minor versions are compatible
        ({"cuda": "12.8"}, (13, 1), Status.OK, ["13.1"]),
        ({"cuda": "12.8"}, None, Status.OK, ["does not report"]),
    ],
)
def test_doctor_compares_the_build_of_torch_with_the_driver(
    healthy: Machine, facts: Mapping[str, object], cuda: tuple[int, int] | None, status: Status, words: list[str]
) -> None:
    made = replace(
        healthy,
        probes=replace(ALL_WELL, torch=said(**{**TORCH, **facts})),
        driver=replace(healthy.driver, cuda=cuda),
    )
    assert_result(checks.torch_and_driver(made), status, *words)


@pytest.mark.parametrize(
    ("built_for", "capability", "runs"),
    [
        ("sm_80 sm_90", (8, 0), True),
        ("sm_80 sm_90", (8, 9), True),  # its own generation, from its number on
        ("sm_86 sm_90", (8, 0), False),
        ("sm_80 sm_90a", (12, 0), False),
        ("sm_80 compute_90", (12, 0), True),  # portable code
        ("sm_80 sm_90", (7, 0), False),
    ],
)
def test_doctor_compares_the_architectures_of_torch_with_the_gpus(
    healthy: Machine, built_for: str, capability: tuple[int, int], runs: bool
) -> None:
    cards = tuple(replace(card, capability=capability) for card in healthy.driver.cards)
    facts = {**TORCH, "architectures": built_for.split()}
    made = replace(healthy, probes=replace(ALL_WELL, torch=said(**facts)), driver=replace(healthy.driver, cards=cards))
    major, minor = capability
    words = [f"sm_{major}{minor}"] + ([] if runs else [f"built for {built_for}, not for H100", "--force-reinstall"])
    assert_result(checks.torch_and_gpus(made), Status.OK if runs else Status.FAIL, *words)


def test_doctor_with_a_gpu_too_old_for_torch_names_a_package_for_it(healthy: Machine) -> None:
    cards = tuple(replace(card, capability=(6, 1)) for card in healthy.driver.cards)
    old = replace(healthy, driver=replace(healthy.driver, cards=cards))
    assert_result(checks.torch_and_gpus(old), Status.FAIL, "sm_61", "/cu126")


def test_doctor_with_several_gpus_requires_nccl(healthy: Machine) -> None:
    without = replace(healthy, probes=replace(ALL_WELL, torch=said(**{**TORCH, "nccl": None})))
    assert_result(checks.nccl(without), Status.FAIL, "without NCCL", "--force-reinstall")
    assert checks.all_reduce_of_gpus(without) is None
    alone = replace(without, env={"CUDA_VISIBLE_DEVICES": "0"})
    assert_result(checks.nccl(alone), Status.OK, "a single GPU does not need")


@pytest.mark.parametrize(
    ("error", "status", "fix"),
    [
        ("RuntimeError: CUDA error: an illegal instruction", Status.FAIL, "sudo nvidia-smi --gpu-reset -i 1"),
        ("no answer within 60 s", Status.FAIL, "sudo nvidia-smi --gpu-reset -i 1"),
        ("OutOfMemoryError: CUDA out of memory.", Status.WARN, "once the GPU is free"),
        ("RuntimeError: Error 802: system not yet initialized", Status.FAIL, "systemctl start nvidia-fabricmanager"),
    ],
)
def test_doctor_names_a_gpu_that_computes_wrong_or_not_at_all(
    healthy: Machine, error: str, status: Status, fix: str
) -> None:
    products = {"GPU-00": said(), "GPU-11": said(error)}
    broken = replace(healthy, probes=replace(ALL_WELL, products=products))
    assert_result(checks.matrix_product(broken), status, f"GPU 1: {error}", fix)


def test_doctor_with_a_failing_all_reduce_fails(healthy: Machine) -> None:
    broken = replace(healthy, probes=replace(ALL_WELL, gloo=said("no interface"), nccl=said("no NVLink")))
    assert_result(checks.all_reduce(broken), Status.FAIL, "gloo failed: no interface", "GLOO_SOCKET_IFNAME=lo")
    assert_result(checks.all_reduce_of_gpus(broken), Status.FAIL, "NCCL failed: no NVLink", "NCCL_P2P_DISABLE=1")


def late() -> ProbeResult:
    return ProbeResult(error="no answer within 60 s", ran_out_of_time=True)


def test_doctor_says_of_each_check_with_a_time_limit_that_it_ran_out_of_time(
    healthy: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not that the machine is broken: a busy machine is slow."""
    products = {"GPU-00": late, "GPU-11": late}
    slow_torch = replace(healthy, probes=Probes(host=late, torch=late, gloo=late, nccl=late, products=products))
    busy = replace(healthy, probes=replace(slow_torch.probes, torch=said(**TORCH)))
    monkeypatch.setattr(checks.socket, "create_connection", lambda *_: (_ for _ in ()).throw(TimeoutError("timed out")))
    expected = {
        "loopback": "within 5 s",
        "host name": "was not checked: no answer within 60 s",
        "torch": "was not checked: its import gave no answer within 60 s",
        "all-reduce": "did not end: no answer within 60 s",
        "all-reduce of GPUs": "did not end: no answer within 60 s",
        "matrix product": "did not end: GPU 0: no answer within 60 s",
    }
    limited = set()
    for slow in (slow_torch, busy):
        for name, result in doctor.check_all(slow):
            if result.status != Status.OK:
                limited.add(name)
                words = expected[name]
                assert words in result.found
                assert result.fix.startswith("ddpkit doctor  # run it again when this machine is less busy"), name
                assert "pip" not in result.fix
    assert limited == set(expected)


def test_doctor_does_not_wait_for_a_process_that_does_not_answer(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import signal; signal.pause()")
    environment, limit = clean_environment({"PYTHONPATH": str(tmp_path)}), seconds(0.2)
    with machine.started(environment, "localhost", (), limit_seconds=limit) as asked:
        assert asked.torch() == ProbeResult(error=f"no answer within {limit:g} s", ran_out_of_time=True)


def test_doctor_tries_two_whole_gpus_together_but_not_parts_of_one(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import os; raise RuntimeError('sees ' + os.environ['CUDA_VISIBLE_DEVICES'])")
    environment, limit = clean_environment({"PYTHONPATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": "all"}), seconds(60)
    with machine.started(environment, "localhost", [gpu(0), gpu(1), gpu(2), gpu(3, "MIG-3")], limit) as asked:
        assert asked.nccl is not None
        assert asked.nccl().error == "RuntimeError: sees GPU-00,GPU-11"
        assert asked.products["MIG-3"]().error == "RuntimeError: sees MIG-3"
        assert asked.gloo().error == "RuntimeError: sees all"
    with machine.started(environment, "localhost", [gpu(0), gpu(0, "MIG-1"), gpu(0, "MIG-2")], limit) as asked:
        assert asked.nccl is None


def test_doctor_reports_a_check_that_raises_as_a_warning(healthy: Machine) -> None:
    (healthy.root / "proc/meminfo").unlink()
    results = dict(doctor.check_all(healthy))
    assert results["memory"].status == Status.WARN
    assert results["memory"].found.startswith("memory could not be checked: FileNotFoundError")
    assert results["python"].status == Status.OK


@pytest.mark.parametrize(("off", "right"), [(1.0, True), (1.0004, True), (1.01, False), (float("nan"), False)])
def test_probe_product_tolerates_tf32_rounding_and_no_more(
    monkeypatch: pytest.MonkeyPatch, off: float, right: bool
) -> None:
    import torch

    from ddp_kit.doctor import probe

    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor: tensor * off**0.5)  # in place of a GPU
    if right:
        assert probe.product() == {}
    else:
        with pytest.raises(ArithmeticError, match="differs from the CPU's by"):
            probe.product()


@pytest.mark.parametrize(("name", "own"), [("localhost", True), ("192.0.2.1", False)])  # the second is nobody's
def test_doctor_compares_the_host_name_with_the_addresses_of_this_machine(name: str, own: bool) -> None:
    with machine.started(clean_environment(), name, (), seconds(60)) as asked:
        assert asked.host().facts["own"] == own


# The real command on this machine


def broken_torch(folder: Path, text: str) -> dict[str, str]:
    """The environment in which `import torch` runs this text."""
    (folder / "broken").mkdir()
    (folder / "broken" / "torch.py").write_text(text)
    path = os.pathsep.join(filter(None, [str(folder / "broken"), os.environ.get("PYTHONPATH")]))
    return {"PYTHONPATH": path, "FAKE_NVML": ""}


@pytest.mark.slow
def test_doctor_on_a_machine_that_can_train_exits_with_0(ddpkit: Command) -> None:
    run = ddpkit("doctor")
    assert run.returncode == 0, run.stdout + run.stderr
    *lines, last = run.stdout.splitlines()
    assert lines[0] == f"ok    Python {sys.version.split()[0]}"
    assert "ok    all-reduce of 2 processes with gloo works" in lines
    assert all(re.match(r"(ok    |warn  |      -> )\S", line) for line in lines)
    ok, warnings = (sum(line.startswith(status) for line in lines) for status in ("ok", "warn"))
    assert last == f"{ok} ok, {warnings} warning{'' if warnings == 1 else 's'}, 0 failed"
    assert run.stderr == ""


@pytest.mark.slow
def test_doctor_json_prints_one_document(ddpkit: Command, tmp_path: Path) -> None:
    run = ddpkit("doctor", "--json", "--dir", tmp_path / "nowhere")
    assert run.returncode == 1
    said = json.loads(run.stdout)
    (failed,) = (check for check in said["checks"] if check["status"] == "fail")
    assert failed["name"] == "checkpoint folder"
    assert failed["fix"] == f"mkdir -p {tmp_path / 'nowhere'}"
    assert set(failed) == {"name", "status", "found", "fix"}
    assert (said["fail"], said["ok"] + said["warn"] + said["fail"]) == (1, len(said["checks"]))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("text", "found", "fix"),
    [
        (
            "raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')",
            "torch is not installed",
            f"{sys.executable} -m pip install torch",
        ),
        (
            "raise ImportError('libcudart.so.13: cannot open shared object file')",
            "torch cannot be imported: ImportError: libcudart.so.13: cannot open shared object file",
            f"{sys.executable} -m pip install --force-reinstall torch",
        ),
        (
            "import os; os.kill(os.getpid(), 11)",
            "torch cannot be imported: killed by Segmentation fault",
            f"{sys.executable} -m pip install --force-reinstall torch",
        ),
    ],
    ids=["missing", "cannot be imported", "crashes"],
)
def test_doctor_works_where_torch_does_not(ddpkit: Command, tmp_path: Path, text: str, found: str, fix: str) -> None:
    run = ddpkit("doctor", env=broken_torch(tmp_path, text))
    assert run.returncode == 1
    assert f"fail  {found}\n      -> {fix}\n" in run.stdout
    assert run.stdout.splitlines()[-1].endswith("1 failed"), "what cannot be tried without torch is no other failure"
    assert "all-reduce" not in run.stdout
    assert run.stderr == ""


@pytest.mark.slow
def test_doctor_finds_unusable_gpus_and_memory_errors(
    ddpkit: Command, machine: Callable[..., dict[str, str]], tmp_path: Path
) -> None:
    stand_in = (  # a torch that tells what it was built for, and that can do nothing
        "from types import SimpleNamespace\n"
        "__version__ = '2.13.0'\n"
        "version = SimpleNamespace(cuda='13.0')\n"
        "cuda = SimpleNamespace(get_arch_list=lambda: ['sm_90'])\n"
        "distributed = SimpleNamespace(is_available=lambda: False)\n"
    )
    variables = {"FAKE_ECC": "3", "FAKE_CUDA": "12080", "CUDA_VISIBLE_DEVICES": "0,1"}
    environment = broken_torch(tmp_path, stand_in) | machine(0, 1) | variables
    run = ddpkit("doctor", env=environment)
    assert run.returncode == 1
    lines = run.stdout.splitlines()
    for line in (
        "ok    2 GPUs: Fake GPU; driver 570.1 supports up to CUDA 12.8",
        "ok    CUDA_VISIBLE_DEVICES=0,1: 2 of 2 GPUs visible",
        "fail  GPU 0: 3 uncorrected memory errors; GPU 1: 3 uncorrected memory errors",
        "fail  torch was built for CUDA 13.0, and the driver supports up to 12.8",
        "fail  torch was built without NCCL, which training on several GPUs needs",
    ):
        assert line in lines
    assert any(line.startswith("fail  a matrix product fails: GPU 0: AttributeError: ") for line in lines)


@pytest.mark.slow
def test_doctor_itself_imports_no_torch(tmp_path: Path) -> None:
    env = broken_torch(tmp_path, "raise ImportError('no')")
    code = (
        "import sys; from ddp_kit.terminal import Terminal; from ddp_kit.doctor.command import run; "
        f"run([], Terminal({env})); print('torch' in sys.modules)"
    )
    done = run(sys.executable, "-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("\nFalse\n")


@pytest.mark.slow
def test_doctor_without_a_loopback_interface_fails(tmp_path: Path) -> None:
    in_a_network_of_its_own = ["unshare", "--user", "--map-root-user", "--net"]
    if shutil.which("unshare") is None or run(*in_a_network_of_its_own, "true").returncode:
        pytest.skip("needs a network namespace, which may not be made here")
    environment = broken_torch(tmp_path, "raise ImportError('no')")
    done = run(*in_a_network_of_its_own, sys.executable, "-m", "ddp_kit", "doctor", env=environment)
    assert done.returncode == 1
    assert "fail  loopback: connecting to 127.0.0.1 failed" in done.stdout
    assert "-> sudo ip link set lo up" in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(("no_color", "coloured"), [("", True), ("1", False)])
def test_doctor_uses_colour_only_on_a_terminal(tmp_path: Path, no_color: str, coloured: bool) -> None:
    ours, theirs = os.openpty()
    command = [sys.executable, "-m", "ddp_kit", "doctor", "--dir", tmp_path]
    environment = broken_torch(tmp_path, "raise ImportError('no')") | {"NO_COLOR": no_color}
    with started(*command, env=environment, stdout=theirs, stderr=None):
        os.close(theirs)
        shown = b""
        with suppress(OSError):  # the terminal's way to say that nobody holds its other end
            while more := os.read(ours, 4096):
                shown += more
    os.close(ours)
    assert b"Python" in shown
    assert (b"\033[32mok" in shown) == coloured
    assert (b"\033[31mfail" in shown) == coloured


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_doctor_that_is_stopped_leaves_no_process(tmp_path: Path, number: signal.Signals) -> None:
    fifo = tmp_path / "alive"
    os.mkfifo(fifo)
    waiting = f"import signal; alive = open({str(fifo)!r}, 'w'); print('here', file=alive, flush=True); signal.pause()"
    environment = broken_torch(tmp_path, waiting) | {"TMPDIR": str(tmp_path / "temporary")}
    (tmp_path / "temporary").mkdir()
    command = [sys.executable, "-m", "ddp_kit", "doctor"]
    with started(*command, env=environment, stdout=subprocess.DEVNULL) as asked:
        with fifo.open() as alive:
            assert [alive.readline() for _ in range(3)] == ["here\n"] * 3
            asked.send_signal(number)
            assert alive.read() == "", "this ends when the last of them has ended"
        _, errors = asked.communicate(timeout=seconds(60))
    assert errors == ("ddpkit: stopped by SIGTERM\n" if number == signal.SIGTERM else "")
    assert asked.returncode == (143 if number == signal.SIGTERM else -number)
    assert list((tmp_path / "temporary").iterdir()) == []


@pytest.mark.slow
def test_doctor_without_space_for_temporary_files_fails() -> None:
    def without_room() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))

    with started(sys.executable, "-m", "ddp_kit", "doctor", "--json", preexec_fn=without_room) as asked:
        output, errors = asked.communicate(timeout=seconds(240))
    assert asked.returncode == 1, errors
    (only,) = json.loads(output)["checks"]
    assert "cannot create a temporary file: " in only["found"]
    assert only["fix"] == "export TMPDIR=FOLDER"


@pytest.mark.slow
def test_doctor_reads_the_limits_of_its_process(tmp_path: Path) -> None:
    environment = broken_torch(tmp_path, "raise ImportError('no')")

    def with_few_files() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (512, 512))

    command = [sys.executable, "-m", "ddp_kit", "doctor"]
    with started(*command, env=environment, preexec_fn=with_few_files) as asked:
        output, _ = asked.communicate(timeout=seconds(240))
    assert "warn  open files: the limit is 512; DataLoader workers may need more" in output
