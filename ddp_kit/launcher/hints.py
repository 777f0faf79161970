"""What to do now: from what a failed worker left behind to a hint, for the usual causes.

A table. The first row that fits is taken, so what is more particular stands before what is more general.
"""

import re
import signal
import sys
from dataclasses import dataclass


@dataclass(frozen=True)
class Cause:
    """One cause of failures: how it is recognised, and what to do about it."""

    pattern: str
    """A regular expression, searched for in what the worker wrote."""
    advice: str
    """What to do now; `{name}` is what a group of the pattern has found."""


_LOOK = "run `ddpkit doctor` to see what this machine has"
_SHARED_MEMORY = (
    "the shared memory of data loader workers and NCCL is used up (`df -h /dev/shm`): "
    "start the container with --shm-size=8g or --ipc=host, or lower data.num_workers"
)
_HOST_MEMORY = (
    "the memory of this machine, or of its container or job, is used up: lower the number of processes, "
    "data.num_workers or micro_batch_size, or raise the limit (`cat /sys/fs/cgroup/memory.max`, "
    "--memory of docker, --mem of Slurm)"
)
_LATE = (
    "other ranks did not come to the same point within the time-out. Look at those that do not complain: one may be "
    "stuck, slower, or past this point, as with a collective under `if rank == 0` or data of different lengths "
    "(`py-spy dump --pid PID` shows where one is). If they only need longer: "
    "init_process_group(timeout=...)"
)
_ANOTHER = "another rank went away first: the cause is in what that one wrote"
_CRASHED = (
    "it crashed outside of Python: set PYTHONFAULTHANDLER=1 and start again to see the line at which that happens; "
    "often an extension that was built for another version of torch"
)
_PACKAGES = {"cv2": "opencv-python", "PIL": "pillow", "sklearn": "scikit-learn", "yaml": "pyyaml"}

# What gloo, NCCL and the store of torch 2.13 say when a peer is gone. `Connection reset by peer` alone may come from
# any server that a script talks to.
_ECHOES = (
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
        "the GPU's memory is used up: lower micro_batch_size and raise accumulation_steps with it, which leaves the "
        'result as it is, or set precision="bf16"; `nvidia-smi` shows who else is on that GPU',
    ),
    Cause(
        r"device-side assert",
        "a check inside a GPU kernel failed, often an index or a label out of range; start again with "
        "CUDA_LAUNCH_BLOCKING=1 to see the line, or try the same batch on the CPU",
    ),
    Cause(
        r"Torch not compiled with CUDA",
        "this torch is built for the CPU alone: install one built for CUDA into {python}, or let the script ask "
        "torch.cuda.is_available()",
    ),
    Cause(
        r"no kernel image is available|not compatible with the current PyTorch installation",
        f"this build of torch, or an extension, has no code for this kind of GPU: install one that has; {_LOOK}",
    ),
    Cause(
        r"CUDA driver version is insufficient|driver on your system is too old|Found no NVIDIA driver|"
        r"lib(cuda|cudart|nvidia-ml)\.so\S*: cannot open|CUDA driver initialization failed|forward compatibility|"
        r"unsupported display driver",
        "the NVIDIA driver is missing, or too old for the CUDA that this torch is built for: update the driver, "
        f"install a torch for an older CUDA, or give the container its GPUs (--gpus all); {_LOOK}",
    ),
    Cause(
        r"invalid device ordinal|No CUDA GPUs are available|no CUDA-capable device|Duplicate GPU detected",
        "it asked for a GPU that it cannot see, or one that another rank has: start no more processes than there are "
        f"GPUs (--gpus all), use cuda:LOCAL_RANK, and check CUDA_VISIBLE_DEVICES; {_LOOK}",
    ),
    Cause(
        r"Expected to have finished reduction in the prior iteration|Expected to mark a variable ready only once",
        "DDP waits for gradients that this step did not compute: use every parameter in the loss, or set "
        "find_unused_parameters=True (parallel.find_unused_parameters in a TrainerConfig)",
    ),
    Cause(
        r"EADDRINUSE|[Aa]ddress already in use",
        "a port is taken, often by a job that was not ended (`ss -ltnp` shows by whom): end that process, or name "
        "another port; on one node leave out --master-port and --rdzv-endpoint, and a free one is taken",
    ),
    Cause(
        r"No space left on device|Disk quota exceeded|PytorchStreamWriter failed|inline_container.*unexpected pos|"
        r"iostream error",
        "a disk is full, or a quota is used up (`df -h`, `df -i`): make room, or write somewhere else; TMPDIR says "
        "where temporary files go",
    ),
    Cause(
        r"Too many open files|received \d+ items of ancdata",
        "it has more files open than it may: `ulimit -n 65536` before the launch, lower data.num_workers, or "
        'torch.multiprocessing.set_sharing_strategy("file_system")',
    ),
    Cause(
        r"No module named '?(?P<module>\w+)(?!\w|\.)",
        "{python} has no module {module}. If that is a package of that name: `{python} -m pip install {package}`; if "
        "you have it in another environment, start ddpkit from there; if it is a file of yours, check PYTHONPATH",
    ),
    Cause(
        r"No module named '?(?P<module>[\w.]+)",
        "{python} has no module {module}, or an older or another package of that name: check its spelling and "
        "its version, and that no file of yours has the same name",
    ),
    Cause(
        r"cannot import name '(?P<name>\w+)' from '(?P<module>[\w.]+)'",
        "{module} has no {name}: check its version (`{python} -m pip list`), and that no file of yours has its name",
    ),
    Cause(
        r"DefaultCPUAllocator|Cannot allocate memory|\bMemoryError\b|std::bad_alloc|oom[_-]kill|"
        r"DataLoader worker .*killed by signal: Killed",
        _HOST_MEMORY,
    ),
    Cause(
        r"DataLoader worker .*(exited unexpectedly|killed by signal)",
        "a data loader worker died: start again with data.num_workers 0 to see its error; if it is gone then, it was "
        "perhaps killed for memory (`dmesg -T | grep -i oom`)",
    ),
    Cause(r"WorkNCCL\(.*OpType=(?P<operation>\w+).*", "in {operation}, " + _LATE),
    Cause(
        r"[Ww]atchdog caught collective operation timeout|Timed out waiting \d+ ?ms for (recv|send)|"
        r"wait timeout after \d+ ?ms|Timed out after \d+ seconds waiting for clients|monitoredBarrier|"
        r"Application timeout caused pair closure",
        _LATE,
    ),
    Cause(
        r"client socket has timed out|Connection refused",
        "nobody listens where it wanted to connect. If that was MASTER_ADDR: rank 0's node may have ended, or a "
        "firewall may be between them",
    ),
    Cause(
        r"terminate called without an active exception",
        "a thread of C++ code was still at work when its interpreter or its program ended, as gloo's may be where a "
        "script ends without it: call torch.distributed.destroy_process_group() at the script's end",
    ),
    *(Cause(pattern, _ANOTHER) for pattern in _ECHOES),
)

_BY_SIGNAL = {
    signal.SIGBUS: _SHARED_MEMORY,
    signal.SIGKILL: "somebody killed it, perhaps the kernel for memory: `dmesg -T | grep -i oom`",
    signal.SIGILL: f"this CPU lacks an instruction that a library was built for, or {_CRASHED}",
    **dict.fromkeys((signal.SIGSEGV, signal.SIGFPE, signal.SIGABRT), _CRASHED),
}
# The line that ends a traceback, where torch may have put the rank before it.
_LAST_WORD = re.compile(r"^(?:\[rank\d+\]: ?)?[A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt)(?::|$)", re.MULTILINE)
_CHAIN = re.compile("the above exception", re.IGNORECASE)
# Warnings of torch's C++ code: the threads of a rank that fails for reasons of its own may meet closed connections.
_WARNING = re.compile(r"^(?:\[rank\d+\]:)?\[W.*\n?", re.MULTILINE)


def hint(text: str, exit_code: int, out_of_memory: bool = False) -> str:
    """What to do now; nothing where no usual cause fits.

    `text`: the end of what the worker wrote, or its traceback. `exit_code`: below 0 minus the signal that ended it.
    `out_of_memory`: whether the kernel killed a process of this job for memory while it ran.
    """
    if out_of_memory and (exit_code in (-signal.SIGKILL, 128 + signal.SIGKILL) or "DataLoader worker" in text):
        return _HOST_MEMORY
    crashed = exit_code < 0 and -exit_code != signal.SIGABRT  # without a last word; C++ code has one when it aborts
    for part in () if crashed else _telling(text):
        for cause in CAUSES:
            found = re.search(cause.pattern, part)
            if found:
                return _filled(cause.advice, found.groupdict())
    advice = next((advice for number, advice in _BY_SIGNAL.items() if number == -exit_code), "")
    return "" if _CRASHED in advice and "Fatal Python error" in text else advice  # it is there already


def is_secondary(text: str) -> bool:
    """Whether this is what a rank says when another one went away: the cause is not here."""
    return any(re.search(pattern, _final(text)) for pattern in _ECHOES)


def is_late(text: str) -> bool:
    """Whether a collective has timed out: the cause is a rank that did not come to it."""
    return any(re.search(cause.pattern, _final(text)) for cause in CAUSES if cause.advice.endswith(_LATE))


def _telling(text: str) -> tuple[str, ...]:
    """Where the cause may stand: in the last exception, then in those that it came from."""
    return (_final(text), text) if _CHAIN.search(text) else (_final(text),)


def _final(text: str) -> str:
    """The last exception and what it says; all of the text where there is none."""
    text = _WARNING.sub("", text)
    starts = [match.start() for match in _LAST_WORD.finditer(text)]
    return text[starts[-1] :] if starts else text


def _filled(advice: str, found: dict[str, str]) -> str:
    module = found.get("module", "")
    names = {**found, "python": sys.executable, "package": _PACKAGES.get(module, module)}
    return re.sub(r"\{(\w+)\}", lambda match: names.get(match[1], match[0]), advice)
