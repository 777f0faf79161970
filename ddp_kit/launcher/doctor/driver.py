"""The NVIDIA driver as NVML tells of it. Nothing here raises: a driver that does not work is a finding."""

from collections.abc import Mapping
from dataclasses import dataclass

import pynvml

from ddp_kit.launcher.devices import gpus as devices
from ddp_kit.launcher.devices.gpus import Gpu
from ddp_kit.launcher.devices.nvml import asked

Version = tuple[int, int]

_NO_ANSWER = (pynvml.NVMLError, pynvml.NVMLLibraryMismatchError)  # the second: a driver too old for the question


@dataclass(frozen=True)
class Card:
    """What the checks need to know about one GPU, besides what it is."""

    gpu: Gpu
    ecc_errors: int | None = None
    """Uncorrected memory errors since it was last reset; None where it does not count them."""
    capability: Version | None = None
    """Its compute capability, such as (9, 0)."""
    processes: tuple[int, ...] = ()
    """The ids of the processes that compute on it, those in other containers left aside."""


@dataclass(frozen=True)
class Driver:
    """The driver and its GPUs."""

    error: str = ""
    """Why NVML does not work."""
    absent: bool = False
    """Whether that is because there is no driver."""
    version: str = "unknown"
    cuda: Version | None = None
    """The newest CUDA that it serves."""
    cards: tuple[Card, ...] = ()

    def visible(self, env: Mapping[str, str]) -> tuple[Gpu, ...]:
        """The GPUs that a process with this environment would see."""
        return tuple(gpu for _, gpu in devices.visible(tuple(card.gpu for card in self.cards), env))


def ask() -> Driver:
    """Ask NVML all at once."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        absent = error.value in (pynvml.NVML_ERROR_LIBRARY_NOT_FOUND, pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
        return Driver(error=str(error), absent=absent)
    try:
        for index in range(pynvml.nvmlDeviceGetCount()):
            pynvml.nvmlDeviceGetHandleByIndex(index)  # raises where a GPU has fallen off the bus
        cuda = asked(pynvml.nvmlSystemGetCudaDriverVersion)
        return Driver(
            version=str(asked(pynvml.nvmlSystemGetDriverVersion) or "unknown"),
            cuda=(cuda // 1000, cuda % 1000 // 10) if cuda else None,
            cards=tuple(_card(gpu) for gpu in devices.gpus()),
        )
    except _NO_ANSWER as error:
        return Driver(error=str(error))
    finally:
        asked(pynvml.nvmlShutdown)


def _card(gpu: Gpu) -> Card:
    handle = pynvml.nvmlDeviceGetHandleByIndex(gpu.index)
    uncorrected, since_reset = pynvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, pynvml.NVML_VOLATILE_ECC
    processes = asked(pynvml.nvmlDeviceGetComputeRunningProcesses, handle) or ()
    return Card(
        gpu,
        ecc_errors=asked(pynvml.nvmlDeviceGetTotalEccErrors, handle, uncorrected, since_reset),
        capability=asked(pynvml.nvmlDeviceGetCudaComputeCapability, handle),
        processes=tuple(process.pid for process in processes if process.pid > 0),
    )
