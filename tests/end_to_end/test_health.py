"""What the kernel and the GPUs' driver report is in the verdict of a launch; a node whose GPU fails is excluded."""

import json
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from ddp_kit.health.kernel_log import KERNEL_LOG
from ddp_kit.health.node import sees_kernel_pids
from tests.support.hosts import TIED
from tests.support.launching import DDPKIT, PROGRAMS, free_port, launch, started, wait_until

pytestmark = pytest.mark.slow

MachineOf = Callable[[str], dict[str, str]]
REDUCES = PROGRAMS / "reduces_until_stopped.py"


def pid_in(path: Path) -> int:
    """The process id that a rank writes to the file once it trains."""
    wait_until(lambda: path.exists() and path.read_text().endswith("\n"), f"in {path}")
    return int(path.read_text())


def append_to_gpu(env: dict[str, str], index: int, line: str) -> None:
    """Add a line about one of the GPUs to the file of the stand-in for NVML."""
    path = Path(env["FAKE_NVML"])
    lines = path.read_text().splitlines()
    gpus = [number for number, each in enumerate(lines) if each.startswith("gpu")]
    lines.insert(gpus[index] + 1, line)
    new = path.with_suffix(".new")
    new.write_text("\n".join(lines))
    new.rename(path)


@pytest.mark.skipif(
    not os.access(KERNEL_LOG, os.R_OK) or os.geteuid() != 0 or not sees_kernel_pids(),
    reason=f"needs permission to read {KERNEL_LOG}, and the process ids in it",
)
def test_verdict_on_a_segfault_has_the_line_of_the_kernel(tmp_path: Path) -> None:
    script = tmp_path / "crash.py"
    script.write_text("import ctypes, os, signal\nctypes.string_at(1) if os.environ['RANK'] == '1' else signal.pause()")
    done = launch("--nproc-per-node", 2, "--log-dir", tmp_path / "logs", script)
    assert done.returncode == 139
    (line,) = (line for line in done.stderr.splitlines() if "kernel" in line)
    assert re.fullmatch(r"  kernel, \d\.\d s before: \S+\[\d+\]: segfault at 1 .* \(rank 1\)", line), done.stderr
    (path,) = (tmp_path / "logs").glob("**/verdict.json")
    assert json.loads(path.read_text())["first_failure"]["health"] == [line.strip()]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")
def test_verdict_has_the_xid_errors_of_the_gpus_of_its_ranks(machine_of: MachineOf, tmp_path: Path) -> None:
    env = machine_of("gpu GPU-a 80 1\ngpu GPU-b 80 1\ngpu GPU-c 80 1\n")
    log = tmp_path / "kmsg"
    log.touch()
    with_log = (*TIED, "unshare", "--mount", "sh", "-c", f'mount --bind "$0" {KERNEL_LOG} && exec "$@"', log, DDPKIT)
    ready = tmp_path / "ready"
    flags = ("--gpus", "0,1", "--log-dir", tmp_path / "logs")
    script = tmp_path / "waits.py"
    script.write_text(
        "import os, pathlib, signal\n"
        f"pathlib.Path({str(ready)!r} + os.environ['RANK']).write_text(f'{{os.getpid()}}\\n')\nsignal.pause()"
    )
    with started(*with_log, "launch", *flags, script, env=env) as launcher:
        pids = [pid_in(ready.with_name(f"ready{rank}")) for rank in (0, 1)]
        append_to_gpu(env, 1, "xid 79\nxid 31")
        append_to_gpu(env, 2, "xid 95")
        now = round(time.monotonic() * 1e6)
        log.write_text(
            f"4,1,{now},-;NVRM: Xid (PCI:0000:11:00): 79, GPU has fallen off the bus.\n"
            f"4,2,{now},-;NVRM: Xid (PCI:0000:12:00): 95, of a GPU that is not used\n"
            f"3,3,{now},-;Out of memory: Killed process {os.getpid()} (python)\n"
        )
        os.kill(pids[0], signal.SIGKILL)
        _, said = launcher.communicate()
        assert launcher.returncode == 137, said
        health = sorted(line.strip() for line in said.splitlines() if " before: " in line)
        assert len(health) == 2, said
        assert re.fullmatch(r"GPU 1, \d\.\d s before: Xid 31 \(rank 1's GPU\)", health[0]), said
        assert re.fullmatch(r"kernel, \d\.\d s before: NVRM: Xid .* fallen off the bus \(rank 1's GPU\)", health[1]), (
            said
        )
        (path,) = (tmp_path / "logs").glob("**/verdict.json")
        assert sorted(json.loads(path.read_text())["first_failure"]["health"]) == health


@contextmanager
def logged(log: Path, *words: object, env: dict[str, str]) -> Iterator["subprocess.Popen[str]"]:
    """A launcher whose messages go to a file."""
    with log.open("w") as file, started(DDPKIT, "launch", *words, env=env, stdout=file, stderr=file) as launcher:
        yield launcher


def test_spare_takes_the_place_of_a_node_whose_gpu_fails_although_another_rank_fails_first(
    machine_of: MachineOf, tmp_path: Path
) -> None:
    env = machine_of("gpu GPU-a 80 1\n")
    told = tmp_path / "told"
    meet = ("--nnodes", 2, "--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", "j")
    logs = {name: tmp_path / f"{name}.log" for name in ("host", "failing", "spare")}
    ready = {name: tmp_path / f"{name}.ready" for name in logs}
    with ExitStack() as stack:

        def start(name: str, *flags: object, **more: str) -> "subprocess.Popen[str]":
            return stack.enter_context(logged(logs[name], *meet, *flags, REDUCES, ready[name], told, env=more))

        host = start("host", "--nproc-per-node", 1)
        wait_until(lambda: "waiting" in logs["host"].read_text(), "hosting the rendezvous")
        failing = start("failing", "--gpus", 1, **env)
        pids = [pid_in(ready["host"]), pid_in(ready["failing"])]
        spare = start("spare", "--nproc-per-node", 1)
        wait_until(lambda: re.search("waiting for the other nodes|is a spare", logs["spare"].read_text()), "waiting")
        append_to_gpu(env, 0, "xid 79")
        os.kill(pids[0], signal.SIGKILL)
        pid_in(ready["spare"])
        told.touch()
        codes = [launcher.wait() for launcher in (host, failing, spare)]
        said = {name: log.read_text() for name, log in logs.items()}
        assert codes == [0, 5, 0], said
        why = r"rank 1 failed first: exit code 5 \(local rank 0, host \S+, pid \d+\): GPU 0 has a fatal error: Xid 79"
        assert re.search(rf"ddpkit: {why}$", said["failing"], re.MULTILINE), said
        for name in ("host", "spare"):
            assert re.search(rf"was excluded from the job: {why}", said[name]), said
