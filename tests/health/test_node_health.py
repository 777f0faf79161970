"""Which reports of the kernel and of NVML are lines of the verdict on a worker, and which are fatal."""

import time
from pathlib import Path
from typing import Any

import pytest

from ddp_kit.exit_codes import ExitCode
from ddp_kit.health import node
from ddp_kit.health.gpu_errors import GpuError, RankGpu
from ddp_kit.health.node import FATAL_XIDS, NodeHealth
from ddp_kit.launcher.verdict import Failure
from tests.health.test_kernel_log import record

PID = 4711
OUT_OF_MEMORY = "Memory cgroup out of memory: Killed process 4711 (python3) total-vm:278732kB, anon-rss:211200kB"
SEGFAULT = "python3[4711]: segfault at 1 ip 00007f sp 00007f error 4 in libnccl.so.2[1000+2000]"
XID = "NVRM: Xid (PCI:0000:4f:00): {}, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
OF_RANK_5 = RankGpu(5, 3, (0, 0x4F, 0))


class Node:
    """The health of a node with ranks 4 and 5, in whose log lines appear."""

    def __init__(self, path: Path) -> None:
        path.touch()
        self._path = path
        self.began = time.monotonic() - 100
        self.health = NodeHealth(self.began, "h1", 4, [(), ()], {"WANDB_API_KEY": "abcdefgh"}, str(path))
        self.health.pids.update({4: PID, 5: PID + 1})
        self.health.gpu_errors.gpus[3] = OF_RANK_5

    def logs(self, *texts: str, after: float = 50.0) -> None:
        with self._path.open("a") as file:
            file.writelines(record(text, self.began + after) for text in texts)

    def lines(self, **changes: Any) -> tuple[str, ...]:
        """The lines about rank 4, which has ended 50.8 s after the start."""
        self.health.end()
        facts: dict[str, Any] = {"rank": 4, "local_rank": 0, "pid": PID, "exit_code": -9, "after": 50.8, **changes}
        return self.health.lines(Failure(**facts))


@pytest.fixture
def node_health(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Node:
    monkeypatch.setattr(node, "sees_kernel_pids", lambda: True)
    monkeypatch.setattr(node.time, "clock_gettime", lambda clock: time.monotonic())
    return Node(tmp_path / "kmsg")


@pytest.mark.parametrize(
    ("logged", "about"),
    [
        (OUT_OF_MEMORY, " (rank 4)"),
        (SEGFAULT, " (rank 4)"),
        ("traps: pt main[4711] general protection fault ip:5581 sp:7ffd error:0 in python3.11[1+2]", " (rank 4)"),
        ("Memory failure: 0x1234: Sending SIGBUS to python3:4711 due to hardware memory corruption", " (rank 4)"),
        ("INFO: task python3:4711 blocked for more than 120 seconds", " (rank 4)"),
        (XID.format(79), " (rank 5's GPU)"),
        (XID.format(31).replace("0000:4f:00", "00000000:4F:00.0"), " (rank 5's GPU)"),
        ("nvidia-nvswitch3: SXid (PCI:0000:c3:00.0): 20034, Fatal, Link 30 LTSSM Fault Up", ""),
        ("EDAC MC0: 1 UE memory read error on CPU_SrcID#0_MC#0_Chan#1_DIMM#0", ""),
        ("mce: Uncorrected hardware memory error in user-access at 3f1f40", ""),
        ("{1}[Hardware Error]: event severity: recoverable", ""),
        ("pcieport 0000:00:01.0: AER: Uncorrectable (Fatal) error message received from 0000:4f:00.0", ""),
        ("nfs: server 10.0.0.7 not responding, still trying", ""),
        ("I/O error, dev nvme0n1, sector 1234 op 0x0:(READ) flags 0x0 phys_seg 1 prio class 2", ""),
        ("mlx5_core 0000:17:00.0 ib0: Link down", ""),
        ("igb 0000:01:00.0 eth0: igb: eth0 NIC Link is Down", ""),
    ],
)
def test_line_of_the_kernel_is_shown_with_its_time_and_rank(node_health: Node, logged: str, about: str) -> None:
    node_health.logs(logged)
    assert node_health.lines() == (f"kernel, 0.8 s before: {logged.rstrip('.')}{about}",)


@pytest.mark.parametrize(
    "logged",
    [
        OUT_OF_MEMORY.replace("4711", "815"),
        SEGFAULT.replace("4711", "815"),
        XID.format(79).replace(":4f:", ":50:"),
        "INFO: task jbd2/sda1-8:815 blocked for more than 120 seconds",
        "EDAC MC0: 1 CE memory read error on CPU_SrcID#0_MC#0_Chan#1_DIMM#0",
        "mce: [Hardware Error]: Machine check events logged",
        "ata1: SATA link down (SStatus 0 SControl 300)",
        "switch: port 1(h1) entered forwarding state",
        "usb 1-1: new high-speed USB device number 4711 using xhci_hcd",
    ],
)
def test_line_about_others_or_nothing_is_not_shown(node_health: Node, logged: str) -> None:
    node_health.logs(logged)
    assert node_health.lines() == ()


def test_dataloader_worker_that_the_kernel_has_killed_is_a_process_of_its_rank(node_health: Node) -> None:
    node_health.logs(OUT_OF_MEMORY.replace("4711", "4800"))
    message = "RuntimeError: DataLoader worker (pid 4800) is killed by signal: Killed. "
    assert node_health.lines(message=message) == (
        f"kernel, 0.8 s before: {OUT_OF_MEMORY.replace('4711', '4800')} (a process of rank 4)",
    )
    assert node_health.lines(message="ValueError: 4800 samples") == ()


def test_process_ids_are_not_compared_in_another_namespace(node_health: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(node, "sees_kernel_pids", lambda: False)
    node_health.logs(OUT_OF_MEMORY, XID.format(79))
    (line,) = node_health.lines()
    assert "Xid" in line


@pytest.mark.parametrize(
    ("after", "when"),
    [
        (51.5, "0.7 s after"),
        (52.5, None),
        (-20.0, "1 min 11 s before"),
        (-3500.0, "59 min 11 s before"),
        (-3600.0, None),
    ],
)
def test_line_long_before_or_after_the_end_of_the_worker_is_not_shown(
    node_health: Node, after: float, when: str | None
) -> None:
    node_health.logs(SEGFAULT, after=after)
    assert node_health.lines() == (() if when is None else (f"kernel, {when}: {SEGFAULT} (rank 4)",))


def test_three_most_important_lines_are_shown_each_once_at_its_latest_time(node_health: Node) -> None:
    node_health.logs("mlx5_core 0000:17:00.0 ib0: Link down", "I/O error, dev sda, sector 1", after=40)
    for second in (10, 20, 49):
        node_health.logs("nfs: server nas not responding, still trying", XID.format(31), after=second)
    node_health.logs("nfs: server nas not responding, still trying", after=60)
    lines = node_health.lines()
    assert [line.partition(":")[0] for line in lines] == ["kernel, 1.8 s before"] * 2 + ["kernel, 10.8 s before"]
    assert ["Xid" in lines[0], "nfs" in lines[1], "I/O error" in lines[2]] == [True] * 3


def test_secrets_in_a_line_are_masked_and_long_lines_shortened(node_health: Node) -> None:
    node_health.logs(f"nfs: server abcdefgh not responding {'x' * 500}")
    (line,) = node_health.lines()
    assert line.startswith("kernel, 0.8 s before: nfs: server **** not responding xxx")
    assert len(line) < 250


@pytest.mark.parametrize("logged", [True, False])
def test_xid_that_kernel_and_nvml_report_is_one_line(node_health: Node, logged: bool) -> None:
    node_health.health.gpu_errors.found.append(GpuError(OF_RANK_5, "Xid 79", 79, node_health.began + 49.5))
    if logged:
        node_health.logs(XID.format(79))
    (line,) = node_health.lines()
    expected = "kernel, 0.8 s before: NVRM: Xid" if logged else "GPU 3, 1.3 s before: Xid 79 (rank 5's GPU)"
    assert line.startswith(expected)


def test_ecc_errors_have_no_time(node_health: Node) -> None:
    node_health.health.gpu_errors.found.append(GpuError(OF_RANK_5, "2 uncorrected ECC errors"))
    assert node_health.lines() == ("GPU 3: 2 uncorrected ECC errors (rank 5's GPU)",)


@pytest.mark.parametrize("xid", [*sorted(FATAL_XIDS), 13, 31, 43])
@pytest.mark.parametrize("by", ["kernel", "nvml"])
def test_fatal_xid_is_a_failure_of_the_rank_of_the_gpu(node_health: Node, xid: int, by: str) -> None:
    if by == "kernel":
        node_health.logs(XID.format(xid))
    else:
        node_health.health.gpu_errors.found.append(GpuError(OF_RANK_5, f"Xid {xid}", xid, node_health.began + 50))
    node_health.health.end()
    failure = node_health.health.gpu_failure()
    if xid not in FATAL_XIDS:
        assert failure is None
        return
    assert failure is not None
    assert (failure.rank, failure.local_rank, failure.pid, failure.host) == (5, 1, PID + 1, "h1")
    assert (failure.exit_code, round(failure.after)) == (ExitCode.FAULTY, 50)
    assert failure.message.startswith("GPU 3 has a fatal error: ")
    assert str(xid) in failure.message
