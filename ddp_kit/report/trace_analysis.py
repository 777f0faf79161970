"""Analyse a trace that `TrainerConfig(profile=...)` made: where the steps spent their time, and what to do about it.

`read_trace` returns a `TraceSummary`; `lines` turns the summary into findings, one line of text each.
Times are in seconds; shares are fractions of the recorded time, `wall`.
"""

import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from ddp_kit.report.trace_recording import (
    CodeLocation,
    Event,
    Recording,
    Spans,
    TraceFile,
    common,
    gaps,
    load,
    merged,
    recording_of,
    total,
)

# --- Host-device synchronisations -------------------------------------------------------------------------------------
# Places where the host waits for the GPU or, in a run on the CPU, where it would wait if the run used a GPU.

# CUDA and HIP functions that return when the GPU is done. Source: CUDA Runtime API, "API synchronization behavior".
# torch calls one of the first three after each blocking copy.
_WAITS = re.compile(r"(cuda|hip)(Stream|Device|Event)Synchronize$|cuCtxSynchronize$|cudaMemcpy$|hipMemcpyWithStream$")
_OPERATORS = {"aten::item", "aten::_local_scalar_dense", "aten::nonzero"}


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


def synchronisations(recording: Recording, steps: int | None) -> tuple[Synchronisation, ...]:
    """Host-device synchronisations, grouped by operator and code location, most frequent first.

    In a trace without a GPU, these are the operators that would wait if the run used a GPU.
    """
    spent: dict[tuple[str, CodeLocation | None], dict[int, float]] = defaultdict(lambda: defaultdict(float))
    for index, event in waits_of_the_host(recording) if recording.gpu else _would_wait(recording):
        inner = recording.calls.operator[index] if recording.gpu else index
        # An operator that copies and then waits counts as one synchronisation.
        once = inner if inner >= 0 else index
        spent[_name(recording, index), recording.calls.place(index)][once] += event.end - event.start
    results = [
        Synchronisation(name, place, len(times), len(times) / steps if steps else None, sum(times.values()))
        for (name, place), times in spent.items()
    ]
    return tuple(sorted(results, key=lambda one: (-one.calls, -one.seconds)))


def waits_of_the_host(recording: Recording) -> Iterator[tuple[int, Event]]:
    """Yield the index and the event of each CUDA call that waits for the GPU, except calls by the profiler."""
    for index, event in recording.host("cuda_runtime", "cuda_driver"):
        if _WAITS.match(event.name) and not recording.profiles(index):
            yield index, event


def _would_wait(recording: Recording) -> Iterator[tuple[int, Event]]:
    calls = recording.calls
    for index, event in recording.host("cpu_op"):
        if event.name not in _OPERATORS or any(
            calls.events[outer].name in _OPERATORS for outer in calls.operators(index)
        ):
            continue
        if not recording.loads_data(index) and not _counts_steps(recording, index):
            yield index, event


def _counts_steps(recording: Recording, index: int) -> bool:
    """Whether this call reads an optimizer's step count. That tensor is on the CPU even if the model is on a GPU."""
    place = recording.calls.place(index)
    for outer in recording.calls.callers(index):
        event = recording.calls.events[outer]
        if event.name.startswith("Optimizer.step#"):
            return True
        if place is not None and event.name == f"{place.file}({place.line}): {place.function}":
            return False
    return False


def _name(recording: Recording, index: int) -> str:
    """The name of the outermost `aten::` operator that contains a call or, without one, the name of the call."""
    name = recording.calls.events[index].name
    names = [recording.calls.events[outer].name for outer in recording.calls.operators(index)]
    return [name, *(name for name in names if name.startswith("aten::"))][-1]


# --- GPU time ---------------------------------------------------------------------------------------------------------
# The time that a GPU spends on computing, communicating and copying, and its idle time by cause.


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


def gpu_time(recording: Recording) -> GpuTime | None:
    """Time breakdown of the busiest GPU in the trace; None if the trace contains no kernels."""
    device = _busiest_device(recording.gpu)
    kernels = [event for event in recording.gpu if event.kind == "kernel" and event.thread[0] == device]
    if not kernels:
        return None
    copies = [event for event in recording.gpu if event.kind != "kernel" and event.thread[0] == device]
    start, end = min(event.start for event in kernels), max(event.end for event in kernels)
    communication = _spans(event for event in kernels if is_communication(event))
    computing = _spans(event for event in kernels if not is_communication(event))
    without_kernel = gaps(merged(computing + communication), start, end)
    copying = common(without_kernel, _spans(copies))
    idle = gaps(merged(computing + communication + copying), start, end)
    causes = _causes(recording, idle, sorted(kernels + copies, key=lambda event: event.start))
    return GpuTime(
        recorded=end - start,
        computing=total(computing),
        communication=total(communication),
        communication_alone=total(communication) - total(common(communication, computing)),
        copying=total(copying),
        idle_synchronisation=causes["synchronisation"],
        idle_data=causes["data"],
        idle_host=causes["host"],
        idle_queued=causes["queued"],
    )


def is_communication(kernel: Event) -> bool:
    """Whether a kernel belongs to NCCL or RCCL, which use the same kernel names."""
    return "nccl" in kernel.name.lower()


def _busiest_device(events: Iterable[Event]) -> object:
    spent: dict[object, float] = defaultdict(float)
    for event in events:
        if event.kind == "kernel":
            spent[event.thread[0]] += event.end - event.start
    return max(spent, key=spent.__getitem__, default=None)


def _spans(events: Iterable[Event]) -> Spans:
    return merged((event.start, event.end) for event in events)


def _causes(recording: Recording, idle: Spans, work: list[Event]) -> dict[str, float]:
    """Seconds of idle time by cause.

    If a GPU runs out of work while the host waits for it, the GPU stays idle until the host launches the next kernel,
    usually after the wait. All of this idle time is attributed to the wait.
    """
    causes: dict[str, float] = defaultdict(float)
    data = recording.waits_for_data()
    waits = merged((event.start, event.end) for _, event in waits_of_the_host(recording))
    starts = [event.start for event in work]
    for start, end in idle:
        in_data = total(common([(start, end)], data))
        causes["data"] += in_data
        following = work[bisect_right(starts, start)] if starts[-1] > start else work[-1]
        causes[_cause(recording, start, following, waits)] += end - start - in_data
    return causes


def _cause(recording: Recording, start: float, following: Event, waits: Spans) -> str:
    waiting = bisect_right(waits, (start, float("inf"))) - 1
    if waiting >= 0 and waits[waiting][1] >= start:
        return "synchronisation"
    launch = recording.launch(following)
    launched_in_time = launch >= 0 and recording.calls.events[launch].end <= start
    return "queued" if launched_in_time else "host"


# --- Matrix products and convolutions ---------------------------------------------------------------------------------
# Find operations that do not use the tensor cores, or do not use them at full speed.
# Source: NVIDIA, Matrix Multiplication Background User's Guide, "Tensor Core Requirements": from cuBLAS 11 on, tensor
# cores can be used at any size, and are most efficient if M, N and K are multiples of 16 bytes. This module applies the
# same rule to the channels of a convolution and to the head dimension of attention. float32 uses tensor cores only as
# TF32; float64 uses them on few GPUs, many times slower than 16-bit types.


ALIGNED_BYTES = 16
_TYPES = {
    "float": ("float32", 4),
    "double": ("float64", 8),
    "c10::Half": ("float16", 2),
    "c10::BFloat16": ("bfloat16", 2),
}
_FIRST_MATRIX = {
    "aten::mm": 0,
    "aten::bmm": 0,
    "aten::_scaled_mm": 0,
    "aten::addmm": 1,
    "aten::_addmm_activation": 1,
    "aten::baddbmm": 1,
    "aten::addbmm": 1,
}
_ATTENTION = re.compile(r"aten::(scaled_dot_product_attention|_scaled_dot_product_\w+_backward)$")
# Kernel names of cuBLAS, cuDNN and CUTLASS: `ampere_sgemm_128x64_tn` does not use tensor cores;
# `cutlass_80_tensorop_s1688gemm_64x64`, `ampere_bf16_s16816gemm`, `sm90_xmma_gemm` and `nvjet_hsh_128x64` do.
_WITHOUT_TENSOR_CORES = re.compile(r"(?<![a-z0-9])[sd]gemm|simt|gemv|scudnn")
_WITH_TENSOR_CORES = re.compile(r"tensorop|\d884|1688|16816|xmma|wgmma|gmma|hmma|nvjet|flash|fmha|cutlass3x", re.I)

Shape = tuple[str, tuple[tuple[str, int], ...]]


@dataclass(frozen=True)
class _Key:
    operator: str
    type: str
    bytes: int
    shapes: str
    sizes: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class MatrixProduct:
    """Matrix products or convolutions of one type and shape.

    `kernel`: the slowest kernel; None on a CPU. `problem`: "" if the tensor cores are used at full speed, as far as is
    known; otherwise "float32", "float64", "kernel" (the kernel does not use tensor cores, although they support the
    type) or "alignment". `pad`: for "alignment", the dimensions to change, such as ("N", 50257, 50264).
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


def matrix_products(recording: Recording, *, tf32: bool | None) -> tuple[MatrixProduct, ...]:
    """Matrix products and convolutions by operator, type and shape, sorted by total time, longest first.

    `tf32`: whether float32 may use tensor cores, or None if not known.
    """
    kernels = _kernels(recording)
    groups: dict[_Key, list[int]] = defaultdict(list)
    innermost = {index: key for index, event in recording.host("cpu_op") if (key := _key(event)) is not None}
    for outer in {outer for index in innermost for outer in recording.calls.operators(index)} & innermost.keys():
        del innermost[outer]
    for index, key in innermost.items():
        groups[key].append(index)
    products = [_product(recording, key, indices, kernels, tf32) for key, indices in groups.items()]
    return tuple(sorted(products, key=lambda product: -product.seconds))


def _kernels(recording: Recording) -> dict[int, list[Event]]:
    """Map operator indices to the kernels that the operator launched, itself or through operators that it called."""
    kernels = defaultdict(list)
    for event in recording.gpu:
        launch = recording.launch(event)
        if event.kind == "kernel" and launch >= 0:
            for operator in recording.calls.operators(launch):
                kernels[operator].append(event)
    return kernels


def _product(
    recording: Recording, key: _Key, indices: list[int], kernels: dict[int, list[Event]], tf32: bool | None
) -> MatrixProduct:
    events = [kernel for index in indices for kernel in kernels.get(index, ())]
    timed = events if recording.gpu else [recording.calls.events[index] for index in indices]
    seconds = sum(event.end - event.start for event in timed)
    slowest = max(events, key=_tells_and_seconds).name if events else None
    problem, pad = _problem(key, slowest, tf32)
    modules = Counter(module for index in indices if (module := recording.calls.module(index)) is not None)
    wall = recording.end - recording.start
    return MatrixProduct(
        operator=key.operator,
        type=key.type,
        shapes=key.shapes,
        calls=len(indices),
        seconds=seconds,
        share=seconds / wall if wall else 0.0,
        modules=tuple(modules),
        kernel=slowest,
        problem=problem,
        pad=pad,
    )


def _problem(key: _Key, kernel: str | None, tf32: bool | None) -> tuple[str, tuple[tuple[str, int, int], ...]]:
    uses = _uses_tensor_cores(kernel)
    if key.type == "float64":
        return "float64", ()
    if key.type == "float32" and (uses is False or (uses is None and tf32 is False)):
        return "float32", ()
    multiple = max(ALIGNED_BYTES // key.bytes, 1)
    pad = tuple(
        (name, size, -(-size // multiple) * multiple) for name, size in key.sizes if size > 1 and size % multiple
    )
    if pad:
        return "alignment", pad
    return ("kernel" if uses is False else ""), ()


def _tells_and_seconds(kernel: Event) -> tuple[bool, float]:
    """Sort key that prefers kernels whose name shows whether they use tensor cores.

    A matrix product may also launch a copy kernel, which may take longer than the matrix product.
    """
    return _uses_tensor_cores(kernel.name) is not None, kernel.end - kernel.start


def _uses_tensor_cores(kernel: str | None) -> bool | None:
    """Whether a kernel uses tensor cores, judged by its name, or None if not known."""
    if kernel is None:
        return None
    if _WITH_TENSOR_CORES.search(kernel):
        return True
    return False if _WITHOUT_TENSOR_CORES.search(kernel) else None


def _key(event: Event) -> _Key | None:
    shapes, types = event.args.get("Input Dims"), event.args.get("Input type")
    if not isinstance(shapes, list) or not isinstance(types, list):
        return None
    try:
        shape = _shape(event.name, shapes)
        kind = _type(types[_FIRST_MATRIX.get(event.name, 0)])
    except (IndexError, TypeError, ValueError):  # an operator with the same name but other arguments
        return None
    return _Key(event.name, *kind, *shape) if shape is not None and kind is not None else None


def _type(name: str) -> tuple[str, int] | None:
    if name.startswith("c10::Float8"):
        return name.removeprefix("c10::").lower(), 1
    return _TYPES.get(name)


def _shape(operator: str, shapes: list[Any]) -> Shape | None:
    """The shapes of an operator's inputs as text, and the dimensions that matter to tensor cores, by name."""
    if operator in _FIRST_MATRIX:
        first = _FIRST_MATRIX[operator]
        (*batch, m, k), (*_, n) = shapes[first], shapes[first + 1]
        many = f"{prod(batch)} x " if batch else ""
        return f"{many}({m} x {k}) @ ({k} x {n})", (("M", m), ("N", n), ("K", k))
    if operator == "aten::linear":
        (*rows, k), (n, _) = shapes[0], shapes[1]
        return f"({prod(rows)} x {k}) @ ({k} x {n})", (("M", prod(rows)), ("N", n), ("K", k))
    if _ATTENTION.match(operator):
        query = shapes[0]
        return f"heads of {query[-1]}, {' x '.join(map(str, query))}", (("head dimension", query[-1]),)
    if operator in ("aten::convolution", "aten::convolution_backward"):
        return _convolution(shapes[1] if operator == "aten::convolution" else shapes[2])
    return None


def _convolution(weight: list[int]) -> Shape:
    """The shape of a convolution as text, and the numbers of channels.

    Numbers up to 4 are omitted, because special kernels exist for convolutions with few channels.
    """
    outputs, inputs, *window = weight
    sizes = (("input channels", inputs), ("output channels", outputs))
    size = "x".join(map(str, window))
    return f"{inputs} to {outputs} channels, {size}", tuple(pair for pair in sizes if pair[1] > 4)


# --- Most expensive operations ----------------------------------------------------------------------------------------


MOST = 10


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


def operations(recording: Recording) -> tuple[Operation, ...]:
    """The most expensive operations: kernels and copies on a GPU, or operators by self time on a CPU."""
    spent = _on_gpu(recording) if recording.gpu else _on_cpu(recording)
    wall = recording.end - recording.start
    results = [
        Operation(name, operator, len(times), sum(times), sum(times) / wall if wall else 0.0)
        for (name, operator), times in spent.items()
    ]
    return tuple(sorted(results, key=lambda operation: -operation.seconds)[:MOST])


def _on_gpu(recording: Recording) -> dict[tuple[str, str | None], list[float]]:
    spent: dict[tuple[str, str | None], list[float]] = defaultdict(list)
    by_id = {
        event.args["External id"]: event.name for _, event in recording.host("cpu_op") if "External id" in event.args
    }
    for event in recording.gpu:
        spent[event.name, _operator(recording, event, by_id)].append(event.end - event.start)
    return spent


def _operator(recording: Recording, event: Event, by_id: dict[object, str]) -> str | None:
    launch = recording.launch(event)
    if launch >= 0:
        operator = recording.calls.operator[launch]
        if operator >= 0:
            return recording.calls.events[operator].name
    if event.args.get("External id") in by_id:
        return by_id[event.args["External id"]]
    return recording.calls.events[launch].name if launch >= 0 else None


def _on_cpu(recording: Recording) -> dict[tuple[str, str | None], list[float]]:
    self_times = {index: event.end - event.start for index, event in recording.host("cpu_op")}
    for index, event in recording.host("cpu_op"):
        outer = recording.calls.operator[index]
        if outer in self_times:
            self_times[outer] -= event.end - event.start
    spent: dict[tuple[str, str | None], list[float]] = defaultdict(list)
    for index, seconds in self_times.items():
        spent[recording.calls.events[index].name, None].append(max(seconds, 0.0))
    return spent


# --- Findings ---------------------------------------------------------------------------------------------------------
# Each finding is one line of text that says what to do; the most important finding comes first.


# Shares of the time below which there is little to gain.
_IDLE, _ALONE, _PRODUCTS, _DATA, _OUTSIDE, _LARGE = 0.05, 0.05, 0.01, 0.10, 0.30, 0.10
_MOST_EACH = 3

Finding = tuple[float, str]
"""The weight of a finding (usually a share of the recorded time), and the text of the finding."""


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


def lines(summary: TraceSummary) -> list[str]:
    """The findings, one line of text each, most important first; empty if there is nothing to report."""
    findings: list[Finding] = []
    for part in (_gpu, _synchronisations, _products, _host, _operations):
        findings.extend(part(summary))
    return [line for _, line in sorted(findings, key=lambda finding: -finding[0])]


def _gpu(summary: TraceSummary) -> Iterator[Finding]:
    gpu = summary.gpu
    if gpu is None or not gpu.recorded:
        return
    alone = gpu.communication_alone / gpu.recorded
    if alone > _ALONE:
        hidden = gpu.overlapped / gpu.communication
        yield (
            alone,
            f"{alone:.0%} of the GPU's time was exposed communication ({hidden:.0%} of communication overlapped "
            'with compute): use a larger micro-batch, accumulation_steps or parallel={"compression": "bf16"}',
        )
    for field, (what, remedy) in _CAUSES.items():
        share = getattr(gpu, field) / gpu.recorded
        if share > _IDLE:
            yield share, f"{what.format(f'{share:.0%}')}: {remedy}"


_CAUSES = {  # by field of GpuTime
    "idle_synchronisation": (
        "the GPU was idle {} of the time after a host-device synchronisation",
        "remove the synchronisations named here",
    ),
    "idle_data": (
        "the GPU was idle {} of the time, waiting for the DataLoader",
        "raise data.num_workers or use data.device_transform",
    ),
    "idle_host": (
        "the GPU was idle {} of the time, waiting for the host to launch the next kernel",
        'use compile="model" or a larger micro-batch',
    ),
    "idle_queued": (
        "the GPU was idle {} of the time between kernels that were already queued",
        'the kernels are short or wait for another stream; compile="model" fuses small kernels',
    ),
    "copying": (
        "the GPU spent {} of the time only copying data",
        "create tensors on the device; copy from pinned memory with non_blocking=True",
    ),
}


def _synchronisations(summary: TraceSummary) -> Iterator[Finding]:
    """Findings about synchronisations outside of ddpkit's own code.

    On a GPU, each finding has a weight of at least 0.05 for sorting, because the GPU is also idle after the wait.
    """
    theirs = [one for one in summary.synchronisations if not (one.place and one.place.library == "ddpkit")]
    for one in theirs[:_MOST_EACH]:
        weight = 1.0 if summary.device == "cpu" else max(one.seconds / summary.wall, 0.05)
        yield weight, _synchronisation(one, summary)


def _synchronisation(one: Synchronisation, summary: TraceSummary) -> str:
    often = f"{one.per_step:g} per step" if one.per_step is not None else f"{one.calls} in this trace"
    where = f" in {one.place}" if one.place is not None else ""
    waits = f"{one.seconds:.3g} s in total" if summary.device == "gpu" else "would wait for a GPU"
    remedy = "keep the value on the device; trainer.log takes tensors, and reads them at log points"
    if one.place is None and not summary.with_stacks:
        remedy = "this trace contains no Python functions: record one with TrainerConfig(profile=...) to see the place"
    return f"host-device synchronisation: {one.operation}{where}, {often}, {waits}: {remedy}"


def _products(summary: TraceSummary) -> Iterator[Finding]:
    on = "" if summary.device == "gpu" else "on a GPU, "
    for problem, (what, remedy) in _PROBLEMS.items():
        products = [one for one in summary.products if one.problem == problem and one.share > _PRODUCTS]
        if problem == "alignment":
            # The forward and the backward product of a module are one finding.
            by_modules = {frozenset(one.modules) or one.shapes: one for one in reversed(products)}
            for one in sorted(by_modules.values(), key=lambda one: -one.share)[:_MOST_EACH]:
                padding = ", ".join(f"{name} from {size} to {padded}" for name, size, padded in one.pad)
                yield one.share, f"{on}{_named(one)} {what}: pad {padding}"
        elif products:
            share = sum(one.share for one in products)
            which = _named(products[0]) + (f" and {len(products) - 1} more" if len(products) > 1 else "")
            yield share, f"{on}{which} {what} ({share:.0%} of the time): {remedy}"


_PROBLEMS = {
    "float32": ("cannot use the tensor cores in float32", 'use precision="bf16" or "tf32"'),
    "float64": ("cannot use the tensor cores in float64, or only slowly", "use float32 or a smaller type"),
    "kernel": ("ran without tensor cores", "check which kernel ran: matrices with few rows have no tensor-core kernel"),
    "alignment": (
        "cannot use the tensor cores at full speed, because not all dimensions are multiples of 16 bytes",
        "",
    ),
}


def _named(product: MatrixProduct) -> str:
    modules = f" of {', '.join(product.modules[:3])}" if product.modules else ""
    more = f" and {len(product.modules) - 3} more" if len(product.modules) > 3 else ""
    return f"{product.operator} {product.type} {product.shapes}{modules}{more}"


def _host(summary: TraceSummary) -> Iterator[Finding]:
    """Findings about the host, only for CPU traces: in a GPU trace, the GPU's idle time shows the same problems."""
    if summary.device == "gpu" or not summary.wall:
        return
    data, outside = summary.waited_for_data / summary.wall, summary.outside / summary.wall
    if data > _DATA:
        yield data, f"{data:.0%} of the time went to waiting for data: raise data.num_workers"
    if outside > _OUTSIDE:
        yield (
            outside / 2,  # the profiler slows Python down
            f"{outside:.0%} of the time was spent in Python, outside of torch's operators: use a larger micro-batch "
            'or compile="model"',
        )


def _operations(summary: TraceSummary) -> Iterator[Finding]:
    if summary.operations and summary.operations[0].share > _LARGE:
        first = summary.operations[0]
        by = f" (by {first.operator})" if first.operator else ""
        name = first.name if len(first.name) <= 80 else f"{first.name[:77]}..."
        yield 0.0, f"{first.share:.0%} of the time went to {name}{by}, {first.calls} calls: optimize this first"


# --- Reading a trace --------------------------------------------------------------------------------------------------


__all__ = ["lines", "read_trace"]

_FILE = re.compile(r"rank(\d+)_steps(\d+)-(\d+)\.json")


def read_trace(path: Path) -> TraceSummary:
    """Summarise one torch.profiler trace, such as a file in `profile.dir`.

    Raises `UsageError` if the file cannot be read, is cut off, or is not a trace of torch.profiler.
    """
    trace = load(path)
    recording = recording_of(trace)
    rank, steps = _rank_and_steps(trace, recording)
    count = steps[1] - steps[0] + 1 if steps else None
    precision = trace.facts.get("float32_matmul_precision")
    tf32 = precision in ("high", "medium") if precision is not None else None
    waits = recording.waits_for_data()
    busy = merged(recording.in_operators() + waits)
    return TraceSummary(
        rank=rank,
        steps=steps,
        device="gpu" if recording.gpu else "cpu",
        device_name=_device_name(trace) if recording.gpu else None,
        wall=recording.end - recording.start,
        operations=operations(recording),
        gpu=gpu_time(recording),
        waited_for_data=total(waits),
        outside=total(gaps(busy, recording.start, recording.end)),
        synchronisations=synchronisations(recording, count),
        products=matrix_products(recording, tf32=tf32),
        with_stacks=any(event.kind == "python_function" for event in trace.events),
    )


def _rank_and_steps(trace: TraceFile, recording: Recording) -> tuple[int | None, tuple[int, int] | None]:
    """Rank and steps from the trace. If the trace does not contain them, they are read from the file name."""
    named = _FILE.match(trace.path.name)
    world = trace.facts.get("distributedInfo")
    rank = world.get("rank") if isinstance(world, dict) else None
    if not isinstance(rank, int):
        rank = int(named[1]) if named else None
    steps = recording.steps or ((int(named[2]), int(named[3])) if named else None)
    return rank, steps


def _device_name(trace: TraceFile) -> str | None:
    devices = trace.facts.get("deviceProperties")
    first = devices[0] if isinstance(devices, list) and devices else None
    return str(first["name"]) if isinstance(first, dict) and "name" in first else None
