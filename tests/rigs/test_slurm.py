"""launch/slurm/train.sbatch on a real Slurm with two nodes, both on this host."""

import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import psutil
import pytest

from ddp_kit.cli import submit
from ddp_kit.terminal import Terminal
from tests.support import cluster_training
from tests.support.hosts import ALONE
from tests.support.labels import unlabelled
from tests.support.launching import BIN, PROGRAMS, ROOT, free_port, seconds

SBATCH = ROOT / "launch" / "slurm" / "train.sbatch"
REPORT = PROGRAMS / "slurm_report.py"
COMMANDS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "sinfo", "setpriv", "unshare")
T = TypeVar("T")
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY"}

_missing = [name for name in COMMANDS if shutil.which(name) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(_missing), reason=f"Slurm is not installed: no {', '.join(_missing)}"),
    pytest.mark.skipif(os.geteuid() != 0, reason="only root may start slurmctld and slurmd"),
]

SLURM_CONF = """\
ClusterName=rig
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SlurmdParameters=config_overrides
ReturnToService=2
FirstJobId={first_job}
KillWait={short}
SlurmdTimeout={short}
GresTypes=gpu
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=64 RealMemory=1000 Gres=gpu:8
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=64 RealMemory=1000 Gres=gpu:8
NodeName=n3 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[3]} CPUs=64 RealMemory=1000 Gres=gpu:8
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=UNLIMITED State=UP PriorityTier=1 GraceTime={grace}
PartitionName=high Nodes=n1,n2 MaxTime=UNLIMITED State=UP PriorityTier=2
PartitionName=spare Nodes=n1,n2,n3 MaxTime=UNLIMITED State=UP
"""


@dataclass(frozen=True)
class EndedJob:
    """A job that has ended."""

    state: str
    exit_code: int
    log: str


@dataclass(frozen=True)
class Slurm:
    """A running cluster."""

    env: dict[str, str]
    folder: Path
    stack: ExitStack
    nodes: dict[str, "subprocess.Popen[bytes]"]

    def start(self, name: str) -> None:
        """Start a node. Steps detach from slurmd, but it is a tree that dies whole, as a node."""
        self.nodes[name] = _start(self.stack, self.folder, self.env, "slurmd", "-D", "-N", name)

    def ask(self, *command: str, cwd: Path | None = None) -> str:
        done = subprocess.run(command, env=self.env, cwd=cwd, capture_output=True, text=True, timeout=seconds(60))
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
        return done.stdout

    def run(self, folder: Path, *words: object, flags: tuple[str, ...] = ()) -> EndedJob:
        """`sbatch flags train.sbatch words` in `folder`, and wait for the job's end."""
        job = self.submit(folder, *words, flags=flags)
        shown = self.until(job, lambda shown: _field(shown, "JobState") in ENDED)
        exit_code = int(_field(shown, "ExitCode").split(":")[0])
        return EndedJob(_field(shown, "JobState"), exit_code, unlabelled((folder / "job.log").read_text()))

    def submit(self, folder: Path, *words: object, flags: tuple[str, ...] = (), batch: Path = SBATCH) -> str:
        """The job's number."""
        command = ("sbatch", "--parsable", "--output=job.log", *flags, str(batch), *map(str, words))
        return self.ask(*command, cwd=folder).strip()

    def start_again(self, job: str, word: str, *changes: str) -> None:
        """Wait until the job is in the queue again, and let it start at once. `word`: on its command line alone."""
        self.until(job, lambda it: _field(it, "JobState") == "PENDING")
        # What is left of the attempt before would be taken for the next one, as would its exit code, which slurmstepd
        # reports. Slurm itself waits for two minutes.
        _poll(lambda: self._processes(word, f"slurmstepd: [{job}."), lambda left: not left, within=60)
        # And a node refuses what starts in the second of a stop: Slurm withdraws permissions by whole seconds.
        stopped = int(time.time())
        _poll(time.time, lambda now: int(now) > stopped, within=5)
        self.wait_until_idle()  # else a node that returns is subtracted from those of the next attempt
        self.ask("scontrol", "update", f"JobId={job}", "StartTime=now", *changes)

    def wait_until_idle(self, partition: str = "all", nodes: int = 2) -> None:
        """Wait until all nodes of the partition are up and have nothing to do."""
        expected = f"idle {nodes}"
        look = partial(self.ask, "sinfo", "-h", "-p", partition, "-o", "%T %D")
        _poll(look, lambda shown: shown.strip() == expected, within=60)

    def until(self, job: str, enough: Callable[[str], bool]) -> str:
        """What Slurm tells of the job once that is enough."""
        return _poll(lambda: self.ask("scontrol", "--oneliner", "show", "job", job), enough, within=180)

    def _processes(self, *words: str) -> list[str]:
        """The command lines on the nodes with any of these words; other rigs run the same scripts."""
        found = []
        for node in self.nodes.values():
            with suppress(psutil.NoSuchProcess):
                for process in psutil.Process(node.pid).children(recursive=True):
                    with suppress(psutil.NoSuchProcess):
                        found.append(" ".join(process.cmdline()))
        return [line for line in found if any(each in line for each in words)]


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """munged, slurmctld and two slurmd, with keys, sockets, ports and state of their own."""
    folder = tmp_path_factory.mktemp("slurm")
    conf = folder / "slurm.conf"
    for number in range(8):  # GPUs that Slurm can hand out, and that nobody will find
        (folder / f"gpu{number}").touch()
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-7]\n")
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(128))
    env = {
        # As in a user's shell, ddpkit is in PATH.
        "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
        "SLURM_CONF": str(conf),
        "MASTER_ADDR": "127.0.0.1",  # the names of these nodes do not resolve
        "PET_LOCAL_ADDR": "127.0.0.1",
        "OMP_NUM_THREADS": "1",  # both nodes share the cores of this host
    }
    munge = {"key-file": key, "socket": folder / "munge.socket", "pid-file": folder / "munge.pid"}
    munge |= {"log-file": folder / "munge.log", "seed-file": folder / "munge.seed"}
    with ExitStack() as stack:  # undone from the last to the first
        host, ports = socket.gethostname().split(".")[0], [free_port() for _ in range(4)]
        times = {"short": round(seconds(5)), "grace": round(seconds(60))}
        conf.write_text(SLURM_CONF.format(folder=folder, host=host, ports=ports, first_job=_first_job(stack), **times))
        cluster = Slurm(env, folder, stack, {})
        start = partial(_start, stack, folder, env)
        start("munged", "--foreground", "--force", *(f"--{flag}={path}" for flag, path in munge.items()))
        _poll(munge["socket"].exists, bool, within=20)
        start("slurmctld", "-D")
        cluster.start("n1")
        cluster.start("n2")
        cluster.wait_until_idle()
        yield cluster


def _start(stack: ExitStack, folder: Path, env: dict[str, str], *command: str) -> "subprocess.Popen[bytes]":
    """Start a daemon that ends with the stack, and all that comes of it with this process at the latest."""
    log = stack.enter_context((folder / f"daemon-{len(list(folder.glob('daemon-*')))}.log").open("w"))
    words = [*ALONE, *command]
    process = subprocess.Popen(words, env=env, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True)
    stack.callback(process.wait)
    stack.callback(process.kill)  # if waiting was in vain
    stack.callback(process.wait, timeout=seconds(20))
    stack.callback(_terminate, process.pid)
    return process


def _terminate(group: int) -> None:
    """The group, as unshare does not pass a signal on."""
    with suppress(ProcessLookupError):
        os.killpg(group, signal.SIGTERM)


def _first_job(stack: ExitStack) -> int:
    """A number for the first job, such that the jobs of no other cluster on this host have the same rendezvous ports.

    Job 20000 + n has port 10000 + n % 20000: see `derived_port`. Clusters count from multiples of 100, and hold the
    port of the multiple itself: without SO_REUSEADDR, so that a second cluster cannot bind it, too.
    """
    for port in random.SystemRandom().sample(range(10_000, 30_000, 100), 200):
        holder = stack.enter_context(socket.socket())
        with suppress(OSError):
            holder.bind(("127.0.0.1", port))
            return port + 10_001
    raise AssertionError("no port is free")


def _poll(look: Callable[[], T], enough: Callable[[T], bool], within: float) -> T:
    """What `look` shows once that is enough; Slurm announces nothing, so it is asked again and again."""
    deadline = time.monotonic() + seconds(within)
    while not enough(shown := look()):
        assert time.monotonic() < deadline, f"after {seconds(within):.0f} s still: {shown}"
        time.sleep(0.1)
    return shown


def _field(shown: str, name: str) -> str:
    found = re.search(rf"\b{name}=(\S+)", shown)
    assert found, f"no {name} in {shown}"
    return found[1]


def _reports(job: EndedJob) -> list[dict[str, object]]:
    lines = [json.loads(line) for line in job.log.splitlines() if line.startswith("{")]
    return sorted(lines, key=lambda line: line["RANK"])


def test_slurm_job_runs_on_both_nodes_and_passes_arguments_to_the_script(slurm: Slurm, tmp_path: Path) -> None:
    job = slurm.run(tmp_path, REPORT, "--lr", "0.1", "two words", "$HOME *")
    assert (job.state, job.exit_code) == ("COMPLETED", 0), job.log
    told = _reports(job)
    assert [(line["RANK"], line["GROUP_RANK"], line["WORLD_SIZE"]) for line in told] == [
        ("0", "0", "2"),
        ("1", "1", "2"),
    ]
    assert {line["SLURMD_NODENAME"] for line in told} == {"n1", "n2"}
    assert all(line["words"] == ["--lr", "0.1", "two words", "$HOME *"] for line in told)


def test_slurm_flags_before_the_script_are_the_launchers(slurm: Slurm, tmp_path: Path) -> None:
    flags = ("--nodes=1", "--gpus-per-node=0", "--cpus-per-task=2")
    job = slurm.run(tmp_path, "--nproc-per-node", "2", REPORT, flags=flags)
    assert (job.state, job.exit_code) == ("COMPLETED", 0), job.log
    assert [(line["RANK"], line["GROUP_RANK"], line["WORLD_SIZE"]) for line in _reports(job)] == [
        ("0", "0", "2"),
        ("1", "0", "2"),
    ]


def test_slurm_job_with_a_failing_rank_ends_on_all_nodes(slurm: Slurm, tmp_path: Path) -> None:
    job = slurm.run(tmp_path, REPORT, "fail")
    assert job.state == "FAILED", job.log
    assert job.exit_code == 7, "all nodes end with the worker's own"
    assert "rank 0 failed first: exit code 7" in job.log


def test_slurm_max_restarts_restarts_the_processes_of_all_nodes(slurm: Slurm, tmp_path: Path) -> None:
    job = slurm.run(tmp_path, "--max-restarts", "1", REPORT, "fail-once")
    assert (job.state, job.exit_code) == ("COMPLETED", 0), job.log
    assert sorted(str(line["SLURMD_NODENAME"]) for line in _reports(job)) == ["n1", "n1", "n2", "n2"]


def test_slurm_array_requeues_and_counts_only_the_task_that_hung(slurm: Slurm, tmp_path: Path) -> None:
    """The last task of an array has the array's own number, by which Slurm knows all of its tasks."""
    flags = ("--array=0-1%1", "--nodes=1", "--gpus-per-node=0", "--cpus-per-task=2")
    array = slurm.submit(tmp_path, REPORT, "hang-last", flags=flags)
    again = slurm.until(
        f"{array}_1", lambda shown: _field(shown, "Restarts") == "1" and _field(shown, "JobState") == "PENDING"
    )
    assert _field(again, "Comment") == "ddpkit-retries-1"
    shown = slurm.ask("scontrol", "--oneliner", "show", "job", f"{array}_0")
    assert (_field(shown, "JobState"), _field(shown, "Restarts")) == ("COMPLETED", "0")
    assert "Comment=" not in shown
    slurm.ask("scancel", array)


@pytest.mark.timeout(seconds(600))
def test_digits_with_lost_nodes_ends_as_on_one_machine(slurm: Slurm, tmp_path: Path) -> None:
    """And it is preempted, and comes to its time limit."""
    cluster_training.write(tmp_path)
    flags = ("--gpus-per-node=0", "--cpus-per-task=1", "--time=30")
    job = slurm.submit(tmp_path, "train.py", "saved-on-slurm", flags=flags)

    def go_on() -> None:
        _poll(cluster_training.goes_on(tmp_path, "saved-on-slurm"), bool, within=180)

    go_on()
    urgent = ("sbatch", "--parsable", "--partition=high", "--exclusive", "--nodes=2", "--output=urgent.log")
    slurm.ask(*urgent, "--wrap", "true", cwd=tmp_path)
    slurm.start_again(job, "saved-on-slurm")
    go_on()
    slurm.nodes["n1"].kill()  # which runs the batch script, and hosts the rendezvous
    slurm.until(job, lambda it: _field(it, "JobState") == "PENDING")
    slurm.start("n1")
    slurm.start_again(job, "saved-on-slurm")
    go_on()
    slurm.ask("scontrol", "update", f"JobId={job}", "TimeLimit=2")  # so USR2 is due
    slurm.start_again(job, "saved-on-slurm", "TimeLimit=30")
    cluster_training.hurry(tmp_path, "saved-on-slurm")
    shown = slurm.until(job, lambda it: _field(it, "JobState") in ENDED)
    log = unlabelled((tmp_path / "job.log").read_text())
    assert _field(shown, "JobState") == "COMPLETED", shown + log
    assert {"SIGTERM", "SIGUSR2"} <= {*re.findall(r"stopped by (SIG\w+) after step", log)}, log
    assert cluster_training.result(log) == cluster_training.on_one_machine(tmp_path, ranks=2)
    assert not cluster_training.repeated_too_often(tmp_path, "saved-on-slurm", losses=1)


def test_exit_codes_decide_whether_the_job_restarts(slurm: Slurm, tmp_path: Path) -> None:
    (tmp_path / "exits.py").write_text(cluster_training.EXITS)
    flags = ["--on", "slurm", "--nodes", "2", "--cpus", "1", "--retries", "1", "--dry-run"]
    printed: list[str] = []
    submit.run(flags, Terminal({}, printed.append))
    batch = tmp_path / "exits.sbatch"
    batch.write_text(printed[0])
    slurm.ask("sbatch", "--test-only", str(batch), "exits.py")
    codes = cluster_training.COUNTED
    job = slurm.submit(tmp_path, "--cold", "exits.py", "attempts", *codes, batch=batch)
    for attempt in range(1, len(codes)):
        slurm.until(job, lambda it, attempt=str(attempt): _field(it, "Restarts") == attempt)  # type: ignore[misc]
        slurm.start_again(job, "exits.py")
    shown = slurm.until(job, lambda it: _field(it, "JobState") in ENDED)
    assert (_field(shown, "JobState"), _field(shown, "ExitCode")) == ("FAILED", "137:0"), shown
    assert (tmp_path / "attempts").read_text().split() == codes
    own = slurm.submit(tmp_path, "--cold", "exits.py", "own", "7", batch=batch)
    shown = slurm.until(own, lambda it: _field(it, "JobState") in ENDED)
    assert (_field(shown, "JobState"), _field(shown, "ExitCode"), _field(shown, "Restarts")) == ("FAILED", "7:0", "0")


def test_srun_with_several_tasks_per_node_gets_a_warning(slurm: Slurm, tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    slurm.wait_until_idle()
    done = subprocess.run(
        ["srun", f"--immediate={seconds(30):.0f}", "--nodes=2", "--ntasks=4", "ddpkit", "launch", "train.py"],
        env=slurm.env, cwd=tmp_path, capture_output=True, text=True, timeout=seconds(60),
    )  # fmt: skip
    assert done.stderr.count("srun started 4 tasks on 2 nodes") == 1, done.stderr
    assert "--ntasks-per-node=1" in done.stderr


def test_spare_takes_the_place_of_a_lost_node(slurm: Slurm, tmp_path: Path) -> None:
    slurm.start("n3")
    slurm.wait_until_idle("spare", 3)
    script = PROGRAMS / "spared.py"
    words = (str(script), str(tmp_path / "run"), str(tmp_path), '[[1, "training"]]')
    flags = ("--spares", "1", "--nproc-per-node", "2", "--preload", "off")
    asked = ("--on", "slurm", "--nodes", "3", "--cpus", "1", "--partition", "spare", *flags, *words)
    batch = tmp_path / "train.sbatch"
    printed: list[str] = []
    submit.run(["--dry-run", *asked], Terminal({}, printed.append))
    batch.write_text("\n".join(printed))
    job = slurm.submit(tmp_path, batch=batch)
    losses = tmp_path / "losses"
    _poll(lambda: losses.exists() and losses.read_text().endswith("\n"), bool, within=120)
    lost, newest = losses.read_text().split()
    slurm.nodes[lost].kill()
    shown = slurm.until(job, lambda it: _field(it, "JobState") in ENDED)
    log = unlabelled((tmp_path / "job.log").read_text())
    assert _field(shown, "JobState") == "COMPLETED", shown + log
    resumed = re.findall(r"resumed from the copy in memory after step (\d+)", log)
    assert len(resumed) == 1
    assert int(resumed[0]) >= int(newest)
    assert len(re.findall(r"ended \d 150", log)) == 4
    slurm.nodes["n3"].kill()
    slurm.start("n2")
    slurm.wait_until_idle()
