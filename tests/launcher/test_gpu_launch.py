"""Launches on real GPUs: which they get, who is seen on them, and what forked workers do with CUDA."""

import subprocess
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from launching import DDPKIT, run, seconds, started, wait_until

from ddp_kit.launcher.devices.gpus import Gpu, gpus

Run = Callable[..., "subprocess.CompletedProcess[str]"]
Script = Callable[[str], Path]

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

SHOWS = """
import torch
begun = torch.cuda.is_initialized()
product = torch.ones(64, 64, device="cuda") @ torch.ones(64, 64, device="cuda")
say(os.environ.get("CUDA_VISIBLE_DEVICES"), torch.cuda.device_count(), begun, product[0, 0].item())
"""


@pytest.fixture
def one() -> Gpu:
    return gpus()[0]


def test_devices_lists_the_gpus_of_the_driver(ddpkit: Run) -> None:
    done = ddpkit("devices")
    assert done.returncode == 0, done.stderr
    for gpu in gpus():
        assert gpu.name in done.stdout
        assert gpu.uuid[:12] in done.stdout
        assert gpu.memory_total > 0


@pytest.mark.parametrize("words", ["1", "free:1", "uuid", ""])
def test_launch_gets_the_requested_gpus(ddpkit: Run, script: Script, one: Gpu, words: str) -> None:
    asked = one.uuid[:12] if words == "uuid" else words
    done = ddpkit("launch", *(["--gpus", asked] if asked else []), script(SHOWS))
    assert done.returncode == 0, done.stderr
    number = 1 if words else len(gpus())
    lines = done.stdout.splitlines()
    assert [line.split()[1:] for line in lines] == [[str(number), "False", "64.0"]] * number, done.stdout
    assert "starting cold" not in done.stderr


def test_forked_and_cold_workers_get_the_same_gpu(ddpkit: Run, script: Script) -> None:
    warm, cold = (ddpkit("launch", *flags, "--nproc-per-node", 1, script(SHOWS)) for flags in ([], ["--cold"]))
    assert warm.returncode == cold.returncode == 0, warm.stderr + cold.stderr
    assert warm.stdout == cold.stdout
    assert "starting cold" not in warm.stderr


def test_workers_start_cold_if_an_import_has_initialised_cuda(ddpkit: Run, script: Script, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import torch\ntorch.ones(1, device='cuda')\n")
    done = ddpkit("launch", "--nproc-per-node", 1, script(SHOWS), env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    assert "starting cold: an import has" in done.stderr


AFTER_A_KILL = """
import signal, torch
torch.ones(1 << 20, device="cuda").sum().item()
attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
if attempt == "0":
    os.kill(os.getpid(), signal.SIGKILL)
say("attempt", attempt)
"""


def test_worker_killed_on_a_gpu_is_forked_again(ddpkit: Run, script: Script) -> None:
    done = ddpkit("launch", "--nproc-per-node", 1, "--max-restarts", 1, script(AFTER_A_KILL))
    assert (done.returncode, done.stdout) == (0, "attempt 1\n"), done.stderr
    assert "starting cold" not in done.stderr


USES_EVERYTHING = """
import torch
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, TensorDataset
loader = DataLoader(TensorDataset(torch.ones(64, 64)), 32, num_workers=2, pin_memory=True)
with profile(activities=[ProfilerActivity.CUDA]) as profiler:
    sums = [(batch.cuda(non_blocking=True) @ torch.ones(64, 64, device="cuda")).sum().item() for (batch,) in loader]
say(sums, any("gemm" in event.key.lower() or event.device_time_total > 0 for event in profiler.key_averages()))
"""


def test_forked_worker_pins_memory_uses_dataloader_workers_and_profiles(ddpkit: Run, script: Script) -> None:
    done = ddpkit("launch", "--nproc-per-node", 1, script(USES_EVERYTHING))
    assert (done.returncode, done.stdout) == (0, "[131072.0, 131072.0] True\n"), done.stderr
    assert "starting cold" not in done.stderr


OVER_GLOO = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
total = torch.full((1 << 16,), dist.get_rank() + 1.0, device="cuda:0")
dist.all_reduce(total)
say("total", total.unique().tolist())
dist.destroy_process_group()
"""


def test_two_processes_share_a_gpu_over_gloo(ddpkit: Run, script: Script) -> None:
    done = ddpkit("launch", "--nproc-per-node", 2, script(OVER_GLOO))
    assert (done.returncode, done.stdout) == (0, "total [3.0]\n" * 2), done.stderr


HOLDS = """
import torch
held = torch.ones(64 << 20, device="cuda")
print("there", flush=True)
input()
"""


def test_process_on_a_gpu_is_listed_and_its_gpu_not_free(ddpkit: Run, script: Script, tmp_path: Path) -> None:
    holds = tmp_path / "holds.py"
    holds.write_text(HOLDS)
    with started(sys.executable, holds, stdin=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n"
        shown, refused = ddpkit("devices"), ddpkit("launch", "--gpus", f"free:{len(gpus())}", script(SHOWS))
        process.communicate("\n", timeout=seconds(60))
    assert "busy: 1 process" in shown.stdout, shown.stdout
    assert f"pid {process.pid} of" in shown.stdout, shown.stdout
    assert refused.returncode == 2
    assert f"--gpus free:{len(gpus())} is not available: found {len(gpus()) - 1} free" in refused.stderr
    wait_until(lambda: not any(gpu.processes for gpu in gpus()), "no process on a GPU once it is gone")


WAITS = """
import os, time
from pathlib import Path
begun = Path("begun", str(os.getpid()))
begun.parent.mkdir(exist_ok=True)
begun.touch()
while not Path("end").exists():
    time.sleep(0.02)
"""


def test_launches_that_race_for_gpus_get_one_each_or_are_refused(script: Script, tmp_path: Path) -> None:
    waits, number = script(WAITS), len(gpus())
    with ExitStack() as running:
        launches = [
            running.enter_context(started(DDPKIT, "launch", "--gpus", 1, waits, cwd=tmp_path))
            for _ in range(number + 2)
        ]
        wait_until(lambda: sum(launch.poll() is not None for launch in launches) == 2, "two launches have ended")
        wait_until(lambda: len(list(tmp_path.glob("begun/*"))) == number, "the others have begun")
        shown = run(DDPKIT, "devices").stdout
        (tmp_path / "end").touch()
        ended = [(launch.communicate(timeout=seconds(60))[1], launch.returncode) for launch in launches]
    assert shown.count("held by pid") == number, shown
    assert sorted(code for _, code in ended) == [0] * number + [2] * 2, ended
    assert all("other launches hold" in said for said, code in ended if code == 2), ended


def test_mig_devices_are_listed_and_assigned_separately(ddpkit: Run, script: Script) -> None:
    migs = [gpu for gpu in gpus() if gpu.is_mig]
    if not migs:
        pytest.skip("no GPU of this machine is in MIG mode")
    done = ddpkit("launch", "--gpus", migs[0].uuid, script(SHOWS))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[:2] == [migs[0].uuid, "1"]


def test_doctor_finds_no_fault_of_the_gpus(ddpkit: Run) -> None:
    done = ddpkit("doctor")
    lines = done.stdout.splitlines()
    wrong = [line for line in lines if line.startswith("fail")]
    assert not wrong, done.stdout
    good = "\n".join(line for line in lines if line.startswith("ok"))
    for words in ("GPU", "up to CUDA", "torch has code for", "NCCL", "a matrix product is correct on"):
        assert words in good, done.stdout
