"""Hints for common failures: a table of patterns in a failed worker's output, each with advice.

The first match is used, so specific patterns come before general ones.
"""

import re
import signal
import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class Cause:
    """A common cause of failures."""

    pattern: str
    """A regular expression to search for in the worker's output."""
    advice: str
    """What to do; `{name}` is replaced by the pattern's group of that name."""


_RUN_DOCTOR = "run `ddpkit doctor` to check this machine"
_SHARED_MEMORY = (
    "the shared memory that DataLoader workers and NCCL use is full (`df -h /dev/shm`): "
    "start the container with --shm-size=8g or --ipc=host, or lower data.num_workers"
)
_HOST_MEMORY = (
    "this machine, container or job is out of memory: lower the number of processes, "
    "data.num_workers or micro_batch_size, or raise the limit (`cat /sys/fs/cgroup/memory.max`, "
    "--memory of docker, --mem of Slurm)"
)
_TIMEOUT = (
    "other ranks did not reach this point before the timeout. Look at the ranks without an error: one may be "
    "stuck, slower, or past this point, for example after a collective under `if rank == 0`, or with different "
    "amounts of data on the ranks (`py-spy dump --pid PID` shows a process's stack). If they are just slow: "
    "init_process_group(timeout=...)"
)
_OTHER_RANK = "another rank ended first: look for the cause in its output"
_CRASHED = (
    "it crashed in native code: set PYTHONFAULTHANDLER=1 and start again to see the Python line; "
    "a common cause is an extension built for another version of torch"
)
_PACKAGES = {"cv2": "opencv-python", "PIL": "pillow", "sklearn": "scikit-learn", "yaml": "pyyaml"}

# Errors of gloo, NCCL and the store of torch 2.13 when a peer is gone. `Connection reset by peer` alone may come from
# any server that a script connects to.
_PEER_GONE = (
    r"gloo/transport/\S+ .*Connection (closed|reset) by peer",
    r"gloo/transport/\S+ .*(Read|Write) error .*(Broken pipe|Connection)",
    r"DistNetworkError: (Broken pipe|Connection reset by peer|failed to (recv|send))",
    r"Connection was likely closed\. Did the remote server shutdown or crash",
    r"remote process exited or there was a network error",
    r"ncclRemoteError|NCCL communicator was aborted",
)

CAUSES = (
    Cause(
        r"shared memory ?\(shm\)|(unable to (mmap|open|allocate|resize)|creating|allocate) shared memory|"
        r"out of shared memory|failed to extend /dev/shm|/dev/shm.*No space left|No space left.*/dev/shm|"
        r"posix_fallocate failed ?: No space left|killed by signal: Bus error",
        _SHARED_MEMORY,
    ),
    Cause(
        r"CUDA out of memory|OutOfMemoryError|CUDA error: out of memory|CUBLAS_STATUS_ALLOC_FAILED|HIP out of memory|"
        r"Cuda failure.*out of memory",
        "the GPU is out of memory: lower micro_batch_size and raise accumulation_steps, which does not change the "
        'result, or set precision="bf16"; `nvidia-smi` shows other processes on that GPU',
    ),
    Cause(
        r"device-side assert",
        "a check inside a GPU kernel failed, often an index or a label out of range; start again with "
        "CUDA_LAUNCH_BLOCKING=1 to see the line, or try the same batch on the CPU",
    ),
    Cause(
        r"Torch not compiled with CUDA",
        "this torch is built for the CPU only: install one built for CUDA into {python}, or let the script check "
        "torch.cuda.is_available()",
    ),
    Cause(
        r"no kernel image is available|not compatible with the current PyTorch installation",
        f"this torch, or an extension, was not built for this GPU architecture: install one that was; {_RUN_DOCTOR}",
    ),
    Cause(
        r"CUDA driver version is insufficient|driver on your system is too old|Found no NVIDIA driver|"
        r"lib(cuda|cudart|nvidia-ml)\.so\S*: cannot open|CUDA driver initialization failed|forward compatibility|"
        r"unsupported display driver",
        "the NVIDIA driver is missing, or too old for this torch's CUDA version: update the driver, "
        f"install a torch for an older CUDA, or give the container its GPUs (--gpus all); {_RUN_DOCTOR}",
    ),
    Cause(
        r"invalid device ordinal|No CUDA GPUs are available|no CUDA-capable device|Duplicate GPU detected",
        "it used a GPU that is not visible to it, or that another rank uses: start at most one process per GPU "
        f"(--gpus all), use cuda:LOCAL_RANK, and check CUDA_VISIBLE_DEVICES; {_RUN_DOCTOR}",
    ),
    Cause(
        r"Expected to have finished reduction in the prior iteration|Expected to mark a variable ready only once",
        "DDP waits for gradients that this step did not compute: use every parameter in the loss, or set "
        "find_unused_parameters=True (parallel.find_unused_parameters in a TrainerConfig)",
    ),
    Cause(
        r"EADDRINUSE|[Aa]ddress already in use",
        "a port is in use, often by a job that still runs (`ss -ltnp` shows the process): end that process, or set "
        "another port; on one node leave out --master-port and --rdzv-endpoint to use a free port",
    ),
    Cause(
        r"No space left on device|Disk quota exceeded|PytorchStreamWriter failed|inline_container.*unexpected pos|"
        r"iostream error",
        "a disk or a quota is full (`df -h`, `df -i`): free some space, or write somewhere else; TMPDIR sets where "
        "temporary files go",
    ),
    Cause(
        r"Too many open files|received \d+ items of ancdata",
        "it reached the limit of open files: type `ulimit -n 65536` before the launch, lower data.num_workers, or call "
        'torch.multiprocessing.set_sharing_strategy("file_system")',
    ),
    Cause(
        r"No module named '?(?P<module>\w+)(?!\w|\.)",
        "{python} has no module {module}. If it is a package: `{python} -m pip install {package}`; if "
        "it is installed in another environment, start ddpkit from there; if it is your own file, check PYTHONPATH",
    ),
    Cause(
        r"No module named '?(?P<module>[\w.]+)",
        "{python} has no module {module}, or another version or package of that name: check its spelling and "
        "its version, and that none of your files has the same name",
    ),
    Cause(
        r"cannot import name '(?P<name>\w+)' from '(?P<module>[\w.]+)'",
        "{module} has no {name}: check its version (`{python} -m pip list`), and that none of your files has its name",
    ),
    Cause(
        r"DefaultCPUAllocator|Cannot allocate memory|\bMemoryError\b|std::bad_alloc|oom[_-]kill|"
        r"DataLoader worker .*killed by signal: Killed",
        _HOST_MEMORY,
    ),
    Cause(
        r"DataLoader worker .*(exited unexpectedly|killed by signal)",
        "a DataLoader worker died: start again with data.num_workers=0 to see its error; if there is none then, it may "
        "have been killed for lack of memory (`dmesg -T | grep -i oom`)",
    ),
    Cause(r"WorkNCCL\(.*OpType=(?P<operation>\w+).*", "in {operation}, " + _TIMEOUT),
    Cause(
        r"[Ww]atchdog caught collective operation timeout|Timed out waiting \d+ ?ms for (recv|send)|"
        r"wait timeout after \d+ ?ms|Timed out after \d+ seconds waiting for clients|monitoredBarrier|"
        r"Application timeout caused pair closure",
        _TIMEOUT,
    ),
    Cause(
        r"client socket has timed out|Connection refused",
        "no process listens at the address it connected to. If that was MASTER_ADDR: rank 0's node may have ended, or "
        "a firewall may block the connection",
    ),
    Cause(
        r"terminate called without an active exception",
        "a C++ thread, for example gloo's, still ran when the process ended: call "
        "torch.distributed.destroy_process_group() at the end of the script",
    ),
    *(Cause(pattern, _OTHER_RANK) for pattern in _PEER_GONE),
)

_BY_SIGNAL = {
    signal.SIGBUS: _SHARED_MEMORY,
    signal.SIGKILL: "it was killed from outside, perhaps by the kernel for lack of memory: `dmesg -T | grep -i oom`",
    signal.SIGILL: f"this CPU lacks an instruction that a library was built for, or {_CRASHED}",
    **dict.fromkeys((signal.SIGSEGV, signal.SIGFPE, signal.SIGABRT), _CRASHED),
}
# The line that ends a traceback, which torch may prefix with the rank.
_ENDS_TRACE = re.compile(r"^(?:\[rank\d+\]: ?)?[A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt)(?::|$)", re.MULTILINE)
_CHAIN = re.compile("the above exception", re.IGNORECASE)
# Warnings of torch's C++ code. Those about closed connections also occur on the rank that failed first.
_WARNING = re.compile(r"^(?:\[rank\d+\]:)?\[W.*\n?", re.MULTILINE)


def hint(text: str, exit_code: int, out_of_memory: bool = False) -> str:
    """What to do about a failure; empty if no pattern matches.

    `text`: the end of the worker's output, or its traceback. `exit_code`: negative: minus the signal that killed it.
    `out_of_memory`: whether the kernel killed a process of this job for lack of memory.
    """
    if out_of_memory and (exit_code in (-signal.SIGKILL, 128 + signal.SIGKILL) or "DataLoader worker" in text):
        return _HOST_MEMORY
    crashed = exit_code < 0 and -exit_code != signal.SIGABRT  # no error message; C++ code prints one before it aborts
    parts = [_last_exception(text), text] if _CHAIN.search(text) else [_last_exception(text)]
    for part in () if crashed else parts:
        for cause in CAUSES:
            found = re.search(cause.pattern, part)
            if found:
                return _fill_in(cause.advice, found.groupdict())
    advice = next((advice for number, advice in _BY_SIGNAL.items() if number == -exit_code), "")
    return (
        "" if _CRASHED in advice and "Fatal Python error" in text else advice
    )  # faulthandler has already shown the line


def is_secondary(text: str) -> bool:
    """Whether this error only says that another rank is gone."""
    return any(re.search(pattern, _last_exception(text)) for pattern in _PEER_GONE)


def is_timeout(text: str) -> bool:
    """Whether a collective timed out because another rank did not reach it."""
    return any(re.search(cause.pattern, _last_exception(text)) for cause in CAUSES if cause.advice.endswith(_TIMEOUT))


def _last_exception(text: str) -> str:
    """The last exception and its message; the whole text if there is none."""
    text = _WARNING.sub("", text)
    starts = [match.start() for match in _ENDS_TRACE.finditer(text)]
    return text[starts[-1] :] if starts else text


def _fill_in(advice: str, found: dict[str, str]) -> str:
    module = found.get("module", "")
    names = {**found, "python": sys.executable, "package": _PACKAGES.get(module, module)}
    return re.sub(r"\{(\w+)\}", lambda match: names.get(match[1], match[0]), advice)
