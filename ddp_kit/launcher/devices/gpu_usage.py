"""The load, memory, power and temperature of each GPU at this moment."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pynvml

from ddp_kit.launcher.devices.nvml import handles, query


@dataclass(frozen=True)
class GpuUsage:
    """One GPU; None: the driver does not report it."""

    index: int
    uuid: str
    name: str
    load: int | None = None
    """Percent."""
    memory_used: int | None = None
    """Bytes."""
    memory_total: int | None = None
    power: float | None = None
    """Watts."""
    temperature: int | None = None
    """Degrees Celsius."""
    pids: tuple[int, ...] = ()
    """The processes that use it."""


def gpu_usage() -> tuple[GpuUsage, ...]:
    """Query each GPU of this machine; empty without a driver."""
    with gpu_usage_reader() as read:
        return read()


@contextmanager
def gpu_usage_reader() -> Iterator[Callable[[], tuple[GpuUsage, ...]]]:
    """Yield a function like `gpu_usage` for frequent calls: NVML stays initialised between them."""
    with handles() as found:
        yield lambda: tuple(_read(found))


def _read(found: tuple[tuple[int, Any], ...]) -> Iterator[GpuUsage]:
    for index, handle in found:
        memory = query(pynvml.nvmlDeviceGetMemoryInfo, handle)
        load = query(pynvml.nvmlDeviceGetUtilizationRates, handle)
        power = query(pynvml.nvmlDeviceGetPowerUsage, handle)
        users = query(pynvml.nvmlDeviceGetComputeRunningProcesses, handle) or ()
        yield GpuUsage(
            index=index,
            uuid=_text(query(pynvml.nvmlDeviceGetUUID, handle)),
            name=_text(query(pynvml.nvmlDeviceGetName, handle)),
            load=load.gpu if load else None,
            memory_used=memory.used if memory else None,
            memory_total=memory.total if memory else None,
            power=None if power is None else power / 1000,
            temperature=query(pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU),
            pids=tuple(user.pid for user in users),
        )


def _text(value: str | bytes | None) -> str:
    return value.decode() if isinstance(value, bytes) else value or ""
