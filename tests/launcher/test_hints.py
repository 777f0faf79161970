"""From what a failed worker left to what to do now: on messages that torch and Python really write."""

import resource
import signal
import subprocess
import sys
from collections.abc import Callable
from itertools import takewhile
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ddp_kit.launcher.diagnosis import (
    CAUSES,
    failed_at_start,
    hint,
    is_interrupt,
    is_secondary,
    is_timeout,
    message_of,
    shortened,
    split,
)
from tests.support.launching import PROGRAMS, clean_environment, free_port, seconds, started

SHARED, HOST, CRASHED = "--shm-size=8g or --ipc=host", "memory.max", "PYTHONFAULTHANDLER=1"
LATE, ANOTHER = "did not reach this point", "another rank ended first"
DRIVER, DISK, PORT, FILES = "update the driver", "a disk or a quota is full", "a port is in use", "`ulimit -n 65536`"

LOADER = """
import os, signal, sys, torch
from torch.utils.data import DataLoader
class Data:
    def __len__(self): return 8
    def __getitem__(self, index):
        {item}
if __name__ == "__main__":
    for batch in DataLoader(Data(), batch_size=2, num_workers=1): pass
"""
GLOO = """
import datetime, os, time, torch, torch.distributed as dist
dist.init_process_group("gloo", timeout=datetime.timedelta(seconds={timeout}))
numbers = torch.ones(1)
dist.all_reduce(numbers)  # both have come
{then}
"""


def failed(code: str, folder: Path, before: Callable[[], None] | None = None) -> tuple[str, int]:
    """What a script that fails writes, and its exit code."""
    (folder / "script.py").write_text(code)
    run = subprocess.run(
        [sys.executable, "script.py"],
        cwd=folder,
        env=clean_environment(),
        preexec_fn=before,
        stderr=subprocess.PIPE,
        text=True,
        timeout=seconds(240),
    )
    assert run.returncode, "it was to fail"
    return run.stderr, run.returncode


def little(kind: int, amount: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(kind, (amount, amount))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import not_there", f"`{sys.executable} -m pip install not_there`"),
        ("import sklearn_is_not_there.linear_model", "-m pip install sklearn_is_not_there`"),
        ("import json.not_there", "check its spelling"),
        ("from json import not_there", "json has no not_there: check its version"),
        ("file = open('/dev/full', 'w', buffering=1)\nfile.write('x\\n')", DISK),
        ("import torch\ntorch.save(torch.ones(9), '/dev/full')", DISK),
        ("import socket\nfor port in (0, 1): a = socket.create_server(('', port and a.getsockname()[1]))", PORT),
        (
            "import socket, torch.distributed as dist\nwith socket.create_server(('', 0)) as server:\n"
            "    dist.TCPStore('127.0.0.1', server.getsockname()[1], 1, True, wait_for_workers=False)",
            PORT,
        ),
        ("import torch\ntorch.ones(10**15)", HOST),
        ("import ctypes\nctypes.string_at(1)", CRASHED),
        ("import os\nos.abort()", CRASHED),
        ("import os, signal\nos.kill(os.getpid(), signal.SIGKILL)", "dmesg"),
        (LOADER.format(item="os.kill(os.getpid(), signal.SIGKILL)"), "data.num_workers=0"),
        (LOADER.format(item="os._exit(1)"), "data.num_workers=0"),
        ("import os, sys\nsys.stdin = open(os.devnull)\ninput()", "which has no content"),
        ("import os, sys\nsys.stdin = open(os.devnull)\nbreakpoint()\nsys.exit(1)", "which has no content"),
        ("raise ValueError('something else')", ""),
        ("import sys\nsys.exit(3)", ""),
    ],
    ids=lambda value: value.strip()[:30],
)
def test_hint_for_a_real_failure_gives_its_advice(tmp_path: Path, code: str, said: str) -> None:
    text, exit_code = failed(code, tmp_path)
    advice = hint(text, exit_code)
    assert said in advice, text
    assert said or not advice
    assert not is_secondary(text)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "limit", "said"),
    [
        ("x = bytearray(2**33)", (resource.RLIMIT_AS, 2**31), HOST),
        ("files = [open('/dev/null') for _ in range(99)]", (resource.RLIMIT_NOFILE, 20), FILES),
    ],
)
def test_hint_for_a_limit_names_it(tmp_path: Path, code: str, limit: tuple[int, int], said: str) -> None:
    assert said in hint(*failed(code, tmp_path, little(*limit)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [
        "import torch\ntorch.ones(9_000_000).share_memory_()",
        "import mmap, os\nfile = os.open('/dev/shm/x', os.O_RDWR | os.O_CREAT)\nos.ftruncate(file, 8 << 20)\n"
        "memory = mmap.mmap(file, 8 << 20)\nmemory[:] = bytes(8 << 20)",
        LOADER.format(item="return torch.ones(9_000_000)"),
    ],
    ids=["torch", "bus error", "data loader"],
)
def test_hint_for_small_shared_memory_names_it(tmp_path: Path, code: str) -> None:
    small = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs -o size=1m tmpfs /dev/shm && exec "$@"', "sh"]
    if subprocess.run([*small, "true"], capture_output=True).returncode:
        pytest.skip("needs the right to mount a small /dev/shm")
    (tmp_path / "script.py").write_text(code)
    run = subprocess.run(
        [*small, sys.executable, "script.py"],
        cwd=tmp_path,
        env=clean_environment(),
        stderr=subprocess.PIPE,
        text=True,
        timeout=seconds(240),
    )
    assert SHARED in hint(run.stderr, run.returncode), run.stderr


def two_ranks(folder: Path, then: str) -> tuple[str, int]:
    """What rank 0 of a gloo job writes, and its exit code."""
    (folder / "script.py").write_text(GLOO.format(timeout=seconds(120), then=then))
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    command = [sys.executable, "script.py"]
    with (
        started(*command, cwd=folder, env=meeting | {"RANK": "0"}, stdin=subprocess.DEVNULL) as first,
        started(*command, cwd=folder, env=meeting | {"RANK": "1"}, stdin=subprocess.PIPE) as other,
    ):
        _, text = first.communicate(timeout=seconds(240))
        other.communicate(timeout=seconds(240))  # closes its input
    return text, first.returncode


@pytest.mark.slow
def test_hint_distinguishes_a_missing_rank_from_one_that_exited(tmp_path: Path) -> None:
    waits = f"""
if os.environ['RANK'] == '1': input()
dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds={seconds(2)}))
dist.all_reduce(numbers)
"""
    text, exit_code = two_ranks(tmp_path, then=waits)
    assert LATE in hint(text, exit_code), text
    assert not is_secondary(text)

    for end in ("os._exit(3)", "os.kill(os.getpid(), 9)"):
        leaves = f"if os.environ['RANK'] == '1': {end}\nwhile True: dist.all_reduce(numbers)"
        text, exit_code = two_ranks(tmp_path, then=leaves)
        assert ANOTHER in hint(text, exit_code), text
        assert is_secondary(text)


@pytest.mark.slow
def test_hint_for_parameters_that_ddp_waits_for_names_the_setting(tmp_path: Path) -> None:
    unused = """
import torch.nn as nn
class Half(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(1, 1), nn.Linear(1, 1)
    def forward(self, x): return self.one(x)
model = nn.parallel.DistributedDataParallel(Half())
for _ in range(2): model(torch.ones(1, 1)).sum().backward()
"""
    text, exit_code = two_ranks(tmp_path, then=unused)
    assert "find_unused_parameters=True" in hint(text, exit_code)


@pytest.mark.slow
def test_lost_store_is_a_secondary_failure(tmp_path: Path) -> None:
    text, exit_code = failed((PROGRAMS / "loses_its_store.py").read_text(), tmp_path)
    assert is_secondary(text), text
    assert ANOTHER in hint(text, exit_code)


# Of what is not here: GPUs, NCCL, older and newer versions of torch.
NCCL = "[rank4]:[E1206 18:44:12.755262105 ProcessGroupNCCL.cpp:607] [Rank 4] "
GONE = (
    "Process group watchdog thread terminated with exception: NCCL error: remote process exited or there was a network "
    "error, NCCL version 2.21.5\nncclRemoteError: A call failed possibly due to a network error or a remote process "
    "exiting prematurely.\nLast error:\nsocketProgressOpt: Call to recv from 10.0.0.2<49901> failed : Broken pipe"
)
ABORT = -signal.SIGABRT


# Lines of a script without a message of their own.
output = st.lists(st.text(st.characters(exclude_categories=["Ll"]), max_size=80), max_size=20).map("\n".join)


@pytest.mark.parametrize(
    ("text", "exit_code", "said"),
    [
        ("RuntimeError: Expected to mark a variable ready only once. This error is caused", 1, "use_reentrant=False"),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has", 1, "micro_batch_size"),
        ("RuntimeError: CUDA error: out of memory\nCUDA kernel errors might be asynchronously", 1, "micro_batch_size"),
        ("RuntimeError: CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate", 1, "micro_batch_size"),
        ("RuntimeError: CUDA error: device-side assert triggered\nCUDA kernel", 1, "CUDA_LAUNCH_BLOCKING=1"),
        ("torch.AcceleratorError: CUDA error: an illegal memory access was encountered\nSearch for "
         "`cudaErrorIllegalAddress' in https://docs.nvidia.com/cuda", 1, "CUDA_LAUNCH_BLOCKING=1"),
        (f"{NCCL}Process group watchdog thread terminated with exception: CUDA error: an illegal memory access was "
         "encountered", ABORT, "grep Xid"),
        ("torch.AcceleratorError: CUDA error: misaligned address\nCUDA kernel errors might be", 1, "grep Xid"),
        ("torch.AcceleratorError: CUDA error: unspecified launch failure\nCUDA kernel errors", 1, "grep Xid"),
        ("RuntimeError: CUDA driver error: operation not supported", 1, "expandable_segments:False"),
        ("torch.AcceleratorError: CUDA error: operation not supported\nCUDA kernel", 1, "update the NVIDIA driver"),
        ("RuntimeError: CUDA error: invalid device ordinal\nCUDA kernel errors", 1, "cuda:LOCAL_RANK"),
        ("RuntimeError: No CUDA GPUs are available", 1, "ddpkit doctor"),
        ("ncclInvalidUsage: Duplicate GPU detected : rank 1 and rank 0 both on CUDA device 1000", 1, "MIG devices"),
        ("RuntimeError: CUDA error: no kernel image is available for execution on the device", 1, "GPU architecture"),
        ("RuntimeError: The NVIDIA driver on your system is too old (found version 11040).", 1, DRIVER),
        ("RuntimeError: Found no NVIDIA driver on your system. Please check that", 1, DRIVER),
        ("RuntimeError: CUDA error: CUDA driver version is insufficient for CUDA runtime version", 1, DRIVER),
        ("ImportError: libcuda.so.1: cannot open shared object file: No such file or directory", 1, DRIVER),
        ("ImportError: libcudart.so.12: cannot open shared object file: No such file", 1, DRIVER),
        ("AssertionError: Torch not compiled with CUDA enabled", 1, "for the CPU only"),
        (f"{NCCL}Watchdog caught collective operation timeout: WorkNCCL(SeqNum=7, OpType=ALLREDUCE, NumelIn=1, "
         "NumelOut=1, Timeout(ms)=600000) ran for 600061 milliseconds before timing out.", ABORT, "in ALLREDUCE"),
        ("torch.distributed.DistBackendError: NCCL operation timed out", 1, LATE),
        ("RuntimeError: NCCL Operation Timed Out", 1, LATE),
        ("[E1206 18:44:12.755262105 WorkNCCL.cpp:183] [rank 1][default_pg] Operation timed out after 600012 ms\n"
         "[E1206 18:44:12.755262105 ProcessGroupNCCL.cpp:347] [rank 1] Aborting process due to timeout", ABORT, LATE),
        ("torch.distributed.DistBackendError: NCCL operation failed", 1, "NCCL_DEBUG=WARN"),
        (f"{NCCL}{GONE}", ABORT, ANOTHER),
        ("torch.distributed.DistBackendError: NCCL communicator was aborted on rank 0.", 1, ANOTHER),
        ("torch.distributed.DistStoreError: wait timeout after 1000ms, keys: /default_pg/0//cpu//0/1", 1, LATE),
        ("torch.distributed.DistStoreError: Timed out after 61 seconds waiting for clients. 1/2 clients", 1, LATE),
        ("torch.distributed.DistNetworkError: The client socket has timed out after 2000ms while trying to connect to "
         "(127.0.0.1, 46713).", 1, "no process is listening"),
        ("torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1025, unhandled system error (run "
         "with NCCL_DEBUG=INFO for details), NCCL version 2.21.5\nncclSystemError: System call (e.g. socket) failed\n"
         "Last error:\nError while creating shared memory segment /dev/shm/nccl-pZafXL (size 7340384)", 1, SHARED),
        ("RuntimeError: DataLoader worker (pid 7) is killed by signal: Bus error. It is possible that dataloader's "
         "workers are out of shared memory. Please try to raise your shared memory limit.", 1, SHARED),
        ("RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed.", 1, HOST),
        ("slurmstepd: error: Detected 1 oom_kill event in StepId=7.0. Some of the step tasks have been", 1, HOST),
        ("terminate called after throwing an instance of 'std::bad_alloc'\n  what():  std::bad_alloc", ABORT, HOST),
        ("[rank 0] done\nterminate called without an active exception", ABORT, "destroy_process_group()"),
        ("RuntimeError: received 0 items of ancdata", 1, FILES),
        ("OSError: [Errno 122] Disk quota exceeded: 'model.pt'", 1, DISK),
        ("/usr/bin/python: No module named train", 1, "has no module train"),
        ("ModuleNotFoundError: No module named 'torch.nothing'", 1, "check its spelling"),
        ("ModuleNotFoundError: No module named 'cv2'", 1, "-m pip install opencv-python`"),
        ("", -signal.SIGBUS, SHARED),
        ("", -signal.SIGILL, "lacks an instruction"),
        ("Fatal Python error: Segmentation fault\n\nThread 0x1 (most recent call first):", -signal.SIGSEGV, ""),
        ("", -signal.SIGTERM, ""),
        ("", 1, ""),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)  # fmt: skip
@settings(max_examples=10)
@given(before=output, after=output)
@example("", "")
def test_hint_for_a_message_anywhere_in_the_output_gives_its_advice(
    text: str, exit_code: int, said: str, before: str, after: str
) -> None:
    advice = hint(f"{before}\n{text}\n{after}", exit_code)
    assert said in advice
    assert said or not advice


def test_hint_uses_the_kernels_out_of_memory_counter() -> None:
    assert HOST in hint("", -signal.SIGKILL, out_of_memory=True)
    assert HOST not in hint("", -signal.SIGKILL)
    assert HOST in hint("RuntimeError: DataLoader worker (pid(s) 7) exited unexpectedly", 1, out_of_memory=True)
    assert "pip install" in hint("ModuleNotFoundError: No module named 'x'", 1, out_of_memory=True)


def test_hint_ignores_exceptions_that_were_handled() -> None:
    handled = "Traceback (most recent call last):\n  File ...\nModuleNotFoundError: No module named 'flash_attn'\n"
    last = "Traceback (most recent call last):\n  File ...\nValueError: no such model\n"
    assert hint(f"{handled}falling back\n{last}", 1) == ""
    assert CRASHED in hint(f"{handled}falling back\n", -signal.SIGSEGV)
    direct = "\nThe above exception was the direct cause of the following exception:\n\n"
    assert "flash_attn" in hint(f"{handled}{direct}{last}", 1)


def test_own_error_of_a_rank_is_not_a_secondary_failure() -> None:
    warning = (
        "[W1120 15:45:04.24 TCPStore.cpp:138] [c10d] recvValueWithTimeout failed on SocketImpl(fd=4): Failed to recv, "
        "got 0 bytes. Connection was likely closed. Did the remote server shutdown or crash?\n"
    )
    assert not is_secondary(f"ValueError: no such model\n[rank0]:{warning}{warning}")
    assert not is_secondary("ConnectionResetError: [Errno 104] Connection reset by peer")
    assert not is_secondary("BrokenPipeError: [Errno 32] Broken pipe")
    assert not is_secondary("RuntimeError: NCCL operation failed: the library is too old")
    assert not is_secondary("")
    for text in (
        f"{NCCL}{GONE}",
        "torch.distributed.DistNetworkError: Broken pipe",
        "[rank0]: torch.distributed.DistBackendError: NCCL operation failed",
        "[rank0]: RuntimeError: [/x/gloo/transport/tcp/pair.cc:537] Read error [::1]:3463: Connection reset by peer.",
        "RuntimeError: [Rank 0]: Rank 1 failed to pass monitoredBarrier in 1800000 ms\n Original exception: \n"
        "[/x/gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:16802.",
    ):
        assert is_secondary(text)


def test_every_placeholder_of_an_advice_is_filled() -> None:
    for cause in CAUSES:
        names = cause.pattern.split("(?P<")[1:]
        assert all(f"{{{name.split('>')[0]}}}" in cause.advice for name in names)
    assert "{" not in hint("No module named 'a'", 1) + hint("cannot import name 'a' from 'b'", 1)


# What splitting, shortening and searching look for, as a worker may print it: whole, in part, in any order.
pieces = st.one_of(
    st.text(),
    st.sampled_from(
        [
            "Traceback (most recent call last):\n",
            "Original Traceback (most recent call last):\n",
            "Fatal Python error: ",
            "terminate called ",
            "\nThe above exception was the direct cause of the following exception:\n\n",
            "\nDuring handling of the above exception, another exception occurred:\n\n",
            '  File "a.py", line 1, in <module>\n',
            '  File "a.py", line',
            "ModuleNotFoundError: No module named 'a.b'\n",
            "No module named '",
            "cannot import name 'a' from '{python}'",
            "KeyboardInterrupt\n",
            "  | ",
            "    | ",
            "[rank7]: ",
            "[rank0]:[W1120 ",
            "[Gloo] Rank 0 is connected to 1 peer ranks",
            "\x1b[0m",
            "\x1b[",
            "DataLoader worker (pid 1) ",
            "WorkNCCL(OpType=",
            "gloo/transport/tcp ",
            " Connection closed by peer",
            "\n",
            "\r",
            "\u2028",
        ]
    ),
)
EXIT_CODES = (0, 1, 137, *(-number for number in signal.Signals))


@given(st.lists(pieces, max_size=20).map("".join), st.sampled_from(EXIT_CODES), st.booleans())
def test_any_output_is_split_shortened_and_explained(text: str, exit_code: int, out_of_memory: bool) -> None:
    trace, rest = split(text)
    if trace:
        same = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(text, rest, strict=False)))
        assert text[same:].endswith(rest[same:]), "what is left out is in one piece"
        assert message_of(trace) in trace
    else:
        assert rest == text
    assert len(shortened(trace).splitlines()) <= 61
    for part in (text, trace):
        assert isinstance(hint(part, exit_code, out_of_memory), str)
        for decide in (is_secondary, is_timeout, is_interrupt, failed_at_start):
            assert decide(part) in (True, False)


@pytest.mark.timeout(seconds(60))
@pytest.mark.parametrize(
    "text",
    [
        "x" * 1_000_000,
        "Traceback (most recent call last):\n" * 100_000,
        f"Traceback (most recent call last):\nValueError: {'x.' * 1_000_000}",
        "Traceback (most recent call last):\nValueError: no\n\nDuring handling of the above exception\n\n" * 20_000,
        "ValueError: " + "DataLoader worker " * 50_000,
    ],
    ids=["one line", "beginnings", "long message", "chain", "long line of a beginning of a message"],
)
def test_megabytes_of_output_are_searched_in_linear_time(text: str) -> None:
    """In quadratic time, each of them takes minutes."""
    trace, _ = split(text)
    hint(trace or text, 1)
    is_secondary(trace or text)
    message_of(trace)
    assert len(shortened(trace)) <= len(text)
