"""The NVIDIA driver as reported by NVML. Nothing here raises: a broken driver is a result."""

from collections.abc import Mapping
from dataclasses import dataclass

import pynvml

from ddp_kit.launcher.devices import gpus as devices
from ddp_kit.launcher.devices.gpus import Gpu
from ddp_kit.launcher.devices.nvml import query

Version = tuple[int, int]

_NO_ANSWER = (pynvml.NVMLError, pynvml.NVMLLibraryMismatchError)  # the second: the driver is too old for the query


@dataclass(frozen=True)
class Card:
    """Further properties of one GPU for the checks."""

    gpu: Gpu
    ecc_errors: int | None = None
    """Uncorrected memory errors since its last reset; None: it does not count errors."""
    capability: Version | None = None
    """Its compute capability, such as (9, 0)."""
    processes: tuple[int, ...] = ()
    """The ids of the processes that use it, except those in other containers."""


@dataclass(frozen=True)
class Driver:
    """The driver and its GPUs."""

    error: str = ""
    """Why NVML does not work."""
    absent: bool = False
    """Whether there is no driver."""
    version: str = "unknown"
    cuda: Version | None = None
    """The newest CUDA version that it supports."""
    cards: tuple[Card, ...] = ()

    def visible(self, env: Mapping[str, str]) -> tuple[Gpu, ...]:
        """The GPUs that a process with this environment would see."""
        return tuple(gpu for _, gpu in devices.visible(tuple(card.gpu for card in self.cards), env))


def detect() -> Driver:
    """Query NVML for everything the checks need."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        absent = error.value in (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
        return Driver(error=str(error), absent=absent)
    try:
        for index in range(pynvml.nvmlDeviceGetCount()):
            pynvml.nvmlDeviceGetHandleByIndex(index)  # raises if a GPU has fallen off the bus
        cuda = query(pynvml.nvmlSystemGetCudaDriverVersion)
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
    uncorrected, since_reset = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
    processes = query(pynvml.nvmlDeviceGetComputeRunningProcesses, handle) or ()
    return Card(
        gpu,
        ecc_errors=query(pynvml.nvmlDeviceGetTotalEccErrors, handle, uncorrected, since_reset),
        capability=query(pynvml.nvmlDeviceGetCudaComputeCapability, handle),
        processes=tuple(process.pid for process in processes if process.pid > 0),
    )
