"""The fault matrix on the real command, one node: what a user sees, and that nothing is left. rigs/ has the rest."""

import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import launching
import psutil
import pytest
import torch
from job_processes import JobProcesses
from labels import unlabelled
from launching import DDPKIT, free_port, launch, seconds, wait_until

pytestmark = pytest.mark.slow

Script = Callable[[str], Path]
MEETS = """\
import os, signal, sys, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
rank, total = dist.get_rank(), torch.ones(1)
dist.all_reduce(total)
"""
# Data loader workers and the rank itself ignore SIGTERM; a grandchild has left its session, another its parent too.
STUBBORN = """\
import multiprocessing, signal, subprocess, sys, torch
from multiprocessing import shared_memory
from torch.utils.data import DataLoader, Dataset

class Endless(Dataset):
    def __len__(self):
        return 10**8
    def __getitem__(self, index):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        return torch.ones(1000)

if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    memory = shared_memory.SharedMemory(create=True, size=1000)
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    subprocess.run("setsid sleep 1000 & exit", shell=True)
    batches = iter(DataLoader(Endless(), num_workers=2, batch_size=4))
    for _ in range(8):
        next(batches)
    with open(sys.argv[1], "w") as ready:
        ready.write(f"{os.getpid()}\\n")
    for _ in batches:
        pass
"""


def pipe_at(path: Path) -> Iterator[Path]:
    """A pipe that is open all the time: what is written stays there until it is read."""
    os.mkfifo(path)
    descriptor = os.open(path, os.O_RDWR)
    yield path
    os.close(descriptor)


@pytest.fixture
def ready(tmp_path: Path) -> Iterator[Path]:
    """A pipe that ranks write to once they are where the test wants them."""
    yield from pipe_at(tmp_path / "ready")


def wait_for(ready: Path, ranks: int) -> list[str]:
    """The line that each has written."""
    with ready.open("rb", buffering=0) as pipe:
        return [pipe.readline().decode() for _ in range(ranks)]


@contextmanager
def started(*words: object, job: JobProcesses, **env: str) -> Iterator["subprocess.Popen[str]"]:
    """Run `ddpkit launch` while the test does something; nothing of the job is left at the end."""
    with launching.started(DDPKIT, "launch", *words, env={**job.env, **env}) as launcher:
        try:
            yield launcher
        finally:
            launcher.kill()
            for pid in job.alive():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def server_of(launcher: "subprocess.Popen[str]") -> psutil.Process:
    """The process that starts and watches the workers."""
    (found,) = filter(_is_server, psutil.Process(launcher.pid).children())
    return found


def _is_server(process: psutil.Process) -> bool:
    with suppress(psutil.Error):
        return any("from ddp_kit.launcher.warm import server" in word for word in process.cmdline())
    return False


def suspend(process: psutil.Process) -> None:
    """Stop a process, and wait until it is."""
    process.suspend()
    wait_until(lambda: process.status() == psutil.STATUS_STOPPED, "stopped")


def shared_memory(pids: Iterable[int]) -> set[Path]:
    """What these processes have mapped of /dev/shm and is still there by its name."""
    maps = "".join(Path(f"/proc/{pid}/maps").read_text() for pid in pids)
    return {Path(path) for path in re.findall(r"/dev/shm/\S+$", maps, re.MULTILINE) if Path(path).exists()}


# Nothing left ----------------------------------------------------------------------------------------------------


def the_launcher_is_killed(launcher: "subprocess.Popen[str]", rank: int) -> None:
    launcher.kill()


def the_launcher_of_a_stopped_server_is_killed(launcher: "subprocess.Popen[str]", rank: int) -> None:
    suspend(server_of(launcher))
    launcher.kill()


def the_server_is_killed(launcher: "subprocess.Popen[str]", rank: int) -> None:
    server_of(launcher).kill()


def a_rank_is_killed(launcher: "subprocess.Popen[str]", rank: int) -> None:
    os.kill(rank, signal.SIGKILL)


def it_is_interrupted_twice(launcher: "subprocess.Popen[str]", rank: int) -> None:
    launcher.send_signal(signal.SIGINT)
    launcher.send_signal(signal.SIGTERM)  # another one, so that the two are not taken for one


@pytest.mark.parametrize("flags", [(), ("--cold",)], ids=["warm", "cold"])
@pytest.mark.parametrize(
    "fault",
    [
        the_launcher_is_killed,
        the_launcher_of_a_stopped_server_is_killed,
        the_server_is_killed,
        a_rank_is_killed,
        it_is_interrupted_twice,
    ],
)
def test_fault_leaves_no_process_or_file(
    script: Script,
    ready: Path,
    tmp_path_factory: pytest.TempPathFactory,
    flags: Sequence[str],
    fault: Callable[..., None],
) -> None:
    job, temporary = JobProcesses(), tmp_path_factory.getbasetemp().parent / uuid.uuid4().hex[:8]
    temporary.mkdir()  # in a short path: that of a socket for passing tensors on has at most 108 bytes
    main = script(f"import os\n{STUBBORN}")
    grace = 0 if fault is a_rank_is_killed else 3000
    words = [*flags, "--shutdown-timeout", grace, "--nproc-per-node", 2, main, ready]
    with started(*words, job=job, TMPDIR=str(temporary)) as launcher:
        rank = int(wait_for(ready, 2)[0])
        there = job.alive()
        assert len(there) >= 2 + 2 * (1 + 2 + 2), there
        shared = shared_memory(there)
        assert len(shared) >= 2
        fault(launcher, rank)
        job.wait_until_gone(there)
        launcher.wait()
        assert job.alive() == {}
    # torch 2.15 makes the folder of its compile cache, which outlives every job, as its compiler is imported.
    assert not [path for path in temporary.iterdir() if not path.name.startswith("torchinductor_")]
    shutil.rmtree(temporary)
    assert not [path for path in shared if path.exists()]


# Ranks whose threads or memory take longer to end than the rank's first thread does.
BUSY_THREADS = """\
import subprocess, sys, threading, time
import torch

def busy():
    matrix = torch.ones(300, 300)
    while True:
        matrix @ matrix

for _ in range(4):
    threading.Thread(target=busy, daemon=True).start()
for _ in range(2):
    subprocess.Popen(["sleep", "1000"])
with open(sys.argv[1], "w") as ready:
    ready.write("started\\n")
time.sleep(1000)
"""
MANY_TENSORS = """\
import sys, time
import torch
from torch.utils.data import DataLoader

if __name__ == "__main__":
    tensors = [torch.ones(4) for _ in range(200_000)]
    batches = iter(DataLoader(range(10**8), num_workers=2))
    next(batches)
    with open(sys.argv[1], "w") as ready:
        ready.write("started\\n")
    for _ in batches:
        time.sleep(0.001)
"""


@pytest.mark.parametrize("fault", [the_launcher_is_killed, the_server_is_killed])
@pytest.mark.parametrize("text", [BUSY_THREADS, MANY_TENSORS], ids=["threads", "tensors"])
def test_fault_leaves_no_process_of_ranks_that_exit_slowly(
    script: Script, ready: Path, text: str, fault: Callable[..., None]
) -> None:
    job = JobProcesses()
    with started("--nproc-per-node", 2, script(text), ready, job=job) as launcher:
        wait_for(ready, 2)
        # Linux shows the environment of a process, by which it is found, a little after Popen returns.
        launching.wait_until(lambda: len(job.alive()) >= 2 + 2 * (1 + 2), job.alive)
        there = job.alive()
        fault(launcher, 0)
        job.wait_until_gone(there)
        launcher.wait()
        assert job.alive() == {}


@pytest.mark.parametrize("fault", [the_launcher_is_killed, a_rank_is_killed])
def test_fault_leaves_no_batches_in_named_shared_memory(
    script: Script, ready: Path, fault: Callable[..., None]
) -> None:
    """Their names are known to torch_shm_manager alone, which would remove them two seconds later."""
    job = JobProcesses()
    temporary = Path(tempfile.mkdtemp(dir="/tmp"))  # a short path: the manager's socket is in it
    by_name = "import os, torch.multiprocessing\ntorch.multiprocessing.set_sharing_strategy('file_system')\n"
    main = script(by_name + STUBBORN)
    words = ["--shutdown-timeout", 0, "--nproc-per-node", 2, main, ready]
    with started(*words, job=job, TMPDIR=str(temporary)) as launcher:
        rank = int(wait_for(ready, 2)[0])
        assert list(temporary.glob("torch-shm-dir-*"))
        there = job.alive()
        fault(launcher, rank)
        job.wait_until_gone(there)
    assert not list(temporary.glob("torch-shm-dir-*"))
    shutil.rmtree(temporary)
    assert not [path for pid in there for path in Path("/dev/shm").glob(f"torch_{pid}_*")]


def test_process_that_a_script_leaves_running_is_ended_and_named(script: Script) -> None:
    main = script("import subprocess\nsubprocess.Popen(['sleep', '1001'], start_new_session=True)\n")
    job = JobProcesses()
    run = launch("--nproc-per-node", 2, main, env=job.env)
    assert run.returncode == 0
    assert run.stderr.count("ended a process that the job left running: sleep 1001") == 2
    assert job.alive() == {}


def test_process_that_is_not_the_jobs_is_left_running(script: Script) -> None:
    """A launch in the background of a shell of the user's own, while other work runs."""
    main = script("pass")
    with launching.started("sleep", 1002) as other:
        assert launch("--nproc-per-node", 2, main).returncode == 0
        assert other.poll() is None


# The verdict -----------------------------------------------------------------------------------------------------


def test_traceback_of_one_of_eight_ranks_is_shown_once_and_last(script: Script) -> None:
    main = script(f"""{MEETS}
for step in range(10):
    if step == 5 and rank == 3:
        raise ValueError("no luck")
    dist.all_reduce(total)
""")
    assert_shown_once(launch("--nproc-per-node", 8, main, labels=True), rank=3)


def test_traceback_of_a_cold_worker_is_shown_once_and_last(script: Script) -> None:
    """Without a process group, with which torch 2.13 may abort such a process while it ends."""
    main = script("import os, signal\nif os.environ['RANK'] == '1':\n    raise ValueError('no luck')\nsignal.pause()")
    assert_shown_once(launch("--cold", "--nproc-per-node", 3, main, labels=True), rank=1)


def test_traceback_of_ranks_that_exit_slowly_is_shown_once(script: Script) -> None:
    """And each that failed alike is counted, though it is terminated while it ends.

    Rank 0 exits a second after all ranks have printed their tracebacks; the others wait to be terminated.
    """
    main = script(f"""{MEETS}
import atexit, os, pathlib, time

folder = pathlib.Path(__file__).parent

def end():
    folder.joinpath(f"printed.{{rank}}").touch()
    while rank > 0 or len([*folder.glob("printed.*")]) < 3:
        time.sleep(0.01)
    time.sleep(1)
    os._exit(1)

print("before")
dist.barrier()
atexit.register(end)
raise ValueError("no luck")
""")
    run = launch("--cold", "--nproc-per-node", 3, main)
    assert run.stderr.count("Traceback (most recent call last)") == 1, run.stderr
    assert re.search(r"ddpkit: rank \d failed first: exit code 1 .*: ValueError: no luck", run.stderr), run.stderr
    assert re.search(r"^  ranks \d, \d then failed with the same error$", run.stderr, re.MULTILINE), run.stderr


def assert_shown_once(run: "subprocess.CompletedProcess[str]", rank: int) -> None:
    lines = run.stderr.splitlines()
    assert run.returncode == 1
    assert run.stderr.count("Traceback (most recent call last)") == 1, run.stderr
    start = lines.index("Traceback (most recent call last):")
    assert "no luck" in lines[start + 2], "the script's own line stands in it"
    assert lines[start + 3] == "ValueError: no luck"
    assert lines[start + 4].startswith(f"ddpkit: rank {rank} failed first: exit code 1 (local rank {rank}, pid ")
    assert lines[start + 4].endswith("): ValueError: no luck")


def test_tracebacks_that_are_the_same_on_all_ranks_are_shown_once(script: Script) -> None:
    run = launch("--nproc-per-node", 3, script(f"{MEETS}\ndist.barrier()\nraise ValueError('the same everywhere')"))
    assert run.stderr.count("Traceback (most recent call last)") == 1, run.stderr
    assert re.search(r"ddpkit: rank \d failed first: exit code 1 .*: ValueError: the same everywhere", run.stderr)


def test_traceback_that_the_script_has_caught_stays_in_its_place(script: Script) -> None:
    main = script("""
import logging, sys
logging.basicConfig(format="%(message)s")
try:
    1 / 0
except ZeroDivisionError:
    logging.exception("caught")
print("continues", file=sys.stderr)
""")
    run = launch("--nproc-per-node", 2, "--local-ranks-filter", "1", main)
    assert run.returncode == 0
    lines = run.stderr.splitlines()
    start = lines.index("caught")
    assert lines[start + 1] == "Traceback (most recent call last):"
    assert lines[-2:] == ["ZeroDivisionError: division by zero", "continues"]


def test_script_that_is_its_own_job_prints_its_traceback_itself(script: Script) -> None:
    run = launch("--nproc-per-node", 1, script("raise ValueError('alone')"))
    assert run.stderr.count("ValueError: alone") == 2, "its own, and in the verdict"
    assert run.stderr.count("Traceback") == 1


def test_verdict_on_a_killed_trainer_names_its_step(script: Script) -> None:
    main = script("""
import os, signal, torch
from torch import nn
from ddp_kit import Trainer, TrainerConfig
model = nn.Linear(2, 1)
config = TrainerConfig(global_batch_size=4, epochs=100)
trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, batch: m(batch).square().mean(), config)
for step in trainer.steps(torch.ones(80, 2)):
    if step.number == 7 and trainer.world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
""")
    run = launch("--nproc-per-node", 2, main)
    assert run.returncode == 137
    assert re.search(r"rank 1 failed first: killed by SIGKILL \(local rank 1, pid \d+, after step 7\)", run.stderr)


def test_verdict_names_a_rank_that_exits_early(script: Script) -> None:
    run = launch(
        "--nproc-per-node", 3, script(f"import os\n{MEETS}\nif rank == 1: os._exit(0)\ndist.all_reduce(total)")
    )
    assert run.returncode == 1
    assert "ddpkit: rank 1 ended early, with exit code 0, while other ranks still needed it; then rank" in run.stderr


def test_verdict_is_written_as_json_to_the_log_folder(script: Script, tmp_path: Path) -> None:
    main = script("import os, signal, sys\nif os.environ['RANK'] == '1': sys.exit(7)\nsignal.pause()")
    run = launch("--log-dir", tmp_path / "logs", "--nproc-per-node", 2, main)
    (file,) = (tmp_path / "logs").rglob("verdict.json")
    found = json.loads(file.read_text())
    assert (run.returncode, found["exit_code"], found["first_failure"]["rank"]) == (7, 7, 1)
    assert file.stat().st_mode & 0o777 == 0o600
    assert file.parent.stat().st_mode & 0o777 == 0o700
    assert f"the logs and the verdict are in {file.parent}" in run.stderr


@pytest.fixture
def little_memory() -> Iterator[Path]:
    """A control group with half a GiB; with two where torch is built with CUDA, whose libraries take more."""
    try:
        own = re.search(r"^\d+:(?:memory)?:(.*)$", Path("/proc/self/cgroup").read_text(), re.MULTILINE)
        mount = Path("/sys/fs/cgroup/memory" if Path("/sys/fs/cgroup/memory").is_dir() else "/sys/fs/cgroup")
        found = re.search(r"^\d+:memory:(.*)$", Path("/proc/self/cgroup").read_text(), re.MULTILINE) or own
        assert found is not None
        group = mount / found[1].lstrip("/") / f"ddpkit-test-{os.getpid()}"
        group.mkdir()
        limit = next(file for file in (group / "memory.max", group / "memory.limit_in_bytes") if file.exists())
        limit.write_text(str((512 if torch.version.cuda is None else 2048) << 20))
    except (OSError, StopIteration) as error:
        pytest.skip(f"needs a memory control group of its own: {error}")
    yield group
    for pid in (group / "cgroup.procs").read_text().split():
        os.kill(int(pid), signal.SIGKILL)
    group.rmdir()


def test_rank_killed_for_memory_is_reported_and_not_restarted_forever(script: Script, little_memory: Path) -> None:
    main = script("""
import os, signal
if os.environ["RANK"] == "1":
    hoard = []
    while True:
        hoard.append(bytearray(b"x") * (64 << 20))
signal.pause()
""")
    join = f'echo $$ > {little_memory}/cgroup.procs; exec "$@"'
    command = ["bash", "-c", join, "-", DDPKIT, "launch", "--nproc-per-node", 2, "--max-restarts", 100, main]
    run = launching.run(*command)
    assert run.returncode == 137, run.stderr
    assert "rank 1 failed first: out of memory, killed by SIGKILL" in run.stderr
    assert "not restarted again: the same failure occurred 6 times in a row" in run.stderr
    assert "hint: this machine, container or job is out of memory" in run.stderr


@pytest.mark.parametrize(
    ("fault", "named", "timeout"),
    [
        ("os.kill(os.getpid(), 9)", r"DataLoader worker \(pid|DataLoader worker 1", seconds(200)),
        ("time.sleep(1000)", "sent no batch within the timeout", seconds(4)),
    ],
)
def test_dataloader_worker_that_dies_or_hangs_is_named_with_its_rank(
    script: Script, fault: str, named: str, timeout: float
) -> None:
    """In its second batch: by then the workers of both ranks have started."""
    main = script(f"""
import os, time, torch
from torch import nn
from torch.utils.data import Dataset, get_worker_info
from ddp_kit import Trainer, TrainerConfig

class Data(Dataset):
    drawn = 0
    def __len__(self):
        return 400
    def __getitem__(self, index):
        self.drawn += 1
        if os.environ["RANK"] == "1" and self.drawn > 4 and get_worker_info().id == 1:
            {fault}
        return torch.ones(2)

model = nn.Linear(2, 1)
config = TrainerConfig(global_batch_size=8, data={{"num_workers": 2, "timeout": {timeout}}})
trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), lambda m, batch: m(batch).square().mean(), config)
trainer.fit(Data())
""")
    run = launch("--nproc-per-node", 2, main)
    assert run.returncode == 1
    assert re.search(rf"rank 1 failed first: .*({named})", run.stderr), run.stderr


# Signals ---------------------------------------------------------------------------------------------------------

LISTENS = """\
import os, signal, sys
def say(*words): os.write(1, (" ".join(map(str, words)) + "\\n").encode())
def end(number, frame):
    say("told", os.environ["RANK"], signal.Signals(number).name)
    sys.exit(int(os.environ.get("CODE", "0")))
if os.environ["RANK"] != os.environ.get("DEAF"):
    signal.signal(signal.SIGUSR1, lambda number, frame: say("warned", os.environ["RANK"]))
signal.signal(signal.SIGTERM, end)
wakes, wake = os.pipe()
os.set_blocking(wake, False)
signal.set_wakeup_fd(wake)
with open(sys.argv[1], "w") as ready:
    ready.write("ready\\n")
while True:
    os.read(wakes, 1)  # not signal.pause(), which a signal just before it would not end
"""


def test_warning_signal_reaches_ranks_with_a_handler_and_ends_no_rank(script: Script, ready: Path) -> None:
    job = JobProcesses()
    with started("--nproc-per-node", 2, script(LISTENS), ready, job=job, DEAF="0") as launcher:
        wait_for(ready, 2)
        launcher.send_signal(signal.SIGUSR1)
        assert launcher.stdout is not None
        assert launcher.stderr is not None
        assert unlabelled(launcher.stdout.readline()) == "warned 1\n"
        said = iter(launcher.stderr.readline, "")
        assert any("SIGUSR1 was not forwarded to workers that have no handler: local rank 0" in line for line in said)
        launcher.send_signal(signal.SIGTERM)
        told, _ = launcher.communicate()
        assert sorted(unlabelled(told).splitlines()) == ["told 0 SIGTERM", "told 1 SIGTERM"]
        assert launcher.returncode == 143


@pytest.fixture
def go(tmp_path: Path) -> Iterator[Path]:
    """A pipe from which each rank reads one byte before it continues (`GOES_ON`); `let_go` writes the bytes."""
    yield from pipe_at(tmp_path / "go")


def let_go(go: Path, ranks: int) -> None:
    go.write_text("." * ranks)


GOES_ON = """
import os, signal, sys, time
with open(sys.argv[1], "w") as ready:
    ready.write("ready\\n")
os.read(os.open(sys.argv[2], os.O_RDONLY), 1)
"""
STOPS_ITS_PARENT = """
import os, signal, sys, time
def tell_parent():
    for _ in range(20 * (os.environ["RANK"] != "2")):
        os.kill(os.getppid(), signal.SIGTERM)
        time.sleep(0.02)
def end(number, frame):
    os.write(1, b"told to stop\\n")
    tell_parent()  # a second signal to the launcher would end the ranks here
    sys.exit(75)
signal.signal(signal.SIGTERM, end)
"""


@pytest.mark.parametrize("flags", [(), ("--cold",)], ids=["warm", "cold"])
def test_ranks_that_signal_their_parent_stop_the_launcher(
    flags: Sequence[str], script: Script, ready: Path, go: Path
) -> None:
    """Two of three do so, again and again, as preemption handlers do: all are told once, and end in order."""
    main = script(f"{STOPS_ITS_PARENT}{GOES_ON}tell_parent()\nsignal.pause()")
    with started(*flags, "--shutdown-timeout", 3000, "--nproc-per-node", 3, main, ready, go, job=JobProcesses()) as job:
        wait_for(ready, 3)
        let_go(go, 3)
        output, errors = job.communicate()
        assert (job.returncode, output.count("told to stop")) == (75, 3), errors


def test_job_whose_warm_server_is_stopped_ends(script: Script, ready: Path, go: Path) -> None:
    job = JobProcesses()
    with started("--cold", "--nproc-per-node", 2, script(GOES_ON), ready, go, job=job) as launcher:
        wait_for(ready, 2)
        suspend(server_of(launcher))
        let_go(go, 2)
        _, errors = launcher.communicate()
        assert launcher.returncode == 0
        assert "was stopped by a signal" in errors
        assert job.alive() == {}


def test_launcher_whose_ranks_have_saved_exits_with_the_code_for_a_restart(script: Script, ready: Path) -> None:
    job = JobProcesses()
    with started("--nproc-per-node", 2, script(LISTENS), ready, job=job, CODE="75") as launcher:
        wait_for(ready, 2)
        launcher.send_signal(signal.SIGTERM)
        _, said = launcher.communicate()
        assert launcher.returncode == 75
        assert "the job saved a checkpoint; start it again to continue (exit code 75)" in said


def test_rank_that_has_saved_waits_for_the_others_and_is_not_restarted(script: Script) -> None:
    main = script("""
import os, sys, time
from pathlib import Path
here = Path(f"{__file__}.{os.environ['RANK']}")
here.write_text(f"/proc/{os.getpid()}\\n")
if os.environ["RANK"] == "1":  # it is still saving when the other one has ended, and its parent knows
    other = here.with_suffix(".0")
    while not other.exists() or not other.read_text().endswith("\\n") or Path(other.read_text().strip()).exists():
        time.sleep(0.01)
    time.sleep(0.5)  # for the launcher, which must not end it
sys.exit(75)
""")
    run = launch("--nproc-per-node", 2, "--max-restarts", 3, main)
    assert run.returncode == 75
    assert "restart" not in run.stderr


def test_launcher_killed_at_its_start_leaves_no_folder(script: Script, tmp_path: Path) -> None:
    """The server is stopped, as if it were slow to import torch, until the launcher has come to its folder."""
    temporary, job = tmp_path / "temporary", JobProcesses()
    temporary.mkdir()

    def server() -> list[psutil.Process]:
        return list(filter(_is_server, psutil.Process(launcher.pid).children()))

    def needs_folder() -> bool:
        return any(temporary.glob("ddpkit-*")) or any("make_folder" in line for line in launching.stacks(launcher.pid))

    with started(script(MEETS), job=job, TMPDIR=str(temporary)) as launcher:
        wait_until(server, "a server")
        (stopped,) = server()
        suspend(stopped)
        wait_until(needs_folder, "at its folder")
        launcher.kill()
        with suppress(psutil.NoSuchProcess):
            stopped.resume()
        wait_until(lambda: not job.alive(), "gone")
        assert not list(temporary.glob("ddpkit-*"))


# Several nodes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("fault", "code"), [("raise ValueError('far away')", 1), ("sys.exit(7)", 7)])
def test_every_node_ends_with_the_same_verdict(script: Script, fault: str, code: int) -> None:
    main = script(f"{MEETS}\nif rank == 3:\n    {fault}\ndist.all_reduce(total)")
    meet = ["--nnodes", 2, "--nproc-per-node", 2, "--master-addr", "127.0.0.1", "--master-port", free_port()]
    job = JobProcesses()
    with (
        started(*meet, "--node-rank", 0, main, job=job) as first,
        started(*meet, "--node-rank", 1, main, job=job) as second,
    ):
        ends = [launcher.communicate()[1] for launcher in (first, second)]
        assert (first.returncode, second.returncode) == (code, code), ends
        for said in ends:
            assert re.search(rf"ddpkit: rank 3 failed first: exit code {code} \(local rank 1, host \S+, pid", said)
            assert said.count("Traceback (most recent call last)") == (code == 1), said
        assert job.alive() == {}


def test_nodes_with_different_numbers_of_nodes_end_with_a_usage_error(script: Script) -> None:
    main, meet = script(MEETS), ["--master-addr", "127.0.0.1", "--master-port", free_port()]
    job = JobProcesses()
    with (
        started(*meet, "--nnodes", 2, "--node-rank", 0, main, job=job) as first,
        started(*meet, "--nnodes", 3, "--node-rank", 1, main, job=job) as second,
    ):
        for launcher in (first, second):
            _, errors = launcher.communicate()
            assert launcher.returncode == 2, errors
            assert re.search(r"was started with --nnodes 2, .* with --nnodes 3\n  hint: use the same --nnodes", errors)


MEETS_UNTIL_TOLD = f"""\
{MEETS}
from pathlib import Path
with open(sys.argv[1], "w") as ready:
    ready.write(f"{{os.getpid()}}\\n")
while True:
    total[0] = Path(sys.argv[2]).exists()
    dist.all_reduce(total)
    if total[0] > 0:
        break
dist.destroy_process_group()
"""


def suspended_twice_as_long_as_a_lost_node(job: JobProcesses, heartbeat_timeout: float) -> None:
    """Suspend all processes of a job, as `scontrol suspend` and a paused machine do, and continue them."""
    processes = [psutil.Process(pid) for pid in job.alive()]
    for process in processes:
        process.suspend()
    time.sleep(2 * heartbeat_timeout)
    for process in processes:
        process.resume()


def test_job_of_two_nodes_that_was_suspended_continues(script: Script, ready: Path, tmp_path: Path) -> None:
    main, told = script(MEETS_UNTIL_TOLD), tmp_path / "told"
    interval = seconds(0.5)
    flags = ["--nnodes", 2, "--master-addr", "127.0.0.1", "--master-port", free_port()]
    flags += ["--rdzv-conf", f"keep_alive_interval={interval},keep_alive_max_attempt=3", "--node-rank"]
    job = JobProcesses()
    with (
        started(*flags, 0, main, ready, told, job=job) as first,
        started(*flags, 1, main, ready, told, job=job) as second,
    ):
        wait_for(ready, 2)
        for _ in range(3):
            suspended_twice_as_long_as_a_lost_node(job, 3 * interval)
        told.touch()
        ends = [launcher.communicate()[1] for launcher in (first, second)]
        assert (first.returncode, second.returncode) == (0, 0), ends


def test_launch_with_too_few_descriptors_advises_a_higher_limit(script: Script) -> None:
    limited = ("sh", "-c", 'ulimit -n 22 && exec "$@"', "sh", DDPKIT)
    done = launching.run(*limited, "launch", "--nproc-per-node", 2, script("print('started')"))
    assert done.returncode == 3, done.stderr
    assert "Too many open files" in done.stderr
    assert "hint: the limit of open files is reached: run `ulimit -n 65536`" in done.stderr
    assert "space" not in done.stderr


EXIT_BLOCKS = f"""{MEETS}
import atexit, ctypes
from datetime import timedelta
from torch.distributed.elastic.multiprocessing.errors import record
from ddp_kit.uncaught import show_without_traceback

@record
def fail(message):
    raise ValueError(message)

show_without_traceback(rank)  # as a Trainer does
group = dist.new_group(timeout=timedelta(seconds=float(sys.argv[1])))
if rank == 1:
    atexit.register(ctypes.PyDLL(None).pause)  # blocks in C with the interpreter lock held, as a clean-up of NCCL may
    fail("no luck")
if "catches" in sys.argv:
    try:
        fail("caught")
    except ValueError:
        pass
dist.barrier(group=group)
"""


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--shutdown-timeout", 1], [1000, "catches"]),
        (["--shutdown-timeout", 1, "--cold"], [1000, "catches"]),
        (["--shutdown-timeout", 10, "--hang-timeout", 0.8], [1000]),  # ten times as long during the first collectives
        (["--shutdown-timeout", 1000], [2]),
    ],
    ids=["warm", "cold", "hang-timeout", "collective-times-out"],
)
def test_rank_whose_exit_blocks_fails_with_its_exception(
    script: Script, flags: Sequence[object], words: Sequence[object]
) -> None:
    """But not a rank that has caught an exception, though @record has written an error file for that."""
    run = launch(*flags, "--nproc-per-node", 2, script(EXIT_BLOCKS), *words)
    assert run.returncode == 1
    assert re.search(r"rank 1 failed first: exit code 1 \(.*\): ValueError: no luck", run.stderr), run.stderr
    assert "hung" not in run.stderr
