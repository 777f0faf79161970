"""Launches on real GPUs: which they get, who is seen on them, and what forked workers do with CUDA."""

import subprocess
import sys
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from ddp_kit.devices.gpus import Gpu, gpus
from tests.support.launching import DDPKIT, PROGRAMS, run, seconds, started, wait_until

Run = Callable[..., "subprocess.CompletedProcess[str]"]

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

SHOWS = PROGRAMS / "shows_gpu.py"


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
def test_launch_gets_the_requested_gpus(ddpkit: Run, one: Gpu, words: str) -> None:
    asked = one.uuid[:12] if words == "uuid" else words
    done = ddpkit("launch", *(["--gpus", asked] if asked else []), SHOWS)
    assert done.returncode == 0, done.stderr
    number = 1 if words else len(gpus())
    lines = done.stdout.splitlines()
    assert [line.split()[1:] for line in lines] == [[str(number), "False", "64.0"]] * number, done.stdout
    assert "starting cold" not in done.stderr


def test_forked_and_cold_workers_get_the_same_gpu(ddpkit: Run) -> None:
    warm, cold = (ddpkit("launch", *flags, "--nproc-per-node", 1, SHOWS) for flags in ([], ["--cold"]))
    assert warm.returncode == cold.returncode == 0, warm.stderr + cold.stderr
    assert warm.stdout == cold.stdout
    assert "starting cold" not in warm.stderr


def test_workers_start_cold_if_an_import_has_initialised_cuda(ddpkit: Run, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import torch\ntorch.ones(1, device='cuda')\n")
    done = ddpkit("launch", "--nproc-per-node", 1, SHOWS, env={"PYTHONPATH": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    assert "starting cold: an import has" in done.stderr


@pytest.mark.parametrize("statement", ["torch.cuda.is_available()", "torch.cuda.init()"])
def test_package_whose_import_opens_a_gpu_is_imported_in_each_process(
    ddpkit: Run, tmp_path: Path, statement: str
) -> None:
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "nltk.py").write_text(f"import os, torch\npid = os.getpid()\n{statement}\n")
    script = tmp_path / "train.py"
    script.write_text(
        "import torch\nimport nltk\nimport os\n"
        "print(nltk.pid == os.getpid(), torch.ones(2, device='cuda').sum().item())\n"
    )
    env = {"PYTHONPATH": str(tmp_path / "site-packages"), "XDG_CACHE_HOME": str(tmp_path)}
    done = ddpkit("launch", "--nproc-per-node", 1, script, env=env)
    assert (done.returncode, done.stdout) == (0, "True 2.0\n"), done.stderr
    assert "nltk is imported in each process, not once before the fork: its import opens a GPU" in done.stderr
    assert "starting cold" not in done.stderr


def test_launch_from_a_kept_process_uses_the_gpu(ddpkit: Run) -> None:
    with tempfile.TemporaryDirectory() as path:  # the path of a socket has at most 107 bytes
        env = {"XDG_RUNTIME_DIR": path, "DDPKIT_KEEP_WARM": "5m"}
        first = ddpkit("launch", "--nproc-per-node", 1, SHOWS, env=env)
        wait_until(lambda: list(Path(path, "ddpkit").glob("*.kept")), "the kept process")
        for _ in range(2):
            done = ddpkit("launch", "--nproc-per-node", 1, SHOWS, env=env)
            assert (done.returncode, done.stdout) == (0, first.stdout), done.stderr
        wait_until(lambda: not any(gpu.processes for gpu in gpus()), "the kept process does not use a GPU")
        assert "2 launches" in ddpkit("warm", env=env).stdout
        ddpkit("warm", "stop", env=env)


def test_worker_killed_on_a_gpu_is_forked_again(ddpkit: Run) -> None:
    done = ddpkit("launch", "--nproc-per-node", 1, "--max-restarts", 1, PROGRAMS / "killed_on_gpu.py")
    assert (done.returncode, done.stdout) == (0, "attempt 1\n"), done.stderr
    assert "starting cold" not in done.stderr


def test_forked_worker_pins_memory_uses_dataloader_workers_and_profiles(ddpkit: Run) -> None:
    done = ddpkit("launch", "--nproc-per-node", 1, PROGRAMS / "pins_and_profiles.py")
    assert (done.returncode, done.stdout) == (0, "[131072.0, 131072.0] True\n"), done.stderr
    assert "starting cold" not in done.stderr


def test_two_processes_share_a_gpu_over_gloo(ddpkit: Run) -> None:
    done = ddpkit("launch", "--nproc-per-node", 2, PROGRAMS / "reduces_on_one_gpu.py")
    assert (done.returncode, done.stdout) == (0, "total [3.0]\n" * 2), done.stderr


HOLDS = """
import torch
held = torch.ones(64 << 20, device="cuda")
print("there", flush=True)
input()
"""


def test_process_on_a_gpu_is_listed_and_its_gpu_not_free(ddpkit: Run, tmp_path: Path) -> None:
    holds = tmp_path / "holds.py"
    holds.write_text(HOLDS)
    with started(sys.executable, holds, stdin=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n"
        shown, refused = ddpkit("devices"), ddpkit("launch", "--gpus", f"free:{len(gpus())}", SHOWS)
        process.communicate("\n", timeout=seconds(60))
    assert "busy: 1 process" in shown.stdout, shown.stdout
    assert f"pid {process.pid} of" in shown.stdout, shown.stdout
    assert refused.returncode == 2
    assert f"--gpus free:{len(gpus())} is not available: found {len(gpus()) - 1} free" in refused.stderr
    wait_until(lambda: not any(gpu.processes for gpu in gpus()), "no process on a GPU once it is gone")


def test_launches_that_race_for_gpus_get_one_each_or_are_refused(tmp_path: Path) -> None:
    waits, number = PROGRAMS / "waits_for_end.py", len(gpus())
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


def test_mig_devices_are_listed_and_assigned_separately(ddpkit: Run) -> None:
    migs = [gpu for gpu in gpus() if gpu.is_mig]
    if not migs:
        pytest.skip("no GPU of this machine is in MIG mode")
    done = ddpkit("launch", "--gpus", migs[0].uuid, SHOWS)
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
