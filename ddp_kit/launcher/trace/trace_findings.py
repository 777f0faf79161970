"""The findings of a trace in words: one line each, with what to do, the most important first."""

from collections.abc import Iterator

from ddp_kit.launcher.trace.trace_records import MatrixProduct, Synchronisation, TraceSummary

# Below these shares of the time there is little to gain.
_IDLE, _ALONE, _PRODUCTS, _DATA, _OUTSIDE, _LARGE = 0.05, 0.05, 0.01, 0.10, 0.30, 0.10
_MOST_EACH = 3

Finding = tuple[float, str]
"""A weight, mostly a share of the recorded time, and the line."""


def lines(summary: TraceSummary) -> list[str]:
    """What stands out, one line each, the most important first; empty if nothing does."""
    found: list[Finding] = []
    for part in (_gpu, _synchronisations, _products, _host, _operations):
        found.extend(part(summary))
    return [line for _, line in sorted(found, key=lambda finding: -finding[0])]


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
        'they are short, or wait for another stream: compile="model" fuses small kernels',
    ),
    "copying": (
        "the GPU did nothing but copy {} of the time",
        "create tensors on the device; copy from pinned memory with non_blocking=True",
    ),
}


def _synchronisations(summary: TraceSummary) -> Iterator[Finding]:
    """Each counts more than its seconds: behind it, the GPU has nothing to do. The user's before ddpkit's own."""
    theirs = [one for one in summary.synchronisations if not (one.place and one.place.library == "ddpkit")]
    for one in theirs[:_MOST_EACH]:
        weight = 1.0 if summary.device == "cpu" else max(one.seconds / summary.wall, 0.05)
        yield weight, _synchronisation(one, summary)


def _synchronisation(one: Synchronisation, summary: TraceSummary) -> str:
    often = f"{one.per_step:g} per step" if one.per_step is not None else f"{one.calls} in this trace"
    where = f" in {one.place}" if one.place is not None else ""
    waits = f"{one.seconds:.3g} s in all" if summary.device == "gpu" else "would wait for a GPU"
    remedy = "keep the value on the device; trainer.log takes tensors, and reads them at log points"
    if one.place is None and not summary.with_stacks:
        remedy = "this trace has no Python functions: record it with Trainer(profile=...) to see where"
    return f"host-device synchronisation: {one.operation}{where}, {often}, {waits}: {remedy}"


def _products(summary: TraceSummary) -> Iterator[Finding]:
    on = "" if summary.device == "gpu" else "on a GPU, "
    for problem, (what, remedy) in _PROBLEMS.items():
        found = [one for one in summary.products if one.problem == problem and one.share > _PRODUCTS]
        if problem == "alignment":
            by_modules = {frozenset(one.modules) or one.shapes: one for one in reversed(found)}  # forward and backward
            for one in sorted(by_modules.values(), key=lambda one: -one.share)[:_MOST_EACH]:
                yield one.share, f"{on}{_named(one)} {what}: pad {_padding(one)}"
        elif found:
            share = sum(one.share for one in found)
            which = _named(found[0]) + (f" and {len(found) - 1} more" if len(found) > 1 else "")
            yield share, f"{on}{which} {what} ({share:.0%} of the time): {remedy}"


_PROBLEMS = {
    "float32": ("in float32 bypass the tensor cores", 'use precision="bf16" or "tf32"'),
    "float64": ("are float64, which is slow or unsupported on tensor cores", "use float32 or lower"),
    "kernel": ("ran without tensor cores", "check its kernel; for few rows there is no tensor-core kernel"),
    "alignment": (
        "use tensor cores at less than full speed, as not all dimensions are multiples of 16 bytes",
        "",
    ),
}


def _named(product: MatrixProduct) -> str:
    modules = f" of {', '.join(product.modules[:3])}" if product.modules else ""
    more = f" and {len(product.modules) - 3} more" if len(product.modules) > 3 else ""
    return f"{product.operator} {product.type} {product.shapes}{modules}{more}"


def _padding(product: MatrixProduct) -> str:
    return ", ".join(f"{name} from {size} to {padded}" for name, size, padded in product.pad)


def _host(summary: TraceSummary) -> Iterator[Finding]:
    """Of a CPU: for a GPU, idle time says it."""
    if summary.device == "gpu" or not summary.wall:
        return
    data, outside = summary.waited_for_data / summary.wall, summary.outside / summary.wall
    if data > _DATA:
        yield data, f"{data:.0%} of the time went to waiting for data: raise data.num_workers"
    if outside > _OUTSIDE:
        yield (
            outside / 2,  # recording makes Python slower
            f"{outside:.0%} of the time was spent outside of torch's operators, in Python: use a larger micro-batch "
            'or compile="model"',
        )


def _operations(summary: TraceSummary) -> Iterator[Finding]:
    if summary.operations and summary.operations[0].share > _LARGE:
        first = summary.operations[0]
        by = f" (by {first.operator})" if first.operator else ""
        name = first.name if len(first.name) <= 80 else f"{first.name[:77]}..."
        yield 0.0, f"{first.share:.0%} of the time went to {name}{by}, {first.calls} calls: start there"
