"""A rank that does nothing any more, on the real command: found, named, its stack shown, and nothing left."""

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import launching
import pytest
from job_processes import JobProcesses
from launching import seconds

pytestmark = pytest.mark.slow

Script = Callable[[str], Path]
HUNG = 124
LIMIT = seconds(4)
"""For --hang-timeout. The launcher allows ten times as much for the first two steps, or the first ten collectives."""
FAULTS = """\
import ctypes, os, re, signal, sys, time, torch
RANK, ATTEMPT = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])

def regex():
    re.match(r"(a+)+$", "a" * 40 + "b")

def stop():
    os.kill(os.getpid(), signal.SIGSTOP)

def sleep():
    time.sleep(600)

def pause():
    ctypes.CDLL(None).pause()
"""
TRAINS = f"""\
{FAULTS}
from torch.nn.functional import mse_loss
from ddp_kit import Trainer, TrainerConfig

class Numbers(torch.utils.data.Dataset):
    drawn = 0
    def __len__(self):
        return 80
    def __getitem__(self, index):
        self.drawn += 1
        if RANK == 1 and ATTEMPT == 0 and self.drawn == 20:
            globals()[sys.argv[1]]()
        return torch.randn(4), torch.randn(1)

def loss_fn(model, batch):
    if ATTEMPT == 1 and trainer.step == 10:
        time.sleep({LIMIT / 2})
    return mse_loss(model(batch[0]), batch[1])

if __name__ == "__main__":
    model = torch.nn.Linear(4, 1)
    config = TrainerConfig(global_batch_size=4, epochs=1, data={{"num_workers": int(sys.argv[2]), "compare_items": 0}})
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), 0.01), loss_fn, config)
    trainer.fit(Numbers())
    print("done", trainer.step)
"""
# A rank creates the process group, whose timeout may be short, once the other one has done its imports, too.
MEETS = f"""\
{FAULTS}
import datetime, torch.distributed as dist
from pathlib import Path
here, there = (Path(f"{{__file__}}.{{rank}}.{{ATTEMPT}}") for rank in (RANK, 1 - RANK))
here.touch()
while not there.exists():
    time.sleep(0.01)
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=float(sys.argv[2])))
def work(step):
    if RANK == 1 and ATTEMPT == 0 and step == 30:
        globals()[sys.argv[1]]()
    else:
        dist.all_reduce(torch.ones(1))
for step in range(40):
    work(step)
print("done", ATTEMPT)
"""


def launch(*words: object, timeout: float = 240) -> "subprocess.CompletedProcess[str]":
    """Run two ranks; nothing of them is left afterwards."""
    job = JobProcesses()
    run = launching.launch("--nproc-per-node", 2, *words, env=job.env, timeout=timeout)
    assert job.alive() == {}
    return run


@pytest.mark.parametrize(
    ("fault", "workers", "told"),
    [
        ("stop", 0, r"in data \(script.py:\d+ in stop\) and stopped by a signal"),
        ("regex", 0, r"in data \(script.py:\d+ in regex\) with the interpreter lock held"),
        ("sleep", 1, r"in data \(script.py:\d+ in sleep\)"),
    ],
)
def test_hung_rank_in_a_trainer_is_named_with_its_stack(
    script: Script, tmp_path: Path, fault: str, workers: int, told: str
) -> None:
    run = launch("--hang-timeout", LIMIT, "--log-dir", tmp_path / "logs", script(TRAINS), fault, workers)
    assert run.returncode == HUNG, run.stderr
    assert re.search(rf"rank 1 failed first: hung \(.*, after step 9\): no progress .*; {told}", run.stderr), run.stderr
    # The last form: on a loaded machine its native frames are not read within the time that they are given.
    waiting = r"(the gradient all-reduce|the backward pass|the backward pass, which may be waiting for other ranks)"
    assert re.search(rf"^  rank 0 was in {waiting} \(script", run.stderr, re.MULTILINE), run.stderr
    assert re.search(rf'^  File ".*script.py", line \d+, in {fault}\n', run.stderr, re.MULTILINE), run.stderr
    (found,) = tmp_path.glob("logs/*/verdict.json")
    record = json.loads(found.read_text())
    assert (record["exit_code"], record["first_failure"]["rank"]) == (HUNG, 1)
    assert sorted(record["stacks"]) == ["0", "1"]
    assert f" {fault} (" in record["stacks"]["1"]


def test_hung_run_continues_after_a_restart_and_slow_steps_are_no_hang(script: Script) -> None:
    run = launch("--hang-timeout", LIMIT, "--max-restarts", 1, script(TRAINS), "sleep", 0)
    assert run.returncode == 0, run.stderr
    assert run.stderr.count("hung") == 1, run.stderr
    assert re.search(r"rank 1 failed first: hung .*; restart 1 of 1", run.stderr)
    assert re.search(r'^  File ".*script.py", line \d+, in sleep\n', run.stderr, re.MULTILINE), run.stderr
    assert run.stdout.count("done 20") == 2


def test_hang_in_a_script_without_a_trainer_is_detected(script: Script) -> None:
    run = launch("--hang-timeout", LIMIT, script(MEETS), "sleep", 600)
    assert run.returncode == HUNG, run.stderr
    assert re.search(
        r"rank 1 failed first: hung .*this rank has started 30 collectives, but other ranks have started 31", run.stderr
    ), run.stderr
    assert re.search(r"^  rank 0 was in all_reduce \(script.py:\d+ in work\)", run.stderr, re.MULTILINE)
    assert re.search(r'^  File ".*script.py", line \d+, in sleep\n', run.stderr, re.MULTILINE)


def test_hang_that_torchs_timeout_detects_first_names_the_missing_rank(script: Script) -> None:
    run = launch("--cold", script(MEETS), "sleep", LIMIT)
    assert run.returncode == HUNG, run.stderr
    assert "rank 1 failed first: hung" in run.stderr
    assert re.search(r"in the script \(script.py:\d+ in sleep\)", run.stderr), run.stderr
    assert "rank 0 then failed: RuntimeError: Timed out waiting" in run.stderr


# Each rank does something else after the last collective, which is not counted before that.
AT_THE_END = f"""\
{FAULTS}
import torch.distributed as dist
from ddp_kit.heartbeat import HeartbeatField, heartbeat_memory

def end():
    pass

def work():
    began = time.monotonic()
    while time.monotonic() < began + {3 * LIMIT}:
        time.sleep(0.01)
    print("worked")

dist.init_process_group("gloo")
for step in range(19):
    dist.all_reduce(torch.ones(1))
while heartbeat_memory()[HeartbeatField.COLLECTIVES] < 19:
    time.sleep(0.01)
dist.all_reduce(torch.ones(1))
globals()[sys.argv[1 + RANK]]()
"""


@pytest.mark.parametrize(
    ("rank_0", "rank_1"), [("regex", "end"), ("pause", "end"), ("regex", "pause"), ("pause", "pause")]
)
def test_hung_rank_that_no_other_rank_waits_for_is_detected(script: Script, rank_0: str, rank_1: str) -> None:
    run = launch("--hang-timeout", LIMIT, script(AT_THE_END), rank_0, rank_1, timeout=60)
    assert run.returncode == HUNG, run.stderr
    held = " with the interpreter lock held" if rank_0 == "regex" else ""
    told = rf"no progress for more than \S+ s; in the script \(script.py:\d+ in {rank_0}\){held}$"
    assert re.search(rf"rank 0 failed first: hung \(.*\): {told}", run.stderr, re.MULTILINE), run.stderr


def test_rank_that_works_after_the_others_have_ended_is_not_hung(script: Script) -> None:
    run = launch("--hang-timeout", LIMIT, script(AT_THE_END), "work", "end")
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("worked") == 1


# The parent of a vfork sleeps uninterruptibly until its child ends.
VFORKS = """\
import ctypes, os, time
if os.environ["RANK"] == "1":
    CLONE_VFORK, SIGCHLD, clone = 0x4000, 17, {"x86_64": 56, "aarch64": 220}[os.uname().machine]
    if ctypes.PyDLL(None).syscall(clone, CLONE_VFORK | SIGCHLD, 0, 0, 0, 0) == 0:
        time.sleep(600)
        os._exit(0)
time.sleep(600)
"""


def test_worker_in_uninterruptible_sleep_is_a_failure_that_counts(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(VFORKS)
    env = {"TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT": str(seconds(2))}
    done = launching.launch("--nproc-per-node", 2, "--max-restarts", 1, "script.py", cwd=tmp_path, env=env)
    assert done.returncode == HUNG, done.stderr
    assert done.stderr.count("rank 1 failed first: hung") == 2
    assert "uninterruptible sleep" in done.stderr
