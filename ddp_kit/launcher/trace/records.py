"""Results of analysing a profile. Times are in seconds; shares are fractions of the recorded time, `wall`."""

from dataclasses import dataclass


@dataclass(frozen=True)
class CodeLocation:
    """The location of a Python function in the source code.

    `line`: the line on which the function begins, as torch.profiler records it; for a function that was already running
    when recording began, the line being executed. `library`: "ddpkit", "torch" or "" for any other code.
    """

    function: str
    file: str
    line: int
    library: str = ""

    def __str__(self) -> str:
        return f"{self.function} ({self.file}:{self.line})"


@dataclass(frozen=True)
class Operation:
    """One operation and its share of the recorded time.

    On a GPU, `name` is a kernel, `operator` is the operator that launched it, and `seconds` is the kernel's time. On a
    CPU, `name` is a torch operator, and `seconds` is its self time, without the operators that it calls.
    """

    name: str
    operator: str | None
    calls: int
    seconds: float
    share: float


@dataclass(frozen=True)
class GpuTime:
    """Time breakdown of the busiest GPU, from its first to its last kernel.

    `recorded` is the sum of `computing`, `communication_alone`, `copying` (a copy or memset ran, but no kernel) and the
    idle times. `idle_synchronisation`: after the host waited for the GPU; `idle_data`: while the host waited for data;
    `idle_host`: until the host launched the next kernel; `idle_queued`: although the next kernel was already launched.
    """

    recorded: float
    computing: float
    communication: float
    communication_alone: float
    copying: float
    idle_synchronisation: float
    idle_data: float
    idle_host: float
    idle_queued: float

    @property
    def idle(self) -> float:
        """Seconds in which neither a kernel nor a copy ran."""
        return self.idle_synchronisation + self.idle_data + self.idle_host + self.idle_queued

    @property
    def overlapped(self) -> float:
        """Seconds of communication overlapped with computation."""
        return self.communication - self.communication_alone


@dataclass(frozen=True)
class Synchronisation:
    """A place where the host waits for the GPU or, in a run on the CPU, where it would wait if the run used a GPU.

    `operation` is the torch operator, or the CUDA function if there is no operator. `place` is None if no stacks were
    recorded, and in threads that do not run Python.
    """

    operation: str
    place: CodeLocation | None
    calls: int
    per_step: float | None
    seconds: float


@dataclass(frozen=True)
class MatrixProduct:
    """Matrix products or convolutions of one type and shape.

    `kernel`: the slowest kernel; None on a CPU. `problem`: "" if the tensor cores are used at full speed, as far as is
    known; otherwise "float32", "float64", "kernel" (the kernel does not use tensor cores, although they support the
    type) or "alignment". `pad`: for "alignment", the dimensions to change, such as ("N", 50257, 50264).

    Source: NVIDIA, Matrix Multiplication Background User's Guide, "Tensor Core Requirements": from cuBLAS 11 on, tensor
    cores can be used at any size, and are most efficient if M, N and K are multiples of 16 bytes.
    """

    operator: str
    type: str
    shapes: str
    calls: int
    seconds: float
    share: float
    modules: tuple[str, ...]
    kernel: str | None
    problem: str
    pad: tuple[tuple[str, int, int], ...]


@dataclass(frozen=True)
class TraceSummary:
    """Summary of one trace. `steps`: the first and the last optimizer step in the trace, or None if not known.

    `device`: "gpu" if the trace contains GPU events, otherwise "cpu". `waited_for_data`: seconds in which the main
    thread waited for data. `outside`: seconds in which it neither waited for data nor ran a torch operator.
    """

    rank: int | None
    steps: tuple[int, int] | None
    device: str
    device_name: str | None
    wall: float
    operations: tuple[Operation, ...]
    gpu: GpuTime | None
    waited_for_data: float
    outside: float
    synchronisations: tuple[Synchronisation, ...]
    products: tuple[MatrixProduct, ...]
    with_stacks: bool
