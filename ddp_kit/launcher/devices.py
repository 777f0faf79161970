"""The GPUs of this machine, through NVML: no torch, no CUDA context."""

from collections.abc import Mapping
from dataclasses import dataclass

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
    """
    words = env.get(VISIBLE_GPUS)
    if words is None:
        return tuple((str(gpu.index), gpu) for gpu in machine)
    seen: list[tuple[str, Gpu]] = []
    for word in (part.strip() for part in words.split(",")):
        found = next((gpu for gpu in machine if _selects(word, gpu)), None)
        if found is None:
            break
        seen.append((word, found))
    return tuple(seen)


def _selects(word: str, gpu: Gpu) -> bool:
    return word == str(gpu.index) or (word.startswith("GPU-") and gpu.uuid.startswith(word))


def _gpu(index: int) -> Gpu:
    handle = pynvml.nvmlDeviceGetHandleByIndex(index)
    memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
    return Gpu(
        index=index,
        uuid=_text(pynvml.nvmlDeviceGetUUID(handle)),
        name=_text(pynvml.nvmlDeviceGetName(handle)),
        memory_total=memory.total,
        memory_used=memory.used,
        processes=len(pynvml.nvmlDeviceGetComputeRunningProcesses(handle)),
    )


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
