"""The environment variables and files that the launcher and its workers use to communicate.

No other module contains the names of these variables and files. Workers get torchrun's variables, so that scripts for
torchrun run unchanged, and a `Trainer` also works under torchrun or plain `python`. Exit codes are in exit_codes.py.
"""

import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from ddp_kit.errors import WorldError

RANK = "RANK"
LOCAL_RANK = "LOCAL_RANK"
WORLD_SIZE = "WORLD_SIZE"
LOCAL_WORLD_SIZE = "LOCAL_WORLD_SIZE"
GROUP_RANK = "GROUP_RANK"  # the rank of the node
MASTER_ADDR = "MASTER_ADDR"
MASTER_PORT = "MASTER_PORT"

GROUP_WORLD_SIZE = "GROUP_WORLD_SIZE"
ROLE_RANK = "ROLE_RANK"
ROLE_NAME = "ROLE_NAME"
ROLE_WORLD_SIZE = "ROLE_WORLD_SIZE"
RESTART_COUNT = "TORCHELASTIC_RESTART_COUNT"
MAX_RESTARTS = "TORCHELASTIC_MAX_RESTARTS"
NODE_CHANGES = "DDPKIT_NODE_CHANGES"  # how often the workers were restarted because a node was lost or joined
RUN_ID = "TORCHELASTIC_RUN_ID"
USE_AGENT_STORE = "TORCHELASTIC_USE_AGENT_STORE"
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
SIGNALS = "TORCHELASTIC_SIGNALS_TO_HANDLE"
NCCL_ERROR_HANDLING = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
KEEP_WARM = "DDPKIT_KEEP_WARM"  # the default of --keep-warm
RUNTIME_FOLDER = "XDG_RUNTIME_DIR"  # for sockets of this user; see the XDG Base Directory Specification
CACHE_FOLDER = "XDG_CACHE_HOME"
PYTHON = "PYTHON_EXEC"  # the workers' interpreter, in place of the launcher's interpreter

VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
GPU_ORDER = "CUDA_DEVICE_ORDER"
# --gpus-per-process: the number of GPUs of each process, 1 if unset. Local rank r uses the visible GPUs that start at
# index r times this number. Under torchrun, users set the variable themselves.
GPUS_PER_PROCESS = "DDPKIT_GPUS_PER_PROCESS"
THREADS = "OMP_NUM_THREADS"
BLAS_THREADS = "OPENBLAS_NUM_THREADS"  # threads of NumPy's BLAS; takes precedence over OMP_NUM_THREADS
CUBLAS_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"
ALLOCATOR = "PYTORCH_ALLOC_CONF"  # settings of torch's CUDA allocator; older names of the variable:
ALLOCATOR_OLDER = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
NO_COLOR = "NO_COLOR"  # see https://no-color.org
# torchrun's variables for the defaults of flags.
PROCESSES_DEFAULT = "PET_NPROC_PER_NODE"
NODES_DEFAULT = "PET_NNODES"
NODE_RANK_DEFAULT = "PET_NODE_RANK"
MASTER_ADDR_DEFAULT = "PET_MASTER_ADDR"
MASTER_PORT_DEFAULT = "PET_MASTER_PORT"
FLAG_DEFAULT = "PET_{name}"  # the default of any flag
GRACE_DEFAULT = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"  # --shutdown-timeout
LINE_PREFIX_DEFAULT = "TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE"  # --log-line-prefix-template
# Set by the manifests of `ddpkit submit`: the seconds between the cluster's SIGTERM and SIGKILL to the launcher.
GRACE = "DDPKIT_GRACE_SECONDS"
END_TIME = "SLURM_JOB_END_TIME"  # when the job ends, in seconds since 1970
# Settings of torch's agent that have no flag.
UNINTERRUPTIBLE_TIMEOUT = "TORCHELASTIC_UNINTERRUPTIBLE_STATE_TIMEOUT"  # in seconds; no limit if not a number
FILE_TIMER = "TORCHELASTIC_ENABLE_FILE_TIMER"  # 1: serve the workers' timers (torch.distributed.elastic.timer)

# Set by `ddpkit plan` so that the script's Trainer plans instead of training: the number of ranks, in total and on each
# node, and the bytes of each device.
PLAN_RANKS = "DDPKIT_PLAN_RANKS"
PLAN_RANKS_PER_NODE = "DDPKIT_PLAN_RANKS_PER_NODE"
PLAN_MEMORY = "DDPKIT_PLAN_MEMORY"
# Set by `ddpkit rehearse` so that the workers record their steps: the folder of the run.
REHEARSAL = "DDPKIT_REHEARSAL"
# Set by `ddpkit rehearse`: the function that each worker calls before the script, as `module:name`.
WATCHED_BY = "DDPKIT_WATCHED_BY"
STORAGE_ENDPOINTS = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")  # of a store compatible with S3
# Variables that keep a rehearsal out of the records of trackers, on the network and on disk. {folder}: that of the run.
OFFLINE = {
    "WANDB_MODE": "offline", "WANDB_DIR": "{folder}", "MLFLOW_TRACKING_URI": "file:{folder}/mlruns",
    "COMET_START_ONLINE": "0", "COMET_OFFLINE_DIRECTORY": "{folder}", "NEPTUNE_MODE": "offline",
    "CLEARML_OFFLINE_MODE": "1", "SWANLAB_MODE": "offline", "TRACKIO_DIR": "{folder}", "TMPDIR": "{folder}/tmp",
}  # fmt: skip
# 1: precision="fp8" computes its float8 products in float32, on any device; for tests.
EMULATE_FP8 = "DDPKIT_EMULATE_FP8"

# Prefixes of variables that libraries read when they are imported, and prefixes of variables that the interpreter or
# the dynamic loader reads at start.
IMPORT_TIME_VARIABLES = (
    "OMP_", "MKL_", "KMP_", "GOMP_", "OPENBLAS_", "BLIS_", "TORCH_CPP_LOG_LEVEL", "TORCH_LOGS", "TORCH_SHOW_CPP",
    "TORCH_DISTRIBUTED_DEBUG", "TORCH_TRACE", "TORCH_DEVICE_BACKEND_AUTOLOAD", "PYTORCH_JIT",
    "TORCHDYNAMO_", "TORCH_DYNAMO_", "TORCHINDUCTOR_", "TORCH_COMPILE", ALLOCATOR, *ALLOCATOR_OLDER,
)  # fmt: skip
# Prefixes of those that torch itself reads when it is imported. Libraries set some of the others for themselves.
READ_BY_TORCH = (
    THREADS, "MKL_", "TORCH_CPP_LOG_LEVEL", "TORCH_LOGS", "TORCH_SHOW_CPP", "TORCH_DISTRIBUTED_DEBUG", "PYTORCH_JIT",
    ALLOCATOR, *ALLOCATOR_OLDER,
)  # fmt: skip
START_TIME_VARIABLES = ("PYTHON", "LD_PRELOAD", "LD_LIBRARY_PATH", "MALLOC_", "GLIBC_TUNABLES")
# Prefixes of the variables that compiled libraries may read when they are loaded, in addition to those above.
READ_BY_LIBRARIES = (
    "LANG", "LC_", "LOCPATH", "TZ", "LD_", "GCONV_PATH", "GFORTRAN_", "GOTO_", "GLOG_", "OPENSSL_", "SSL_",
    "TORCH", "PYTORCH", "ATEN_", "C10_", "KINETO_", "XNNPACK_", "NNPACK_", "ONEDNN_", "DNNL_", "MKLDNN_", "TBB_",
    "CUDA_", "CUBLAS", "CUDNN_", "CUFFT_", "NVIDIA_", "NVTX_", "NVPL_", "NCCL_", "GLOO_", "UCC_", "UCX_", "FI_",
    "OMPI_", "MPI_", "I_MPI_", "INTEL_", "ITT_", "HIP_", "HSA_", "ROCR_", "ROCM_", "ROCBLAS_", "MIOPEN_", "SYCL_",
    "ONEAPI_", "ZE_", "ACC_", "NPY_", "NUMPY_", "NUMEXPR_", "VECLIB_", "PSUTIL_", "ARROW_", "GRPC_", "HDF5_",
    "PROTOCOL_BUFFERS_",
)  # fmt: skip
# Prefixes of variables that the launcher sets for each worker, or for each round of a job.
VARIABLES_OF_ONE_WORKER = (
    "DDPKIT_", "TORCHELASTIC_", "GROUP_", "ROLE_", "MASTER_", RANK, LOCAL_RANK, LOCAL_WORLD_SIZE, WORLD_SIZE,
)  # fmt: skip
# Prefixes of variables that the launcher or a cluster sets, and that differ between any two runs.
VARIABLES_OF_ONE_RUN = (*VARIABLES_OF_ONE_WORKER, "SLURM_", "PET_")
# Prefixes of variables that change how ddpkit, torch and their libraries behave: `ddpkit env` lists these.
REPORTED_VARIABLES = (
    *VARIABLES_OF_ONE_RUN, "TORCH", "PYTORCH_", "NCCL_", "GLOO_", "UCX_", "FI_", "CUDA_", "CUBLAS_", "NVIDIA_", "OMP_",
    "MKL_", "KMP_", "PYTHON", "LD_", "JOB_COMPLETION_INDEX", "VIRTUAL_ENV", "CONDA_PREFIX",
)  # fmt: skip
PACKAGE_FOLDER = str(Path(__file__).parents[1])
"""The folder from which this package is imported."""
INSTALLED_PACKAGES = ("site-packages", "dist-packages")
"""Parts of the paths of installed packages."""
# The installed packages that may be imported once per node, before the workers are forked, and those that they import.
# tests/end_to_end/test_import_traces.py compares the values in their modules between two processes, and has a row for
# each that differs (process ids, times, random numbers). Add a package only after a run of that test with it installed.
IMPORTED_ONCE = frozenset((
    "PIL", "absl", "accelerate", "annotated_types", "anyio", "attr", "attrs", "botocore", "brotli", "certifi",
    "charset_normalizer", "click", "cloudpickle", "colorama", "contourpy", "cv2", "cycler", "datasets", "dateutil",
    "dill", "einops", "evaluate", "filelock", "fontTools", "fsspec", "google", "h11", "h5py", "httpcore", "httpcore2",
    "httpx", "httpx2", "huggingface_hub", "idna", "jinja2", "joblib", "kiwisolver", "lightning_utilities",
    "markdown_it", "markupsafe", "matplotlib", "mdurl", "mpl_toolkits", "mpmath", "multiprocess", "narwhals",
    "networkx", "nltk", "numpy", "packaging", "pandas", "peft", "psutil", "pyarrow", "pydantic", "pydantic_core",
    "pygments", "pyparsing", "pytz", "regex", "requests", "rich", "safetensors", "scipy", "sentencepiece", "six",
    "sklearn", "sniffio", "sympy", "tensorboard", "threadpoolctl", "tiktoken", "tiktoken_ext", "timm", "tokenizers",
    "torch", "torchao", "torchmetrics", "torchvision", "tqdm", "transformers", "triton", "truststore",
    "typing_extensions", "typing_inspection", "tzdata", "urllib3", "xxhash", "yaml",
))  # fmt: skip
CHECKPOINT_WRITER = "ddp_kit.checkpoint.writer"
"""A string in the command line of checkpoint writer processes, which may outlive their rank to finish a save."""
# Set while the warm server imports: BLAS must not start threads, and the check for GPUs must not initialise CUDA.
HIDDEN_FROM_WORKERS = {BLAS_THREADS: "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}

# For the launcher's import of torch, whose stores write stack traces to the terminal when a peer is gone.
QUIET_IMPORT = {"TORCH_CPP_LOG_LEVEL": "ERROR"}

RUN_FOLDER_PREFIX = "ddpkit-"
# Files in a run folder, in addition to torch's files: one of each per rank, but one VERDICT_FILE for the whole job.
OUTPUT_LOG = "output.log"
HEARTBEAT_FILE = "heartbeat"  # see heartbeat.py
STACKS_FILE = "stacks.txt"  # the stack of a rank when a hang was detected
# The signal that makes a forked worker write its stacks, on machines where py-spy cannot read them.
STACKS_SIGNAL = getattr(signal, "SIGRTMAX", 3) - 3
VERDICT_FILE = "verdict.json"
GRACE_FILE = "shutdown-timeout"  # in an attempt's folder: the seconds of --shutdown-timeout
# In an attempt's folder: the path of the node's folder for copies of the state in memory, which all attempts share.
MEMORY_FILE = "memory-folder"
SHARED_MEMORY = "/dev/shm"  # noqa: S108
# Bytes that must be free there, so that DataLoader workers put batches into it. Docker's default is 64 MiB.
LEAST_SHARED_MEMORY = 128 << 20
ROUND_FILE = "ddpkit-round.json"  # in an attempt's folder while it runs: see launcher/record.py
# The record of a run: see docs/run-record.md. Two files in an attempt's folder: RECORD_DEFAULT, from the launcher, has
# the path for the record of a Trainer without a checkpoint folder; RECORD_NOTE, from the Trainers, has the paths of the
# records to which the launcher adds.
RECORD_FOLDER = "record"
RECORD_ATTEMPTS = "attempts.jsonl"
RECORD_ROWS = "rows.jsonl"
RECORD_NOTE = "ddpkit-record"
RECORD_DEFAULT = "ddpkit-default-record"
ERROR_SHOWN_FILE = "error-shown"  # in an attempt's folder: a rank has printed the error that ends the attempt

# Keys in the `extraInfo` of an error file that was written by ddpkit, not by the script.
NOTE_MARK = "ddpkit"
NOTE_AT_START = "at_start"
NOTE_SECONDARY = "secondary"  # the root cause is on another rank
NOTE_FAULTY = "faulty"  # the device of this rank computes wrong numbers
NOTE_PRINTED = "printed"  # a rank of this node prints the message
NOTE_PRINTED_HERE = "printed_here"  # this rank has printed it


class WorkerEnv(NamedTuple):
    """The ranks and world sizes of one worker, as read from its environment variables."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    node_rank: int = 0
    gpus_per_process: int | None = None
    """Number of GPUs per process. None: a single process uses all visible GPUs; several processes use one each."""


class PlanRequest(NamedTuple):
    """Parameters that `ddpkit plan` passes to the Trainer in the script."""

    ranks: int
    """The number of ranks on all nodes."""
    per_node: int
    """The number of ranks on each node."""
    memory: int
    """The memory of each device, in bytes."""


def plan_request(env: Mapping[str, str] = os.environ) -> PlanRequest | None:
    """The parameters that `ddpkit plan` has set in the environment; None if the process should train."""
    if PLAN_RANKS not in env:
        return None
    ranks = _number(env, PLAN_RANKS)
    return PlanRequest(ranks, _number(env, PLAN_RANKS_PER_NODE, ranks), _number(env, PLAN_MEMORY))


def storage_endpoint(env: Mapping[str, str] = os.environ) -> str:
    """The URL of a store that is compatible with S3; "" for S3 itself."""
    return next(filter(None, map(env.get, STORAGE_ENDPOINTS)), "")


def rehearsal_folder() -> Path | None:
    """The folder of this run in a rehearsal (`ddpkit rehearse`); None in any other run."""
    folder = os.environ.get(REHEARSAL)
    return Path(folder) if folder else None


def restarts() -> int:
    """How often the launcher has restarted the workers after a failure."""
    return _number(os.environ, RESTART_COUNT, 0)


def emulates_fp8() -> bool:
    """Whether float8 products are emulated in float32, for tests on devices without float8 support."""
    return os.environ.get(EMULATE_FP8) == "1"


def qualified_name(function: Callable[..., object]) -> str:
    """The name of a function as `module:name`."""
    return f"{function.__module__}:{function.__qualname__}"


def function_named(name: str) -> Any:
    """The function with this `qualified_name`."""
    module, _, function = name.partition(":")
    return getattr(import_module(module), function)


def child_code(imports: str, then: str) -> str:
    """Code for `python -c` in a child process, with the folder of the package as its first argument (`PACKAGE_FOLDER`).

    The folder is in `sys.path` for the imports only, and the current folder, which Python adds, is not searched.
    `imports`: the import statement. `then`: the statements after it.
    """
    return f"""\
import sys
path = sys.path[0 if sys.flags.safe_path else 1:]
sys.path.insert(0, sys.argv[1])
{imports}
sys.path[:] = path
{then}
"""


def set_environment(env: Mapping[str, str]) -> None:
    """Make `env` the environment of this process."""
    for name in set(os.environ).difference(env):
        del os.environ[name]
    os.environ.update(env)


def open_standard_streams() -> None:
    """Open /dev/null in place of closed standard streams, so that no other file gets descriptor 0, 1 or 2."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            # Returns the lowest free descriptor, which is the closed one. Child processes inherit standard streams.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # the descriptor was closed when Python started
            setattr(sys, name, Path(os.devnull).open(mode))  # noqa: SIM115


def agent_serves_store(env: Mapping[str, str]) -> bool:
    """Whether the launcher serves the workers' store; otherwise, rank 0 serves it.

    The value is read from a variable of torchrun, TORCH_DISABLE_SHARE_RDZV_TCP_STORE.
    """
    return env.get("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "0") != "1"


def from_env(env: Mapping[str, str] = os.environ) -> WorkerEnv:
    """Read a worker's ranks from its environment; without RANK and WORLD_SIZE, the worker is a single process.

    Raises `WorldError` if the variables are incomplete or contradict each other.
    """
    if RANK not in env and WORLD_SIZE not in env:
        return WorkerEnv(gpus_per_process=_gpus_per_process(env))
    missing = [name for name in (RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT) if not env.get(name)]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise WorldError(
            f"this process has an incomplete launcher environment: {', '.join(missing)} {verb} not set",
            "start the script with `ddpkit launch`, or unset RANK and WORLD_SIZE to run it in a single process",
        )
    rank = _number(env, RANK)
    world_size = _number(env, WORLD_SIZE)
    worker = WorkerEnv(
        rank=rank,
        world_size=world_size,
        local_rank=_number(env, LOCAL_RANK, rank),
        local_world_size=_number(env, LOCAL_WORLD_SIZE, world_size),
        node_rank=_number(env, GROUP_RANK, 0),
        gpus_per_process=_gpus_per_process(env),
    )
    if not 0 <= rank < world_size:
        raise WorldError(
            f"{RANK}={rank} is out of range for {WORLD_SIZE}={world_size}",
            f"{RANK} must be from 0 to {WORLD_SIZE} - 1; start the script with `ddpkit launch`, which sets both",
        )
    return worker


def workers_on_node(env: Mapping[str, str] = os.environ) -> int:
    """The number of workers on this node, as far as the environment tells; 1 without a launcher."""
    return _number_if_any(env, LOCAL_WORLD_SIZE) or 1


def job_start_time() -> float | None:
    """Time at which the launcher first started the job's workers on this node, in seconds since 1970.

    This is the modification time of the first attempt's folder, which restarts do not change. None without a launcher.
    """
    folder = attempt_folder()
    if folder is None:
        return None
    with suppress(OSError):
        return min((attempt.stat().st_mtime for attempt in folder.parent.iterdir() if attempt.is_dir()), default=None)
    return None


def job_end_time() -> float | None:
    """Time at which the scheduler ends this job, in seconds since 1970, or None if unknown."""
    return _number_if_any(os.environ, END_TIME)


def launcher_grace(env: Mapping[str, str]) -> int | None:
    """Seconds that the cluster gives this launcher between SIGTERM and SIGKILL, or None if unknown."""
    return _number_if_any(env, GRACE)


def shutdown_timeout() -> float | None:
    """Seconds that the launcher gives this worker between SIGTERM and SIGKILL, or None if unknown."""
    with suppress(ValueError):
        return float(_attempt_file_content(GRACE_FILE))
    return None


def memory_folder() -> Path | None:
    """The launcher's folder for copies of the state in memory; None: there is none."""
    path = _attempt_file_content(MEMORY_FILE)
    return Path(os.fsdecode(path)) if path else None


def error_file() -> Path | None:
    """The file in which this worker reports a failure to its launcher; None: there is no such file."""
    path = os.environ.get(ERROR_FILE) or os.devnull
    return None if path == os.devnull else Path(path)


def attempt_folder() -> Path | None:
    """The launcher's folder for this attempt on this node, which contains the error files of the node's workers.

    None if there is no launcher, or if the error file of this worker is not in such a folder.
    """
    path = error_file()  # run folder / attempt_0 / local rank / file
    if path is None or not path.parent.parent.name.startswith("attempt_"):
        return None
    return path.parent.parent


def _attempt_file_content(name: str) -> bytes:
    """The content of a file in the folder of this attempt; empty if there is no such file."""
    folder = attempt_folder()
    if folder is not None:
        with suppress(OSError):
            return (folder / name).read_bytes()
    return b""


def job_id(env: Mapping[str, str] = os.environ) -> str:
    """The id of the job; "" without a launcher."""
    return env.get(RUN_ID, "")


def is_restarted() -> bool:
    """Whether the job had other workers before these: workers failed, or a node was lost or joined.

    torchrun counts only restarts after failures, so under torchrun, only these are known.
    """
    return predecessors() > 0


def predecessors() -> int:
    """How often the job had other workers before these; see `is_restarted`."""
    return sum(_number(os.environ, name, 0) for name in (RESTART_COUNT, NODE_CHANGES))


def attempt_id(env: Mapping[str, str] = os.environ) -> str:
    """The name of this attempt in the record of the run; "" if the job has no unique id."""
    job = job_id(env)
    if job in ("", "none"):  # the second is torchrun's default
        return ""
    return f"{job}.{_number(env, RESTART_COUNT, 0)}"


def default_record_folder() -> Path | None:
    """The path for the record of a Trainer without a checkpoint folder; None: the launcher keeps no logs."""
    path = _attempt_file_content(RECORD_DEFAULT)
    return Path(os.fsdecode(path)) if path else None


def note_record_folders(paths: Sequence[Path]) -> None:
    """Tell ddpkit's launcher to which records it adds. Does nothing without that launcher."""
    folder = attempt_folder()
    if folder is not None and (folder / RECORD_NOTE).exists():
        with suppress(OSError):
            (folder / RECORD_NOTE).write_bytes(b"\0".join(map(os.fsencode, paths)))


def noted_record_folders(attempt: Path) -> list[Path]:
    """The existing folders that `note_record_folders` has noted in the folder of an attempt."""
    with suppress(OSError):
        noted = (attempt / RECORD_NOTE).read_bytes().split(b"\0")
        return [path for path in map(Path, map(os.fsdecode, filter(None, noted))) if path.is_dir()]
    return []


def reported_variables(env: Mapping[str, str]) -> dict[str, str]:
    """The variables that change how ddpkit, torch and their libraries behave, sorted by name."""
    return {name: value for name, value in sorted(env.items()) if name.startswith(REPORTED_VARIABLES)}


def process_environment() -> dict[str, str]:
    """A copy of this process's environment."""
    return dict(os.environ)


def rank_for_messages() -> int:
    """The rank of this process, for use in messages; 0 if the variable is not set or not a number."""
    return _number_if_any(os.environ, RANK) or 0


def make_cublas_deterministic() -> None:
    """Set the variable that makes cuBLAS deterministic, unless the user has set it.

    The variable takes effect only if it is set before CUDA is initialised.
    Source: NVIDIA cuBLAS documentation, "Results reproducibility".
    """
    os.environ.setdefault(CUBLAS_WORKSPACE, ":4096:8")


def allocator_defaults(env: Mapping[str, str]) -> dict[str, str]:
    """The environment variable that configures torch's CUDA allocator, with the launcher's value for it.

    It enables expandable segments, which reduce fragmentation. The dict is empty if the user has set the variable,
    under any of its names, or if there is no NVIDIA driver.

    torch reads the variable when it loads its CUDA library. The variable must therefore also be set in the warm server,
    the process that imports torch and forks the workers.
    """
    if not Path("/dev/nvidiactl").exists() or not env.keys().isdisjoint((ALLOCATOR, *ALLOCATOR_OLDER)):
        return {}
    return {ALLOCATOR: "expandable_segments:True"}


def _gpus_per_process(env: Mapping[str, str]) -> int | None:
    if GPUS_PER_PROCESS not in env:
        return None
    gpus = _number(env, GPUS_PER_PROCESS)
    if gpus < 1:
        raise WorldError(
            f"{GPUS_PER_PROCESS}={gpus} is not a valid number of GPUs", "set it to at least 1, or unset it"
        )
    return gpus


def _number(env: Mapping[str, str], name: str, default: int | None = None) -> int:
    number = _number_if_any(env, name)
    if number is None and name not in env:
        number = default
    if number is None:
        problem = f"{name}={env.get(name, '')!r} is not a whole number"
        raise WorldError(problem, "start the script with `ddpkit launch`, which sets it")
    return number


def _number_if_any(env: Mapping[str, str], name: str) -> int | None:
    """The whole number in a variable; None: it is not set, or has another value."""
    text = env.get(name, "")
    return int(text) if text.isdecimal() else None
