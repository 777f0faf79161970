"""The GPUs of this machine, through NVML: no torch, no CUDA context."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pynvml

from ddp_kit.contract import VISIBLE_GPUS

_GIB = 1024**3


@dataclass(frozen=True)
class Gpu:
    """One GPU as NVML sees it. Memory in bytes."""

    index: int
    """NVML's number: the order on the PCI bus."""
    uuid: str
    name: str
    memory_total: int
    memory_used: int
    processes: int
    """Processes that compute on it now."""

    def __str__(self) -> str:
        state = f"{self.processes} running on it" if self.processes else "free"
        used, total = self.memory_used / _GIB, self.memory_total / _GIB
        return f"{self.index}: {self.name}, {used:.1f} of {total:.0f} GiB used, {state}"


def gpus() -> tuple[Gpu, ...]:
    """All NVIDIA GPUs of this machine; none where there is no driver."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()
    try:
        return tuple(_gpu(index) for index in range(pynvml.nvmlDeviceGetCount()))
    finally:
        pynvml.nvmlShutdown()


def visible(machine: tuple[Gpu, ...], env: Mapping[str, str]) -> tuple[tuple[str, Gpu], ...]:
    """The GPUs that a process with this environment would see, each with the word that selects it.

    As CUDA reads CUDA_VISIBLE_DEVICES: numbers or (beginnings of) UUIDs; what follows an invalid one is not seen.
    A MIG device is taken at its word: it is one device to CUDA, of which NVML's list of GPUs does not tell.
    """
    words = env.get(VISIBLE_GPUS)
    if words is None:
        return tuple((str(gpu.index), gpu) for gpu in machine)
    seen: list[tuple[str, Gpu]] = []
    for word in (part.strip() for part in words.split(",")):
        if word.startswith("MIG-"):
            found: Gpu | None = Gpu(len(seen), word, "MIG device", memory_total=0, memory_used=0, processes=0)
        else:
            found = next((gpu for gpu in machine if _selects(word, gpu)), None)
        if found is None:
            break
        seen.append((word, found))
    return tuple(seen)


def _selects(word: str, gpu: Gpu) -> bool:
    return word == str(gpu.index) or (word.startswith("GPU-") and gpu.uuid.startswith(word))


def _gpu(index: int) -> Gpu:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = _asked(pynvml.nvmlDeviceGetMemoryInfo, handle)
    return Gpu(
        index=index,
        uuid=_text(pynvml.nvmlDeviceGetUUID(handle)),
        name=_text(_asked(pynvml.nvmlDeviceGetName, handle) or "GPU"),
        memory_total=memory.total if memory else 0,
        memory_used=memory.used if memory else 0,
        processes=len(_asked(pynvml.nvmlDeviceGetComputeRunningProcesses, handle) or ()),
    )


def _asked(question: Callable[[Any], Any], handle: Any) -> Any:
    """NVML's answer, or None where this GPU does not tell: some share the host's memory, some hide their processes."""
    try:
        return question(handle)
    except pynvml.NVMLError:
        return None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
