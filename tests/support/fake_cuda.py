"""GPUs that do not exist, to test on a machine without a GPU what the package does with one.

    with computing():                               tensors that are created in this context are fake
        tensor = torch.zeros(3, device="cuda:1")
    tensor = on_gpu(torch.zeros(3), 1)              a fake tensor on cuda:1
    model = on_gpu(torch.nn.Linear(2, 2))           the module, with fake parameters and buffers on cuda:0
    with visible_gpus(2, memory=80 * GIB): ...      torch reports two GPUs
    env = with_visible_gpus(tmp_path, 2)            environment in which a new Python process reports two GPUs

A fake tensor has a shape, a dtype and a device, but no values. So these tests see

- whether an operation mixes devices: it raises a RuntimeError, as on a GPU;
- whether the host would wait for the GPU: `.item()`, `.tolist()`, `bool(...)` and `.cpu()` followed by a read raise
  `ReadsFakeValue`;
- on which device results lie, and how many bytes they take (`LiveBytes`).

Compute with them in `computing()`, which also turns gradients off: without a GPU, autograd aborts the process.
A few operations do not work without CUDA, such as batch norm.

They do not see values, streams, events, kernels, NCCL or torch's allocator: these need a GPU (tests marked `gpu`). With
`visible_gpus`, code that creates a real tensor on a GPU still fails, as without it: a test can thus show that code does
not touch the GPU. For the GPUs that the launcher sees through NVML, see `machine_of` in tests/support/machine.py.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException as ReadsFakeValue

from ddp_kit.memory.fake import FakeTensors

__all__ = ["GIB", "ReadsFakeValue", "computing", "on_gpu", "visible_gpus", "with_visible_gpus"]

GIB = 1024**3
T = TypeVar("T", Tensor, nn.Module)
_FAKES = FakeTensors()  # operations do not mix the fake tensors of two


@contextmanager
def computing() -> Iterator[None]:
    """Context manager for operations on fake tensors, without gradients. Real tensors may be used too."""
    with torch.no_grad(), _FAKES.computing():
        yield


def on_gpu(thing: T, index: int = 0) -> T:
    """Fake copy of a tensor on a GPU; or the module itself, with fake parameters and buffers there."""
    device = torch.device("cuda", index)
    if isinstance(thing, Tensor):
        return _FAKES.like(thing, device)
    for module in thing.modules():
        parts: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for tensors in parts:
            tensors.update({name: _FAKES.like(each, device) for name, each in tensors.items() if each is not None})
    return thing


@contextmanager
def visible_gpus(count: int, memory: int = 80 * GIB, uuid: str = "GPU-0") -> Iterator[None]:
    """Context manager in which torch reports GPUs. `memory`: bytes of each. `uuid`: the UUID that all of them have."""
    kind = SimpleNamespace(
        name="Fake H100", total_memory=memory, major=9, minor=0, multi_processor_count=132, uuid=uuid
    )
    answers: dict[str, Any] = {
        "is_available": True,
        "device_count": count,
        "current_device": 0,
        "set_device": None,
        "get_device_properties": kind,
        "get_device_name": kind.name,
        "get_device_capability": (kind.major, kind.minor),
        "is_bf16_supported": True,
        "is_current_stream_capturing": False,  # optimizers ask it; a build with CUDA would ask the driver
    }
    with mock.patch.multiple(torch.cuda, **{name: mock.Mock(return_value=each) for name, each in answers.items()}):
        yield


def with_visible_gpus(folder: Path, count: int, memory: int = 80 * GIB) -> dict[str, str]:
    """Environment variables for a process in which torch reports GPUs. `folder`: where to write the code for it."""
    begin = f"import fake_cuda\ngpus = fake_cuda.visible_gpus({count}, {memory})\ngpus.__enter__()\n"
    (folder / "sitecustomize.py").write_text(begin)  # run by the interpreter as it starts
    return {"PYTHONPATH": os.pathsep.join([str(folder), str(Path(__file__).parent)])}
