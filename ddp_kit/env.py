"""What the launcher and its workers agree on: environment variables and files. Exit codes: exit_codes.py.

The only place that names them. The variables are torchrun's, so that any script written for it runs here,
and a `Trainer` started by torchrun or by plain `python` finds what it needs.
"""

import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from ddp_kit.errors import WorldError

RANK = "RANK"
LOCAL_RANK = "LOCAL_RANK"
WORLD_SIZE = "WORLD_SIZE"
LOCAL_WORLD_SIZE = "LOCAL_WORLD_SIZE"
GROUP_RANK = "GROUP_RANK"  # the node's number
MASTER_ADDR = "MASTER_ADDR"
MASTER_PORT = "MASTER_PORT"

GROUP_WORLD_SIZE = "GROUP_WORLD_SIZE"
ROLE_RANK = "ROLE_RANK"
ROLE_NAME = "ROLE_NAME"
ROLE_WORLD_SIZE = "ROLE_WORLD_SIZE"
RESTART_COUNT = "TORCHELASTIC_RESTART_COUNT"
MAX_RESTARTS = "TORCHELASTIC_MAX_RESTARTS"
RUN_ID = "TORCHELASTIC_RUN_ID"
USE_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
SIGNALS = "TORCHELASTIC_SIGNALS_TO_HANDLE"
NCCL_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
PYTHON = "PYTHON_EXEC"  # the interpreter for the workers, instead of the launcher's own

VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
GPU_ORDER = "CUDA_DEVICE_ORDER"
# How many of the visible GPUs each process has for itself, 1 where it is not set: local rank r has those from r times
# this number on. Of the launcher's --gpus-per-process; under torchrun, users set it themselves.
GPUS_PER_PROCESS = "DDPKIT_GPUS_PER_PROCESS"
THREADS = "OMP_NUM_THREADS"
CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
ALLOCATOR = "PYTORCH_ALLOC_CONF"  # torch's allocator on a GPU, and the older names of the same variable:
ALLOCATOR_OLDER = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
NO_COLOR = "NO_COLOR"  # the custom of https://no-color.org
# Where torchrun reads the defaults of --nproc-per-node and --master-port from.
PROCESSES_DEFAULT = "PET_NPROC_PER_NODE"
MASTER_PORT_DEFAULT = "PET_MASTER_PORT"
GRACE_DEFAULT = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"  # and that of --shutdown-timeout
LINE_PREFIX_DEFAULT = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"  # and that of --log-line-prefix-template
# Settings of torch's agent that have no flag.
UNINTERRUPTIBLE_TIMEOUT = "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT"  # seconds; not a number: no limit
FILE_TIMER = "TORCHELASTIC_ENABLE_FILE_TIMER"  # 1: the workers' own timers, torch.distributed.elastic.timer, are served
FILE_TIMER_PATH = "TORCHELASTIC_TIMER_FILE"

# Beginnings of the names of variables that libraries read when they are imported, and those read still earlier.
IMPORT_TIME_VARIABLES = (
    "OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_", "BLIS_", "TORCH_CPP_LOG_LEVEL", "TORCH_LOGS", "TORCH_SHOW_CPP",
    "TORCH_DISTRIBUTED_DEBUG", "TORCH_TRACE", "TORCH_DEVICE_BACKEND_AUTOLOAD", "PYTORCH_JIT",
    "TORCHDYNAMO_", "TORCH_DYNAMO_", "TORCHINDUCTOR_", "TORCH_COMPILE", ALLOCATOR, *ALLOCATOR_OLDER,
)  # fmt: skip
START_TIME_VARIABLES = ("PYTHON", "LD_PRELOAD", "LD_LIBRARY_PATH", "MALLOC_", "GLIBC_TUNABLES")
CHECKPOINT_WRITER = "ddp_kit.checkpoint.process"
"""In the command line of the process that finishes a save after its rank has ended, and then goes."""
# What the warm server's imports need: no thread of a BLAS, and no CUDA for the question whether there is any.
HIDDEN_FROM_WORKERS = {"OPENBLAS_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}

# For the launcher's own import of torch: its stores write stack traces to the terminal when a peer is gone.
QUIET_IMPORT = {"TORCH_CPP_LOG_LEVEL": "ERROR"}

RUN_FOLDER_PREFIX = "ddpkit-"
# In a run folder, besides the names that torch gives: each rank's, in its own folder, and the job's.
OUTPUT_LOG = "output.log"
HEARTBEAT_FILE = "heartbeat"  # see heartbeat.py
STACKS_FILE = "stacks.txt"  # where a rank stood when a hang was found
# To a forked worker where py-spy cannot look at it: write down where you stand. Nobody else uses it.
STACKS_SIGNAL = getattr(signal, "SIGRTMAX", 3) - 3
VERDICT_FILE = "verdict.json"
ERROR_SHOWN_FILE = "error-shown"  # in an attempt's folder: one of its ranks has printed the error that ends it

# Marks in the `extraInfo` of an error file that was not left by the script itself.
NOTE_MARK = "ddpkit"
NOTE_AT_START = "at_start"
NOTE_SECONDARY = "secondary"  # the cause is another rank's
NOTE_PRINTED = "printed"  # a rank of this node prints the message


@dataclass(frozen=True)
class WorkerEnv:
    """Where one worker stands in its job, as its environment says it."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    node_rank: int = 0
    gpus_per_process: int | None = None
    """None: all visible ones, where it is the only process; else one."""


def agent_serves_store(env: Mapping[str, str]) -> bool:
    """Whether the launcher serves the workers' store; else the worker of rank 0 does. torchrun's own switch."""
    return env.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0") != "1"


def from_env(env: Mapping[str, str] | None = None) -> WorkerEnv:
    """Read a worker's place from its environment; one process alone where RANK and WORLD_SIZE are not set.

    Raises `WorldError` where the variables are incomplete or contradict each other.
    """
    env = os.environ if env is None else env
    if RANK not in env and WORLD_SIZE not in env:
        return WorkerEnv(gpus_per_process=_gpus_per_process(env))
    missing = [name for name in (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT) if not env.get(name)]
    if missing:
        names = f"{', '.join(missing)} {'is' if len(missing) == 1 else 'are'}"
        raise WorldError(
            f"this process has part of a launcher's environment, but {names} not set",
            "start the script with `ddpkit launch`, or unset RANK and WORLD_SIZE to run it alone",
        )
    values = {name: _number(env, name) for name in (RANK, WORLD_SIZE)}
    worker = WorkerEnv(
        rank=values[RANK],
        world_size=values[WORLD_SIZE],
        local_rank=_number(env, LOCAL_RANK, values[RANK]),
        local_world_size=_number(env, LOCAL_WORLD_SIZE, values[WORLD_SIZE]),
        node_rank=_number(env, GROUP_RANK, 0),
        gpus_per_process=_gpus_per_process(env),
    )
    if not 0 <= worker.rank < worker.world_size:
        raise WorldError(
            f"{RANK}={worker.rank} does not fit {WORLD_SIZE}={worker.world_size}",
            f"{RANK} counts from 0 to {WORLD_SIZE} - 1; let `ddpkit launch` set both",
        )
    return worker


def job_began() -> float | None:
    """When the launcher started this job's first workers on this node, in `time.time`; None where none has.

    By its folders of the attempts: a restart does not begin anew.
    """
    folder = attempt_folder()
    if folder is None:
        return None
    with suppress(OSError):
        return min((each.stat().st_mtime for each in folder.parent.iterdir() if each.is_dir()), default=None)
    return None


def error_file() -> Path | None:
    """Where this worker tells its launcher of its failure; None where it has none, or that keeps no files."""
    path = os.environ.get(ERROR_FILE)
    return Path(path) if path and path != os.devnull else None


def attempt_folder() -> Path | None:
    """The launcher's folder of this attempt on this node; None where there is none in the form that torch gives it."""
    path = error_file()
    folder = path.parent.parent if path is not None else Path()  # run folder / attempt_0 / local rank / file
    return folder if folder.name.startswith("attempt_") else None


def attempt(env: Mapping[str, str] | None = None) -> tuple[str, int]:
    """The job's id, and how often its workers were started again; ("", 0) where no launcher has started this one."""
    env = os.environ if env is None else env
    return env.get(RUN_ID, ""), _number(env, RESTART_COUNT, 0)


def speaker_rank() -> int:
    """This process's rank, to be named in its messages; never raises."""
    text = os.environ.get(RANK, "0")
    return int(text) if text.isdecimal() else 0


def make_cublas_repeatable() -> None:
    """Ask cuBLAS for its repeatable workspaces; it reads this when CUDA starts.

    Source: NVIDIA cuBLAS documentation, "Results reproducibility". A value of the user's own stays.
    """
    os.environ.setdefault(CUBLAS_WORKSPACE, ":4096:8")


def allocator_defaults(env: Mapping[str, str]) -> dict[str, str]:
    """What the launcher sets for torch's CUDA allocator: expandable segments, which fragment less.

    Empty where the user has set the variable, by any of its names, and where there is no NVIDIA driver. torch reads it
    when its CUDA library is loaded, so the process that imports torch for forked workers needs it, too.
    """
    if not Path("/dev/nvidiactl").exists() or not env.keys().isdisjoint((ALLOCATOR, *ALLOCATOR_OLDER)):
        return {}
    return {ALLOCATOR: "expandable_segments:True"}


def _gpus_per_process(env: Mapping[str, str]) -> int | None:
    if GPUS_PER_PROCESS not in env:
        return None
    found = _number(env, GPUS_PER_PROCESS)
    if found < 1:
        raise WorldError(f"{GPUS_PER_PROCESS}={found} is no number of GPUs", "set it to at least 1, or unset it")
    return found


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    text = env.get(name, "" if default is None else str(default))
    if not text.isdecimal():
        raise WorldError(f"{name}={text!r} is not a whole number", "let `ddpkit launch` set it")
    return int(text)
