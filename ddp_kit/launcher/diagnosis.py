"""Diagnosis of a failed worker from its output: the traceback at its end, and advice on common causes."""

import re
import signal
import sys
from dataclasses import dataclass
from itertools import product

# --- Tracebacks -------------------------------------------------------------------------------------------------------
# Find the traceback at the end of a process's output.


_MARK = "Traceback (most recent call last)"
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
# Once the process group is initialised, torch prefixes each line of a traceback with the rank.
_RANK = re.compile(r"^\[rank\d+\]: ?")
# Output that follows a traceback while the process ends: warnings from torch's C++ code, such as
# `[rank0]:[W1120 10:00:00 ...`, and lines that gloo wrote earlier and that are flushed only now.
_AFTER_TRACEBACK = re.compile(
    r"^((\[rank\d+\]:)?\[[WEIF]\d{4}|\[Gloo\] Rank \d+ is connected) "
    r"|^Exception ignored in|^sys:\d+: |^\s*warnings\.warn\("
)
_CHAINED = re.compile(r"^(The above exception was the direct cause|During handling of the above exception)")
_IN_A_WORKER = "Original Traceback"  # in the message of a DataLoader worker's exception, which torch raises again
_GROUP_MEMBER = re.compile(r"^ {4,}\| ")  # an exception inside an ExceptionGroup
_FATAL = re.compile(r"^(Fatal Python error: |terminate called )")
_ABORT = re.compile(r"^terminate called ")
_AT_START = re.compile(r"(ImportError|ModuleNotFoundError|SyntaxError|IndentationError|TabError)\b")
_INTERRUPT = re.compile(r"^KeyboardInterrupt$", re.MULTILINE)
_LONGEST_LINE = 8000  # characters
_MAX_LINES = 60


def split(text: str) -> tuple[str, str]:
    """Split `text` into its last traceback, with chained tracebacks but without rank prefixes, and the rest."""
    lines = text.splitlines(keepends=True)
    plain = [_RANK.sub("", _ANSI.sub("", line)) for line in lines]
    starts = [number for number, line in enumerate(plain) if _MARK in line or _FATAL.match(line)]
    if not starts:
        return "", text
    while len(starts) > 1 and _ABORT.match(plain[starts[-1]]):
        starts.pop()  # torch may abort a process that is already ending with an exception
    start = _first_of_chain(plain, starts)
    end = _end(plain, starts[-1])
    return "\n".join(line.rstrip() for line in plain[start:end]), "".join([*lines[:start], *lines[end:]])


def shortened(trace: str) -> str:
    """Leave out the middle of a very long traceback."""
    lines = trace.splitlines()
    if len(lines) > _MAX_LINES:
        lines = [*lines[: _MAX_LINES // 3], "  ...", *lines[-2 * _MAX_LINES // 3 :]]
    return "\n".join(lines)


def message_of(trace: str) -> str:
    """The line with the type and message of the exception; for an ExceptionGroup, the line of the group."""
    lines = [line.removeprefix("  | ") for line in trace.splitlines()]
    starts = [number for number, line in enumerate(lines) if _MARK in line and not _GROUP_MEMBER.match(line)]
    for line in lines[max(starts, default=len(lines)) + 1 :]:
        if re.match(r"[\w.]+(: |$)", line):
            return line
    return lines[0] if _FATAL.match(trace) else ""


def is_interrupt(trace: str) -> bool:
    """Whether the traceback contains a KeyboardInterrupt, even if it was raised inside an exception handler."""
    return bool(_INTERRUPT.search(trace))


def failed_at_start(trace: str) -> bool:
    """Whether the script failed with an import error or a syntax error at module level. A restart cannot fix that."""
    frames = re.findall(r'^  File ".*", line \d+, in (.*)$', trace, re.MULTILINE)
    return bool(frames and _AT_START.match(message_of(trace))) and all(frame == "<module>" for frame in frames)


def _first_of_chain(plain: list[str], starts: list[int]) -> int:
    first = starts[-1]
    for start in reversed(starts[:-1]):
        between = [line for line in plain[start:first] if line.strip()]
        if not plain[first].startswith(_IN_A_WORKER) and (not between or not _CHAINED.match(between[-1])):
            break
        first = start
    return first


def _end(plain: list[str], start: int) -> int:
    """The index after the last line of the traceback, including all lines of the message at its end."""
    end = start
    for number in range(start, len(plain)):
        if _AFTER_TRACEBACK.match(plain[number]):
            break
        if plain[number].strip():
            end = number
    return end + 1


# --- Hints for common failures ----------------------------------------------------------------------------------------
# A table of patterns in the output of a failed worker, each with advice.
# The first match is used, so specific patterns come before general ones.


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
    "--memory in Docker; the memory that the job asks for in a cluster)"
)
_TIMEOUT = (
    "other ranks did not reach this point before the timeout. Look at the ranks without an error (`py-spy dump "
    "--pid PID` shows a process's stack): one may be stuck, slow, or already past this point, for example because of "
    "a collective under `if rank == 0` or different amounts of data on the ranks. If the ranks are just slow, raise "
    "the timeout: init_process_group(timeout=...)"
)
_OTHER_RANK = "another rank ended first: look for the cause in the output of that rank"
_CRASHED = (
    "the process crashed in native code: set PYTHONFAULTHANDLER=1 and run again to see the Python line; "
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
# The nccl2 backend of torch 2.14 raises this for any error of a communicator, and logs the reason before.
_NCCL_FAILED = r"(?m)NCCL operation failed$"

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
        "a check inside a GPU kernel failed, often because an index or a label is out of range; run again with "
        "CUDA_LAUNCH_BLOCKING=1 to see the line, or try the same batch on the CPU",
    ),
    Cause(
        r"an illegal (memory access|instruction) was encountered|CUDA error: (misaligned address|unspecified launch)",
        "a GPU kernel used memory that is not its own. Kernels run asynchronously, so the traceback may show a later "
        "line: run again with CUDA_LAUNCH_BLOCKING=1 to see the right one. Common causes are an index that is out of "
        "range, and an extension built for another version of torch; `dmesg -T | grep Xid` shows faults of the GPU",
    ),
    Cause(
        r"CUDA (driver )?error: operation not supported",
        "the GPU or its driver does not support an operation. Virtual GPUs (vGPU) do not support expandable segments, "
        "which the launcher enables by default: set PYTORCH_ALLOC_CONF=expandable_segments:False. If that does not "
        f"help, update the NVIDIA driver; {_RUN_DOCTOR}",
    ),
    Cause(
        r"Torch not compiled with CUDA",
        "torch in the environment of {python} was built for the CPU only: install a torch built for CUDA, or let the "
        "script check torch.cuda.is_available()",
    ),
    Cause(
        r"no kernel image is available|not compatible with the current PyTorch installation",
        f"torch or an extension was not built for this GPU architecture: install a build that was; {_RUN_DOCTOR}",
    ),
    Cause(
        r"CUDA driver version is insufficient|driver on your system is too old|Found no NVIDIA driver|"
        r"lib(cuda|cudart|nvidia-ml)\.so\S*: cannot open|CUDA driver initialization failed|forward compatibility|"
        r"unsupported display driver",
        "the NVIDIA driver is missing, or too old for torch's CUDA version: update the driver, install a torch "
        f"built for an older CUDA version, or give the container access to the GPUs (--gpus all); {_RUN_DOCTOR}",
    ),
    Cause(
        r"Duplicate GPU detected",
        "two ranks use the same GPU, or MIG devices of the same GPU, which NCCL does not support: start one process "
        "per GPU (--gpus all), use cuda:LOCAL_RANK, select a single MIG device with --gpus UUID; or let ranks share a "
        'GPU, which is slow: parallel={"share_gpus": True} in a TrainerConfig, or the backend gloo',
    ),
    Cause(
        r"invalid device ordinal|No CUDA GPUs are available|no CUDA-capable device",
        "the process used a GPU that is not visible to it: start at most one process per GPU "
        f"(--gpus all), use cuda:LOCAL_RANK, and check CUDA_VISIBLE_DEVICES; {_RUN_DOCTOR}",
    ),
    Cause(
        r"Expected to mark a variable ready only once",
        "DDP got a second gradient of the same parameter in one backward pass: pass use_reentrant=False to "
        "torch.utils.checkpoint.checkpoint (in transformers: gradient_checkpointing_kwargs={'use_reentrant': False}), "
        "or use memory.activation_checkpointing of a TrainerConfig",
    ),
    Cause(
        r"Expected to have finished reduction in the prior iteration",
        "DDP waits for gradients that this step did not compute: use every parameter in the loss, or set "
        "find_unused_parameters=True (parallel.find_unused_parameters in a TrainerConfig)",
    ),
    Cause(
        r"EADDRINUSE|[Aa]ddress already in use",
        "a port is in use, often by a job that is still running (`ss -ltnp` shows the process): end that process, or "
        "set another port; on a single node, leave out --master-port and --rdzv-endpoint to use a free port",
    ),
    Cause(
        r"No space left on device|Disk quota exceeded|PytorchStreamWriter failed|inline_container.*unexpected pos|"
        r"iostream error",
        "a disk or a quota is full (`df -h`, `df -i`): free some space, or write somewhere else; TMPDIR sets where "
        "temporary files go",
    ),
    Cause(
        r"Too many open files|received \d+ items of ancdata",
        "the process reached the limit of open files: run `ulimit -n 65536` before the launch, lower data.num_workers, "
        'or call torch.multiprocessing.set_sharing_strategy("file_system")',
    ),
    Cause(
        r"No module named '?(?P<module>\w+)(?!\w|\.)",
        "{python} has no module {module}. If it is a package: `{python} -m pip install {package}`; if "
        "it is installed in another environment, start ddpkit there; if it is your own file, check PYTHONPATH",
    ),
    Cause(
        r"No module named '?(?P<module>[\w.]+)",
        "{python} has no module {module}: check its spelling and the version of its package, and make sure that "
        "none of your files has the same name as the package",
    ),
    Cause(
        r"cannot import name '(?P<name>\w+)' from '(?P<module>[\w.]+)'",
        "{module} has no {name}: check its version (`{python} -m pip list`), and make sure that none of your files has "
        "the same name as the module",
    ),
    Cause(
        r"DefaultCPUAllocator|Cannot allocate memory|\bMemoryError\b|std::bad_alloc|oom[_-]kill|"
        r"DataLoader worker .*killed by signal: Killed",
        _HOST_MEMORY,
    ),
    Cause(
        r"DataLoader worker .*(exited unexpectedly|killed by signal)",
        "a DataLoader worker died: run again with data.num_workers=0 to see its error; if there is no error, the "
        "worker may have been killed because memory ran out (check `dmesg -T | grep -i oom`)",
    ),
    Cause(
        r"EOFError: EOF when reading a line|\bBdbQuit\b",
        "the process has read standard input, which has no content: with ddp_kit.launch, pass the values to the "
        "function as arguments, and call the function without launch to debug it",
    ),
    Cause(r"WorkNCCL\(.*OpType=(?P<operation>\w+).*", "in {operation}, " + _TIMEOUT),
    Cause(
        r"[Ww]atchdog caught collective operation timeout|Timed out waiting \d+ ?ms for (recv|send)|"
        r"NCCL [Oo]peration [Tt]imed [Oo]ut|Operation timed out after \d+ ms|"
        r"wait timeout after \d+ ?ms|Timed out after \d+ seconds waiting for clients|monitoredBarrier|"
        r"Application timeout caused pair closure",
        _TIMEOUT,
    ),
    Cause(
        r"client socket has timed out|Connection refused",
        "no process is listening at the address that this process tried to connect to. If that was MASTER_ADDR, the "
        "node of rank 0 may have ended, or a firewall may block the connection",
    ),
    Cause(
        r"terminate called without an active exception",
        "a C++ thread, for example one of gloo, was still running when the process ended: call "
        "torch.distributed.destroy_process_group() at the end of the script",
    ),
    *(Cause(pattern, _OTHER_RANK) for pattern in _PEER_GONE),
    Cause(
        _NCCL_FAILED,
        "NCCL reported an error, usually because another rank ended first: look at the output of that rank. If no "
        "other rank has an error of its own, read NCCL's lines above this one; NCCL_DEBUG=WARN prints more of them",
    ),
)

_BY_SIGNAL: dict[int, str] = {
    signal.SIGBUS: _SHARED_MEMORY,
    signal.SIGKILL: "the process was killed from outside, perhaps by the kernel because memory ran out: check "
    "`dmesg -T | grep -i oom`",
    signal.SIGILL: f"this CPU lacks an instruction that a library was built for, or {_CRASHED}",
    **dict.fromkeys((signal.SIGSEGV, signal.SIGFPE, signal.SIGABRT), _CRASHED),
}
# The last line of a traceback; torch may prefix it with the rank.
_ENDS_TRACE = re.compile(r"^(?:\[rank\d+\]: ?)?[A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt)(?::|$)", re.MULTILINE)
_CHAIN = re.compile("the above exception", re.IGNORECASE)
# Warnings of torch's C++ code. The rank that failed first may also print such warnings, about closed connections.
_WARNING = re.compile(r"^(?:\[rank\d+\]:)?\[W.*\n?", re.MULTILINE)


def hint(text: str, exit_code: int, out_of_memory: bool = False) -> str:
    """Advice about a failure; empty if the cause is not known.

    `text`: the end of the worker's output, or its traceback. `exit_code`: the worker's exit code; -N if signal N killed
    the worker. `out_of_memory`: whether the kernel killed a process of this job because memory ran out.
    """
    text = with_short_lines(text)
    if out_of_memory and (exit_code in (-signal.SIGKILL, 128 + signal.SIGKILL) or "DataLoader worker" in text):
        return _HOST_MEMORY
    parts = []
    if exit_code >= 0 or exit_code == -signal.SIGABRT:  # other signals come without a message
        parts.append(_last_exception(text))
        if _CHAIN.search(text):
            parts.append(text)
    for part, cause in product(parts, CAUSES):
        match = re.search(cause.pattern, part)
        if match:
            module = match.groupdict().get("module", "")
            names = {"python": sys.executable, "package": _PACKAGES.get(module, module), **match.groupdict()}
            advice = cause.advice
            for name, value in names.items():
                advice = advice.replace(f"{{{name}}}", value)
            return advice
    advice = _BY_SIGNAL.get(-exit_code, "")
    if _CRASHED in advice and "Fatal Python error" in text:  # faulthandler has printed the line
        return ""
    return advice


def is_secondary(text: str) -> bool:
    """Whether this error only reports that another rank has ended."""
    return any(re.search(pattern, _last_exception(text)) for pattern in (*_PEER_GONE, _NCCL_FAILED))


def is_timeout(text: str) -> bool:
    """Whether a collective timed out because another rank did not reach it."""
    return any(re.search(cause.pattern, _last_exception(text)) for cause in CAUSES if cause.advice.endswith(_TIMEOUT))


def _last_exception(text: str) -> str:
    """The last exception and its message; the whole text if it contains no exception."""
    text = _WARNING.sub("", with_short_lines(text))
    starts = [match.start() for match in _ENDS_TRACE.finditer(text)]
    return text[starts[-1] :] if starts else text


def with_short_lines(text: str) -> str:
    """The text without the middle of very long lines: some patterns would take minutes, and all nodes get a message."""
    lines = text.split("\n")
    for number, line in enumerate(lines):
        if len(line) > _LONGEST_LINE:
            lines[number] = f"{line[: _LONGEST_LINE // 2]} ... {line[-_LONGEST_LINE // 2 :]}"
    return "\n".join(lines)
