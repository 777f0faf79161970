"""Data for the checks of `ddpkit doctor`: state of the NVIDIA driver, results of probe processes, process limits."""

import ctypes
import json
import os
import resource
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from subprocess import DEVNULL, STDOUT, Popen, TimeoutExpired
from typing import IO, Any

import pynvml

from ddp_kit.devices import gpus as devices
from ddp_kit.devices.cpus import usable_cpus
from ddp_kit.devices.gpus import Gpu, query
from ddp_kit.env import VISIBLE_GPUS
from ddp_kit.launcher.processes import die_with_parent
from ddp_kit.launcher.warm.kept_client import kept_processes_text

# --- NVIDIA driver ----------------------------------------------------------------------------------------------------
# The driver's state, as NVML reports it. A broken driver is a result, not an exception.

Version = tuple[int, int]

_NO_ANSWER = (pynvml.NVMLError, pynvml.NVMLLibraryMismatchError)  # the second error: the driver is too old


@dataclass(frozen=True)
class Card:
    """A GPU with the additional properties that the checks need."""

    gpu: Gpu
    ecc_errors: int | None = None
    """Uncorrected memory errors since the GPU's last reset; None: the GPU does not count errors."""
    capability: Version | None = None
    """The GPU's compute capability, such as (9, 0)."""
    processes: tuple[int, ...] = ()
    """The ids of the processes that use the GPU, except processes in other containers."""


@dataclass(frozen=True)
class Driver:
    """State of the NVIDIA driver, and the GPUs that it reports."""

    error: str = ""
    """Why NVML, the driver's query library, does not work; empty if it works."""
    absent: bool = False
    """Whether the driver is missing or not loaded."""
    version: str = "unknown"
    cuda: Version | None = None
    """The newest CUDA version that the driver supports."""
    cards: tuple[Card, ...] = ()

    def visible(self, env: Mapping[str, str]) -> tuple[Gpu, ...]:
        """The GPUs that a process with this environment would see."""
        return tuple(gpu for _, gpu in devices.visible(tuple(card.gpu for card in self.cards), env))


def detect() -> Driver:
    """Query NVML for everything that the checks need."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        absent = error.value in (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
        return Driver(error=str(error), absent=absent)
    try:
        for index in range(pynvml.nvmlDeviceGetCount()):
            pynvml.nvmlDeviceGetHandleByIndex(index)  # raises if a GPU has fallen off the bus
        cuda = query(pynvml.nvmlSystemGetCudaDriverVersion) or 0
        return Driver(
            version=str(query(pynvml.nvmlSystemGetDriverVersion) or "unknown"),
            cuda=(cuda // 1000, cuda % 1000 // 10) if cuda else None,
            cards=tuple(_card(gpu) for gpu in devices.gpus()),
        )
    except _NO_ANSWER as error:
        return Driver(error=str(error))
    finally:
        query(pynvml.nvmlShutdown)


def _card(gpu: Gpu) -> Card:
    handle = pynvml.nvmlDeviceGetHandleByIndex(gpu.index)
    errors = (pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC)  # since the last reset
    processes = query(pynvml.nvmlDeviceGetComputeRunningProcesses, handle) or ()
    return Card(
        gpu,
        ecc_errors=query(pynvml.nvmlDeviceGetTotalEccErrors, handle, *errors),
        capability=query(pynvml.nvmlDeviceGetCudaComputeCapability, handle),
        processes=tuple(process.pid for process in processes if process.pid > 0),
    )


# --- Probes -----------------------------------------------------------------------------------------------------------
# probe.py runs in separate processes, because torch may be broken, and resolving a host name may take long.


_LOOPBACK = "127.0.0.1"
_PROBE = Path(__file__).with_name("probe.py")


@dataclass(frozen=True)
class ProbeResult:
    """The result of a probe, which is a test in a separate process."""

    facts: Mapping[str, Any] = field(default_factory=dict)
    error: str = ""
    """Why the probe failed: the last output line of the process that failed first."""
    ran_out_of_time: bool = False
    """Whether the probe did not end within its time limit. It is then unknown whether it would have failed."""


Probe = Callable[[], ProbeResult]
"""A function that waits for a probe and returns its result."""


@dataclass(frozen=True)
class Probes:
    """All probes. They run concurrently, because most of them import torch, which takes seconds."""

    host: Probe
    torch: Probe
    gloo: Probe
    nccl: Probe | None
    """The all-reduce between two GPUs; None if there are fewer than two GPUs, not counting MIG devices."""
    products: Mapping[str, Probe]
    """The probes that compute a matrix product, by GPU UUID."""


@contextmanager
def started(env: Mapping[str, str], host: str, gpus: Sequence[Gpu], limit_seconds: float = 60) -> Iterator[Probes]:
    """Context manager that starts all probes, and on exit kills the probes that are still running."""
    with ExitStack() as stack:

        def start(*commands: Sequence[str], env: Mapping[str, str] = env, inherited: Sequence[int] = ()) -> Probe:
            # The output goes to files, because a full pipe would block the process.
            outputs = [stack.enter_context(tempfile.TemporaryFile()) for _ in commands]
            probe = _RunningProbe(commands, env, inherited, outputs, limit_seconds)
            stack.callback(probe.end)
            return probe.result

        def reduce(backend: str, env: Mapping[str, str] = env) -> Probe:
            try:
                listening = socket.create_server((_LOOPBACK, 0))
            except OSError as error:
                return partial(ProbeResult, error=f"cannot listen on {_LOOPBACK}: {error}")
            with listening:
                store = listening.fileno()
                port = str(listening.getsockname()[1])
                ranks = [("reduce", backend, rank, port, str(store)) for rank in ("0", "1")]
                return start(*ranks, env=env, inherited=[store])

        whole = [gpu.uuid for gpu in gpus if not gpu.is_mig]  # NCCL needs one GPU per process
        nccl = None
        if len(whole) > 1:
            nccl = reduce("nccl", {**env, VISIBLE_GPUS: ",".join(whole[:2])})
        yield Probes(
            host=start(("host", host)),
            torch=start(("facts",)),
            gloo=reduce("gloo"),
            nccl=nccl,
            products={gpu.uuid: start(("product",), env={**env, VISIBLE_GPUS: gpu.uuid}) for gpu in gpus},
        )


def torch_facts(env: Mapping[str, str], limit_seconds: float = 60) -> ProbeResult:
    """Run only the probe for torch's version and build options; see `facts` in probe.py."""
    with tempfile.TemporaryFile() as output:
        probe = _RunningProbe([("facts",)], env, (), [output], limit_seconds)
        try:
            return probe.result()
        finally:
            probe.end()


class _RunningProbe:
    """The processes of one probe."""

    def __init__(
        self,
        commands: Sequence[Sequence[str]],
        env: Mapping[str, str],
        inherited: Sequence[int],
        outputs: Sequence[IO[bytes]],
        limit_seconds: float,
    ) -> None:
        self._limit = limit_seconds
        self._start = time.monotonic()
        self._outputs = outputs
        self._processes: list[Popen[bytes]] = []
        self._result: ProbeResult | None = None
        try:
            for arguments, output in zip(commands, outputs, strict=True):
                process = Popen(
                    [sys.executable, "-P", str(_PROBE), *arguments],
                    env=env,
                    pass_fds=inherited,
                    stdin=DEVNULL,
                    stdout=output,
                    stderr=STDOUT,
                    preexec_fn=partial(die_with_parent, os.getpid()) if sys.platform == "linux" else None,
                )
                self._processes.append(process)
        except OSError as error:  # for example too many processes, or too little memory
            self._result = ProbeResult(error=f"cannot start a process: {error}")

    def result(self) -> ProbeResult:
        """Return the result as soon as all processes have ended or one has failed, or after the time limit."""
        while self._result is None:
            codes = [process.poll() for process in self._processes]
            failed = next((place for place, code in enumerate(codes) if code), None)
            if failed is not None:
                self._result = ProbeResult(error=self._reason(failed))
            elif None not in codes:
                self._result = ProbeResult(facts=json.loads(self._output_lines(0)[-1]))
            elif time.monotonic() - self._start > self._limit:
                self._result = ProbeResult(error=f"no answer within {self._limit:g} s", ran_out_of_time=True)
            else:
                time.sleep(0.02)  # there is no portable way to wait for any of several processes
        return self._result

    def end(self) -> None:
        """Kill the processes that are still running."""
        for process in self._processes:
            process.kill()
            with suppress(TimeoutExpired):  # SIGKILL does not end a process that hangs in a driver call
                process.wait(timeout=1)

    def _reason(self, place: int) -> str:
        code = self._processes[place].returncode
        if code < 0:
            return f"killed by {signal.strsignal(-code) or f'signal {-code}'}"
        return (self._output_lines(place) or [f"exit code {code}"])[-1]

    def _output_lines(self, place: int) -> list[str]:
        self._outputs[place].seek(0)
        return [line for line in self._outputs[place].read().decode(errors="replace").splitlines() if line.strip()]


# --- Machine ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Machine:
    """Everything that the checks know about a machine, which may be a fake one in tests."""

    env: Mapping[str, str]
    checkpoints: Path | None
    """The folder for checkpoints; None: they are in object storage."""
    driver: Driver
    probes: Probes
    host: str
    python: tuple[int, ...]
    cores: int
    usable_cores: int
    """The cores that this process may run on."""
    open_files: tuple[int, int]
    """The soft and hard limits on open files; negative: no limit."""
    locked_memory: tuple[int, int]
    """The soft and hard limits on locked memory in bytes; negative: no limit."""
    clock_synchronised: bool | None
    """Whether the clock is synchronised, or None if not known."""
    space: Callable[[Path], tuple[int, int]]
    """A function that returns the total and the free bytes of a folder's file system."""
    kept_processes: str = ""
    """How many processes are kept for the next launches, as text; empty if none is."""
    root: Path = Path("/")
    """The folder that contains `proc`, `sys` and `dev`."""

    @staticmethod
    def current(env: Mapping[str, str], checkpoints: Path | None, driver: Driver, probes: Probes) -> "Machine":
        """Collect the data about the machine that this process runs on."""
        return Machine(
            env=env,
            checkpoints=checkpoints,
            driver=driver,
            probes=probes,
            host=socket.gethostname(),
            python=sys.version_info[:3],
            cores=os.cpu_count() or 1,
            usable_cores=len(usable_cpus()),
            open_files=resource.getrlimit(resource.RLIMIT_NOFILE),
            locked_memory=resource.getrlimit(resource.RLIMIT_MEMLOCK),
            clock_synchronised=_clock_synchronised(),
            space=_space,
            kept_processes=kept_processes_text(),
        )


def _space(folder: Path) -> tuple[int, int]:
    usage = shutil.disk_usage(folder)
    return usage.total, usage.free


def _clock_synchronised() -> bool | None:
    """Whether any time service keeps the kernel's clock synchronised, or None if not known. Source: adjtimex(2)."""
    timex = ctypes.create_string_buffer(512)  # all zero: change nothing
    with suppress(AttributeError):
        state = ctypes.CDLL(None).adjtimex(timex)
        unsynchronised = 5  # TIME_ERROR
        return None if state < 0 else state != unsynchronised
    return None
