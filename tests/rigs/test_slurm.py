"""launch/slurm/train.sbatch on a real Slurm with two nodes, both on this host."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import pytest
from labels import unlabelled

ROOT = Path(__file__).parents[2]
SBATCH = ROOT / "launch" / "slurm" / "train.sbatch"
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "sinfo", "unshare")
T = TypeVar("T")
ENDED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY"}

_missing = [name for name in PROGRAMS if shutil.which(name) is None]
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
KillWait=5
GresTypes=gpu
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=64 RealMemory=1000 Gres=gpu:8
NodeName=n2 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=64 RealMemory=1000 Gres=gpu:8
PartitionName=all Nodes=n1,n2 Default=YES MaxTime=UNLIMITED State=UP
"""


@dataclass(frozen=True)
class Job:
    """A job that has ended."""

    state: str
    exit_code: int
    log: str


@dataclass(frozen=True)
class Slurm:
    """A running cluster."""

    env: dict[str, str]

    def ask(self, *command: str, cwd: Path | None = None) -> str:
        done = subprocess.run(command, env=self.env, cwd=cwd, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
        return done.stdout

    def run(self, folder: Path, *words: object, flags: tuple[str, ...] = ()) -> Job:
        """`sbatch flags train.sbatch words` in `folder`, and wait for the job's end."""
        job = self.submit(folder, *words, flags=flags)
        shown = self.until(job, lambda shown: _field(shown, "JobState") in ENDED)
        exit_code = int(_field(shown, "ExitCode").split(":")[0])
        return Job(_field(shown, "JobState"), exit_code, unlabelled((folder / "job.log").read_text()))

    def submit(self, folder: Path, *words: object, flags: tuple[str, ...] = ()) -> str:
        """The job's number."""
        batch = ("sbatch", "--parsable", "--output=job.log", *flags, str(SBATCH), *map(str, words))
        return self.ask(*batch, cwd=folder).strip()

    def until(self, job: str, enough: Callable[[str], bool]) -> str:
        """What Slurm tells of the job once that is enough."""
        return _poll(lambda: self.ask("scontrol", "--oneliner", "show", "job", job), enough, seconds=90)


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Slurm]:
    """munged, slurmctld and two slurmd, with keys, sockets, ports and state of their own."""
    folder = tmp_path_factory.mktemp("slurm")
    conf = folder / "slurm.conf"
    conf.write_text(SLURM_CONF.format(folder=folder, host=socket.gethostname().split(".")[0], ports=_free_ports(3)))
    for number in range(8):  # GPUs that Slurm can hand out, and that nobody will find
        (folder / f"gpu{number}").touch()
    (folder / "gres.conf").write_text(f"Name=gpu File={folder}/gpu[0-7]\n")
    (folder / "state").mkdir()
    key = folder / "munge.key"
    key.touch(mode=0o600)
    key.write_bytes(os.urandom(128))
    env = {
        # As in a user's shell, ddpkit is in PATH.
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "SLURM_CONF": str(conf),
        "MASTER_ADDR": "127.0.0.1",  # the names of these nodes do not resolve
        "PET_LOCAL_ADDR": "127.0.0.1",
        "OMP_NUM_THREADS": "1",  # both nodes share the cores of this host
    }
    cluster = Slurm(env)
    # Steps detach from slurmd; a process namespace per node makes it a tree that dies whole, as a node does.
    node = ("unshare", "--pid", "--mount-proc", "--fork", "--kill-child", "slurmd", "-D", "-N")
    munge = {"key-file": key, "socket": folder / "munge.socket", "pid-file": folder / "munge.pid"}
    munge |= {"log-file": folder / "munge.log", "seed-file": folder / "munge.seed"}
    with ExitStack() as stack:  # undone from the last to the first
        start = partial(_start, stack, folder, cluster.env)
        start("munged", "--foreground", "--force", *(f"--{flag}={path}" for flag, path in munge.items()))
        _poll(munge["socket"].exists, bool, seconds=20)
        start("slurmctld", "-D")
        start(*node, "n1")
        start(*node, "n2")
        _poll(lambda: cluster.ask("sinfo", "-h", "-o", "%T %D"), lambda shown: shown.strip() == "idle 2", seconds=20)
        yield cluster


def _start(stack: ExitStack, folder: Path, env: dict[str, str], *command: str) -> None:
    """Start a daemon that ends with the stack."""
    log = stack.enter_context((folder / f"daemon-{len(list(folder.glob('daemon-*')))}.log").open("w"))
    process = subprocess.Popen(
        command, env=env, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
    )
    stack.callback(process.kill)  # if waiting was in vain
    stack.callback(process.wait, timeout=20)
    stack.callback(os.killpg, process.pid, signal.SIGTERM)  # the group, as unshare does not pass a signal on


def _free_ports(count: int) -> list[int]:
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def _poll(look: Callable[[], T], enough: Callable[[T], bool], seconds: float) -> T:
    """What `look` shows once that is enough; Slurm announces nothing, so it is asked again and again."""
    deadline = time.monotonic() + seconds
    while not enough(shown := look()):
        assert time.monotonic() < deadline, f"after {seconds} s still: {shown}"
        time.sleep(0.1)
    return shown


def _field(shown: str, name: str) -> str:
    found = re.search(rf"\b{name}=(\S+)", shown)
    assert found, f"no {name} in {shown}"
    return found[1]


@pytest.fixture
def report(tmp_path: Path) -> Path:
    """A script that tells what it was given. With `fail` rank 0 exits with 7 and the others do not end.

    With `fail-once` that happens in the first attempt alone; with `save-once` all end with 75 in it.
    With `save-last` the last task of a job array does.
    """
    script = tmp_path / "report.py"
    script.write_text(
        "import json, os, pathlib, sys, time\n"
        "told = {name: os.environ[name] for name in ('RANK', 'WORLD_SIZE', 'GROUP_RANK', 'SLURMD_NODENAME')}\n"
        "sys.stdout.write(json.dumps(told | {'words': sys.argv[1:]}) + '\\n')  # one piece, whoever else writes\n"
        "seen = pathlib.Path('started-on-' + told['SLURMD_NODENAME'])\n"
        "first = not seen.exists()\n"
        "seen.touch()\n"
        "last = os.environ.get('SLURM_ARRAY_TASK_ID') == '1'\n"
        "if 'save-once' in sys.argv and first or 'save-last' in sys.argv and last:\n"
        "    sys.exit(75)\n"
        "if 'fail' in sys.argv or 'fail-once' in sys.argv and first:\n"
        "    while len(list(pathlib.Path().glob('started-on-*'))) < 2:\n"
        "        time.sleep(0.05)\n"
        "    sys.exit(7) if told['RANK'] == '0' else time.sleep(600)\n"
    )
    return script


def _reports(job: Job) -> list[dict[str, object]]:
    lines = [json.loads(line) for line in job.log.splitlines() if line.startswith("{")]
    return sorted(lines, key=lambda line: line["RANK"])


def test_both_nodes_take_part_and_the_script_gets_its_arguments(slurm: Slurm, report: Path, tmp_path: Path) -> None:
    job = slurm.run(tmp_path, report, "--lr", "0.1", "two words", "$HOME *")
    assert (job.state, job.exit_code) == ("COMPLETED", 0), job.log
    told = _reports(job)
    assert [(line["RANK"], line["GROUP_RANK"], line["WORLD_SIZE"]) for line in told] == [
        ("0", "0", "2"),
        ("1", "1", "2"),
    ]
    assert {line["SLURMD_NODENAME"] for line in told} == {"n1", "n2"}
    assert all(line["words"] == ["--lr", "0.1", "two words", "$HOME *"] for line in told)


def test_flags_before_the_script_are_the_launchers(slurm: Slurm, report: Path, tmp_path: Path) -> None:
    flags = ("--nodes=1", "--gpus-per-node=0", "--cpus-per-task=2")
    job = slurm.run(tmp_path, "--nproc-per-node", "2", report, flags=flags)
    assert (job.state, job.exit_code) == ("COMPLETED", 0), job.log
    assert [(line["RANK"], line["GROUP_RANK"], line["WORLD_SIZE"]) for line in _reports(job)] == [
        ("0", "0", "2"),
        ("1", "0", "2"),
    ]


def test_a_failing_rank_ends_the_job_on_all_nodes(slurm: Slurm, report: Path, tmp_path: Path) -> None:
    job = slurm.run(tmp_path, report, "fail")
    assert job.state == "FAILED", job.log
    assert job.exit_code == 7, "all nodes end with the worker's own"
    assert "rank 0 failed first: exit code 7" in job.log


def test_max_restarts_starts_the_processes_of_all_nodes_again(slurm: Slurm, report: Path, tmp_path: Path) -> None:
    job = slurm.run(tmp_path, "--max-restarts", "1", report, "fail-once")
    assert (job.state, job.exit_code) == ("COMPLETED", 0), job.log
    assert sorted(str(line["SLURMD_NODENAME"]) for line in _reports(job)) == ["n1", "n1", "n2", "n2"]


def test_a_job_that_has_saved_is_queued_again(slurm: Slurm, report: Path, tmp_path: Path) -> None:
    job = slurm.submit(tmp_path, report, "save-once")
    slurm.until(job, lambda shown: _field(shown, "Restarts") == "1" and _field(shown, "JobState") == "PENDING")
    slurm.ask("scancel", job)  # Slurm waits for two minutes before it starts such a job
    assert "saved; start the job again" in unlabelled((tmp_path / "job.log").read_text())


def test_of_a_job_array_the_task_that_has_saved_is_queued_again_alone(
    slurm: Slurm, report: Path, tmp_path: Path
) -> None:
    """The last task of an array has the array's own number, by which Slurm knows all of its tasks."""
    flags = ("--array=0-1%1", "--nodes=1", "--gpus-per-node=0", "--cpus-per-task=2")
    array = slurm.submit(tmp_path, report, "save-last", flags=flags)
    slurm.until(f"{array}_1", lambda shown: _field(shown, "Restarts") == "1" and _field(shown, "JobState") == "PENDING")
    shown = slurm.ask("scontrol", "--oneliner", "show", "job", f"{array}_0")
    assert (_field(shown, "JobState"), _field(shown, "Restarts")) == ("COMPLETED", "0")
    slurm.ask("scancel", array)


@pytest.mark.thorough
def test_digits_trains_on_two_nodes(slurm: Slurm, tmp_path: Path) -> None:
    job = slurm.run(tmp_path, ROOT / "examples" / "digits.py")
    assert (job.state, job.exit_code) == ("COMPLETED", 0), job.log
    accuracies = re.findall(r"test accuracy: ([\d.]+)%", job.log)
    assert len(accuracies) == 1, job.log
    assert float(accuracies[0]) > 90
