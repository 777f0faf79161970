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

import psutil
import pytest

from ddp_kit.health.kernel_log import KERNEL_LOG
from ddp_kit.health.node import sees_kernel_pids
from tests.support import launching
from tests.support.job_processes import JobProcesses
from tests.support.labels import unlabelled
from tests.support.launching import DDPKIT, PROGRAMS, free_port, launch, seconds, wait_until

pytestmark = pytest.mark.slow

Script = Callable[[str], Path]
REDUCES, IGNORES_SIGTERM = PROGRAMS / "reduces.py", PROGRAMS / "ignores_sigterm.py"
ENDS_ON_SIGTERM = PROGRAMS / "ends_on_sigterm.py"


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


def lines_of_ranks(ready: Path, ranks: int) -> list[str]:
    """The line that each has written."""
    with ready.open("rb", buffering=0) as pipe:
        return [pipe.readline().decode() for _ in range(ranks)]


@contextmanager
def started_job(*words: object, job: JobProcesses, **env: str) -> Iterator["subprocess.Popen[str]"]:
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
    ready: Path,
    tmp_path_factory: pytest.TempPathFactory,
    flags: Sequence[str],
    fault: Callable[..., None],
) -> None:
    job, temporary = JobProcesses(), tmp_path_factory.getbasetemp().parent / uuid.uuid4().hex[:8]
    temporary.mkdir()  # in a short path: that of a socket for passing tensors on has at most 108 bytes
    grace = 0 if fault is a_rank_is_killed else 3000
    words = [*flags, "--shutdown-timeout", grace, "--nproc-per-node", 2, IGNORES_SIGTERM, ready]
    with started_job(*words, job=job, TMPDIR=str(temporary)) as launcher:
        rank = int(lines_of_ranks(ready, 2)[0])
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


@pytest.mark.parametrize("fault", [the_launcher_is_killed, the_server_is_killed])
@pytest.mark.parametrize("program", ["busy_threads.py", "many_tensors.py"])
def test_fault_leaves_no_process_of_ranks_that_exit_slowly(
    ready: Path, program: str, fault: Callable[..., None]
) -> None:
    job = JobProcesses()
    with started_job("--nproc-per-node", 2, PROGRAMS / program, ready, job=job) as launcher:
        lines_of_ranks(ready, 2)
        # Linux shows the environment of a process, by which it is found, a little after Popen returns.
        launching.wait_until(lambda: len(job.alive()) >= 2 + 2 * (1 + 2), job.alive)
        there = job.alive()
        fault(launcher, 0)
        job.wait_until_gone(there)
        launcher.wait()
        assert job.alive() == {}


@pytest.mark.parametrize("fault", [the_launcher_is_killed, a_rank_is_killed])
def test_fault_leaves_no_batches_in_named_shared_memory(ready: Path, fault: Callable[..., None]) -> None:
    """Their names are known to torch_shm_manager alone, which would remove them two seconds later."""
    job = JobProcesses()
    temporary = Path(tempfile.mkdtemp(dir="/tmp"))  # a short path: the manager's socket is in it
    words = ["--shutdown-timeout", 0, "--nproc-per-node", 2, IGNORES_SIGTERM, ready, "file_system"]
    with started_job(*words, job=job, TMPDIR=str(temporary)) as launcher:
        rank = int(lines_of_ranks(ready, 2)[0])
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


def test_traceback_of_one_of_eight_ranks_is_shown_once_and_last() -> None:
    assert_shown_once(launch("--nproc-per-node", 8, REDUCES, 3, "error", labels=True), rank=3)


def test_traceback_of_a_cold_worker_is_shown_once_and_last(script: Script) -> None:
    """Without a process group, with which torch 2.13 may abort such a process while it ends."""
    main = script("import os, signal\nif os.environ['RANK'] == '1':\n    raise ValueError('no luck')\nsignal.pause()")
    assert_shown_once(launch("--cold", "--nproc-per-node", 3, main, labels=True), rank=1)


def test_traceback_of_ranks_that_exit_slowly_is_shown_once(tmp_path: Path) -> None:
    """And each that failed alike is counted, though it is terminated while it ends.

    Rank 0 exits a second after all ranks have printed their tracebacks; the others wait to be terminated.
    """
    run = launch("--cold", "--nproc-per-node", 3, PROGRAMS / "fails_and_exits_slowly.py", cwd=tmp_path)
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


def test_tracebacks_that_are_the_same_on_all_ranks_are_shown_once() -> None:
    run = launch("--nproc-per-node", 3, REDUCES, "all", "error")
    assert run.stderr.count("Traceback (most recent call last)") == 1, run.stderr
    assert re.search(r"ddpkit: rank \d failed first: exit code 1 .*: ValueError: no luck", run.stderr)


def test_traceback_that_the_script_has_caught_stays_in_its_place() -> None:
    run = launch("--nproc-per-node", 2, "--local-ranks-filter", "1", PROGRAMS / "logs_exception.py")
    assert run.returncode == 0
    lines = run.stderr.splitlines()
    start = lines.index("caught")
    assert lines[start + 1] == "Traceback (most recent call last):"
    assert lines[-2:] == ["ZeroDivisionError: division by zero", "continues"]


def test_script_that_is_its_own_job_prints_its_traceback_itself(script: Script) -> None:
    run = launch("--nproc-per-node", 1, script("raise ValueError('alone')"))
    assert run.stderr.count("ValueError: alone") == 2, "its own, and in the verdict"
    assert run.stderr.count("Traceback") == 1


def test_verdict_on_a_killed_trainer_names_its_step() -> None:
    run = launch("--nproc-per-node", 2, PROGRAMS / "killed_in_training.py")
    assert run.returncode == 137
    assert re.search(r"rank 1 failed first: killed by SIGKILL \(local rank 1, pid \d+, after step 7\)", run.stderr)


def test_verdict_names_a_rank_that_exits_early() -> None:
    run = launch("--nproc-per-node", 3, REDUCES, 1, "exit")
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


def test_rank_killed_for_memory_is_reported_and_not_restarted_forever(little_memory: Path) -> None:
    join = f'echo $$ > {little_memory}/cgroup.procs; exec "$@"'
    command = ["bash", "-c", join, "-", DDPKIT, "launch", "--nproc-per-node", 2, "--max-restarts", 100]
    run = launching.run(*command, PROGRAMS / "fills_memory.py")
    assert run.returncode == 137, run.stderr
    assert "rank 1 failed first: out of memory, killed by SIGKILL" in run.stderr
    assert "not restarted again: the same failure occurred 6 times in a row" in run.stderr
    assert "hint: this machine, container or job is out of memory" in run.stderr
    if os.access(KERNEL_LOG, os.R_OK) and sees_kernel_pids():
        line = r"^  kernel, \d\.\d s before: .*Killed process \d+ .* \(rank 1\)$"
        assert len(re.findall(line, run.stderr, re.MULTILINE)) == 6, run.stderr  # in the verdict, and at each restart


@pytest.mark.parametrize(
    ("fault", "named", "timeout"),
    [
        ("dies", r"DataLoader worker \(pid|DataLoader worker 1", seconds(200)),
        ("hangs", "sent no batch within the timeout", seconds(4)),
    ],
)
def test_dataloader_worker_that_dies_or_hangs_is_named_with_its_rank(fault: str, named: str, timeout: float) -> None:
    run = launch("--nproc-per-node", 2, PROGRAMS / "dataloader_worker_fails.py", fault, timeout)
    assert run.returncode == 1
    assert re.search(rf"rank 1 failed first: .*({named})", run.stderr), run.stderr


# Signals ---------------------------------------------------------------------------------------------------------


def test_warning_signal_reaches_ranks_with_a_handler_and_ends_no_rank(ready: Path) -> None:
    job = JobProcesses()
    with started_job("--nproc-per-node", 2, ENDS_ON_SIGTERM, ready, job=job, DEAF="0") as launcher:
        lines_of_ranks(ready, 2)
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
import os, sys
with open(sys.argv[1], "w") as ready:
    ready.write("ready\\n")
os.read(os.open(sys.argv[2], os.O_RDONLY), 1)
"""


@pytest.mark.parametrize("flags", [(), ("--cold",)], ids=["warm", "cold"])
def test_ranks_that_signal_their_parent_stop_the_launcher(flags: Sequence[str], ready: Path, go: Path) -> None:
    """Two of three do so, again and again, as preemption handlers do: all are told once, and end in order."""
    words = [*flags, "--shutdown-timeout", 3000, "--nproc-per-node", 3, PROGRAMS / "stops_its_parent.py", ready, go]
    with started_job(*words, job=JobProcesses()) as job:
        lines_of_ranks(ready, 3)
        let_go(go, 3)
        output, errors = job.communicate()
        assert (job.returncode, output.count("told to stop")) == (75, 3), errors


def test_job_whose_warm_server_is_stopped_ends(script: Script, ready: Path, go: Path) -> None:
    job = JobProcesses()
    with started_job("--cold", "--nproc-per-node", 2, script(GOES_ON), ready, go, job=job) as launcher:
        lines_of_ranks(ready, 2)
        suspend(server_of(launcher))
        let_go(go, 2)
        _, errors = launcher.communicate()
        assert launcher.returncode == 0
        assert "was stopped by a signal" in errors
        assert job.alive() == {}


def test_launcher_whose_ranks_have_saved_exits_with_the_code_for_a_restart(ready: Path) -> None:
    job = JobProcesses()
    with started_job("--nproc-per-node", 2, ENDS_ON_SIGTERM, ready, job=job, CODE="75") as launcher:
        lines_of_ranks(ready, 2)
        launcher.send_signal(signal.SIGTERM)
        _, said = launcher.communicate()
        assert launcher.returncode == 75
        assert "the job saved a checkpoint; start it again to continue (exit code 75)" in said


def test_rank_that_has_saved_waits_for_the_others_and_is_not_restarted(tmp_path: Path) -> None:
    run = launch("--nproc-per-node", 2, "--max-restarts", 3, PROGRAMS / "ends_after_rank_0.py", cwd=tmp_path)
    assert run.returncode == 75
    assert "restart" not in run.stderr


def test_launcher_killed_at_its_start_leaves_no_folder(tmp_path: Path) -> None:
    """The server is stopped, as if it were slow to import torch, until the launcher has come to its folder."""
    temporary, job = tmp_path / "temporary", JobProcesses()
    temporary.mkdir()

    def server() -> list[psutil.Process]:
        return list(filter(_is_server, psutil.Process(launcher.pid).children()))

    def needs_folder() -> bool:
        return any(temporary.glob("ddpkit-*")) or any("make_folder" in line for line in launching.stacks(launcher.pid))

    with started_job(REDUCES, job=job, TMPDIR=str(temporary)) as launcher:
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


@pytest.mark.parametrize(("fault", "code"), [("error", 1), ("7", 7)])
def test_every_node_ends_with_the_same_verdict(fault: str, code: int) -> None:
    meet = ["--nnodes", 2, "--nproc-per-node", 2, "--master-addr", "127.0.0.1", "--master-port", free_port()]
    job = JobProcesses()
    with (
        started_job(*meet, "--node-rank", 0, REDUCES, 3, fault, job=job) as first,
        started_job(*meet, "--node-rank", 1, REDUCES, 3, fault, job=job) as second,
    ):
        ends = [launcher.communicate()[1] for launcher in (first, second)]
        assert (first.returncode, second.returncode) == (code, code), ends
        for said in ends:
            assert re.search(rf"ddpkit: rank 3 failed first: exit code {code} \(local rank 1, host \S+, pid", said)
            assert said.count("Traceback (most recent call last)") == (code == 1), said
        assert job.alive() == {}


def test_nodes_with_different_numbers_of_nodes_end_with_a_usage_error() -> None:
    meet = ["--master-addr", "127.0.0.1", "--master-port", free_port()]
    job = JobProcesses()
    with (
        started_job(*meet, "--nnodes", 2, "--node-rank", 0, REDUCES, job=job) as first,
        started_job(*meet, "--nnodes", 3, "--node-rank", 1, REDUCES, job=job) as second,
    ):
        for launcher in (first, second):
            _, errors = launcher.communicate()
            assert launcher.returncode == 2, errors
            assert re.search(r"was started with --nnodes 2, .* with --nnodes 3\n  hint: use the same --nnodes", errors)


def suspended_twice_as_long_as_a_lost_node(job: JobProcesses, heartbeat_timeout: float) -> None:
    """Suspend all processes of a job, as `scontrol suspend` and a paused machine do, and continue them."""
    processes = [psutil.Process(pid) for pid in job.alive()]
    for process in processes:
        process.suspend()
    time.sleep(2 * heartbeat_timeout)
    for process in processes:
        process.resume()


def test_job_of_two_nodes_that_was_suspended_continues(ready: Path, tmp_path: Path) -> None:
    main, told = PROGRAMS / "reduces_until_stopped.py", tmp_path / "told"
    interval = seconds(0.5)
    flags = ["--nnodes", 2, "--master-addr", "127.0.0.1", "--master-port", free_port()]
    flags += ["--rdzv-conf", f"keep_alive_interval={interval},keep_alive_max_attempt=3", "--node-rank"]
    job = JobProcesses()
    with (
        started_job(*flags, 0, main, ready, told, job=job) as first,
        started_job(*flags, 1, main, ready, told, job=job) as second,
    ):
        lines_of_ranks(ready, 2)
        for _ in range(3):
            suspended_twice_as_long_as_a_lost_node(job, 3 * interval)
        told.touch()
        ends = [launcher.communicate()[1] for launcher in (first, second)]
        assert (first.returncode, second.returncode) == (0, 0), ends


def test_launch_with_too_few_descriptors_advises_a_higher_limit(script: Script) -> None:
    limited = ("sh", "-c", 'ulimit -n 22 && exec "$@"', "sh", DDPKIT)
    done = launching.run(*limited, "launch", "--nproc-per-node", 2, script("print('started')"))
    assert done.returncode == 3, done.stderr
    assert "needs 91 open files in this process, which serves its store; the hard limit is 22" in done.stderr
    assert "hint: raise it first: ulimit -n 91" in done.stderr
    assert "space" not in done.stderr


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
def test_rank_whose_exit_blocks_fails_with_its_exception(flags: Sequence[object], words: Sequence[object]) -> None:
    """But not a rank that has caught an exception, though @record has written an error file for that."""
    run = launch(*flags, "--nproc-per-node", 2, PROGRAMS / "exit_blocks.py", *words)
    assert run.returncode == 1
    assert re.search(r"rank 1 failed first: exit code 1 \(.*\): ValueError: no luck", run.stderr), run.stderr
    assert "hung" not in run.stderr
