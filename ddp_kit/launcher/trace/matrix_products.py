"""Matrix products and convolutions of a trace, and which of them miss the tensor cores.

Source: NVIDIA, Matrix Multiplication Background User's Guide, "Tensor Core Requirements": from cuBLAS 11 on, tensor
cores can be used at any size, and are most efficient if M, N and K are multiples of 16 bytes. The same is said here of
the channels of a convolution and the dimension of an attention head. float32 uses tensor cores as TF32 only; float64 on
few GPUs, and many times slower than 16 bits.
"""

import re
from collections import Counter, defaultdict
from dataclasses import dataclass
from math import prod
from typing import Any

from ddp_kit.launcher.trace.recording import Recording
from ddp_kit.launcher.trace.trace_file import Event
from ddp_kit.launcher.trace.trace_records import MatrixProduct

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
# Names of cuBLAS, cuDNN and CUTLASS: `ampere_sgemm_128x64_tn` has no tensor cores,
# `cutlass_80_tensorop_s1688gemm_64x64`, `ampere_bf16_s16816gemm`, `sm90_xmma_gemm` and `nvjet_hsh_128x64` have.
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


def matrix_products(recording: Recording, *, tf32: bool | None) -> tuple[MatrixProduct, ...]:
    """By operator, type and shape, those that took longest first.

    `tf32`: whether float32 may use tensor cores; None: not known.
    """
    kernels = _kernels(recording)
    groups: dict[_Key, list[int]] = defaultdict(list)
    innermost = {index: key for index, event in recording.host("cpu_op") if (key := _key(event)) is not None}
    for outer in {outer for index in innermost for outer in recording.calls.operators(index)} & innermost.keys():
        del innermost[outer]
    for index, key in innermost.items():
        groups[key].append(index)
    found = [_product(recording, key, indices, kernels, tf32) for key, indices in groups.items()]
    return tuple(sorted(found, key=lambda product: -product.seconds))


def _kernels(recording: Recording) -> dict[int, list[Event]]:
    """The kernels that each operator launched, itself or by operators that it called."""
    found = defaultdict(list)
    for event in recording.gpu:
        launch = recording.launch(event)
        if event.kind == "kernel" and launch >= 0:
            for operator in recording.calls.operators(launch):
                found[operator].append(event)
    return found


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
    """A product may begin with a copy, and that may take longer."""
    return _uses_tensor_cores(kernel.name) is not None, kernel.end - kernel.start


def _uses_tensor_cores(kernel: str | None) -> bool | None:
    """By the name of a kernel; None: the name does not tell."""
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
    except (IndexError, TypeError, ValueError):  # an operator with the same name and other arguments
        return None
    return _Key(event.name, *kind, *shape) if shape is not None and kind is not None else None


def _type(name: str) -> tuple[str, int] | None:
    if name.startswith("c10::Float8"):
        return name.removeprefix("c10::").lower(), 1
    return _TYPES.get(name)


def _shape(operator: str, shapes: list[Any]) -> Shape | None:
    """How an operator's shapes are written, and the sizes that matter."""
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
    """Few input channels, such as the 3 of a picture, have kernels of their own."""
    outputs, inputs, *window = weight
    sizes = (("input channels", inputs), ("output channels", outputs))
    size = "x".join(map(str, window))
    return f"{inputs} to {outputs} channels, {size}", tuple(pair for pair in sizes if pair[1] > 4)
