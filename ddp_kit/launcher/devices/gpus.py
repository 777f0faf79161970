"""The GPUs of this machine, through NVML: no torch, no CUDA context."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import pynvml

from ddp_kit.env import VISIBLE_GPUS
from ddp_kit.launcher.devices.nvml import bits, handles, query
from ddp_kit.launcher.devices.processes import Process, process_info
from ddp_kit.sizes import GIB

_MASK_WORDS = 32  # room for the numbers of 2048 CPU cores
_SHOWN_PROCESSES = 3
# The driver itself uses some memory. If more is used, there is a process, which may be invisible in a container.
_IDLE_MEMORY_SHARE = 0.1


@dataclass(frozen=True)
class GpuProcess:
    """A process that uses a GPU."""

    process: Process
    memory: int | None = None
    """Bytes of the GPU's memory; None: not known."""


@dataclass(frozen=True)
class Gpu:
    """A whole GPU or a MIG device: what one process uses. Memory in bytes."""

    index: int
    """NVML's number: the order on the PCI bus."""
    uuid: str
    name: str
    memory_total: int
    """0: not known."""
    memory_used: int
    processes: tuple[GpuProcess, ...] = ()
    load: int | None = None
    """Utilisation in percent; None: not known."""
    numa_node: int | None = None
    near: tuple[int, ...] = ()
    """The CPU cores near it; empty: not known."""
    mig: int | None = None
    """The number of the MIG device on its GPU; None: a whole GPU."""
    usable: bool = True
    """False for a GPU in MIG mode without MIG devices."""

    @property
    def label(self) -> str:
        """Its name in messages: `2`, or `2:0` for the first MIG device on GPU 2."""
        return str(self.index) if self.mig is None else f"{self.index}:{self.mig}"

    @property
    def is_mig(self) -> bool:
        """Whether it is a MIG device; CUDA shows a process at most one of these."""
        return self.uuid.startswith("MIG-")

    @property
    def busy(self) -> bool:
        """Whether a process uses it."""
        return bool(self.processes) or self.memory_used > _IDLE_MEMORY_SHARE * self.memory_total > 0

    @property
    def memory(self) -> str:
        """`1.5 of 80 GiB`; empty: not known."""
        if not self.memory_total:
            return ""
        return f"{self.memory_used / GIB:.1f} of {self.memory_total / GIB:.0f} GiB"

    def state(self, holder: str = "") -> str:
        """Held, busy or free. `holder`: the launch that holds it, if any."""
        if holder:
            return f"held by {holder}"
        if not self.usable:
            return "in MIG mode without MIG devices"
        if self.processes:
            return f"busy: {len(self.processes)} process{'es' if len(self.processes) > 1 else ''}"
        return "busy: a process that is not visible here uses its memory" if self.busy else "free"

    def described(self, holder: str = "") -> str:
        """One line about the GPU and the processes that use it."""
        used = f"{self.memory} used, " if self.memory else ""
        users = [] if holder else [str(user.process) for user in self.processes]
        shown = f" ({'; '.join(users[:_SHOWN_PROCESSES])}{'; ...' if len(users) > _SHOWN_PROCESSES else ''})"
        return f"{self.label}: {self.name}, {used}{self.state(holder)}{shown if users else ''}"


def gpus() -> tuple[Gpu, ...]:
    """All NVIDIA GPUs of this machine, or their MIG devices in MIG mode; empty if there is no driver."""
    with handles() as found:
        return tuple(unit for index, handle in found for unit in _units(index, handle))


def visible(machine: tuple[Gpu, ...], env: Mapping[str, str]) -> tuple[tuple[str, Gpu], ...]:
    """The GPUs that a process with this environment sees, each with the number or UUID that selects it.

    CUDA reads CUDA_VISIBLE_DEVICES as numbers or prefixes of UUIDs. It ignores everything from an invalid or ambiguous
    one on, and shows no GPU if one is listed twice. MIG devices unknown to NVML are assumed to exist.
    """
    mask = env.get(VISIBLE_GPUS)
    if mask is None:
        return tuple((gpu.uuid if gpu.is_mig else str(gpu.index), gpu) for gpu in machine if gpu.usable)
    seen: list[tuple[str, Gpu]] = []
    for word in (part.strip() for part in mask.split(",")):
        matches = [gpu for gpu in machine if gpu.usable and selects(word, gpu)]
        if len(matches) > 1 and not word.isdecimal():
            break
        found = matches[0] if matches else None
        if found is None and word.startswith("MIG-"):
            found = Gpu(len(seen), word, "MIG device", memory_total=0, memory_used=0)
        if found is None:
            break
        if any(gpu.uuid == found.uuid for _, gpu in seen):
            return ()
        seen.append((word, found))
    return tuple(seen)


def selects(word: str, gpu: Gpu) -> bool:
    """Whether this entry of CUDA_VISIBLE_DEVICES selects this GPU or MIG device."""
    return word == str(gpu.index) or (word.startswith(("GPU-", "MIG-")) and gpu.uuid.startswith(word))


def _units(index: int, handle: Any) -> tuple[Gpu, ...]:
    """The GPU itself, or the MIG devices on it."""
    whole = _gpu(index, handle)
    if whole is None:
        return ()
    mode = query(pynvml.nvmlDeviceGetMigMode, handle)
    if not mode or mode[0] != pynvml.NVML_DEVICE_MIG_ENABLE:
        return (whole,)
    most = query(pynvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0
    parts = (_mig_device(whole, handle, number) for number in range(most))
    return tuple(part for part in parts if part is not None) or (replace(whole, usable=False),)


def _mig_device(whole: Gpu, handle: Any, number: int) -> Gpu | None:
    part = query(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, number)
    found = None if part is None else _gpu(whole.index, part)
    return found and replace(found, mig=number, numa_node=whole.numa_node, near=whole.near)


def _gpu(index: int, handle: Any) -> Gpu | None:
    """Query one GPU; None: its UUID cannot be read, for example because it has failed."""
    uuid = query(pynvml.nvmlDeviceGetUUID, handle)
    if uuid is None:
        return None
    memory = query(pynvml.nvmlDeviceGetMemoryInfo, handle)
    load = query(pynvml.nvmlDeviceGetUtilizationRates, handle)
    users = query(pynvml.nvmlDeviceGetComputeRunningProcesses, handle) or ()
    nodes = bits(query(pynvml.nvmlDeviceGetMemoryAffinity, handle, _MASK_WORDS, pynvml.NVML_AFFINITY_SCOPE_NODE))
    return Gpu(
        index=index,
        uuid=_text(uuid),
        name=_text(query(pynvml.nvmlDeviceGetName, handle) or "GPU"),
        memory_total=memory.total if memory else 0,
        memory_used=memory.used if memory else 0,
        processes=tuple(GpuProcess(process_info(user.pid), user.usedGpuMemory) for user in users),
        load=load.gpu if load else None,
        numa_node=nodes[0] if nodes else None,
        near=bits(query(pynvml.nvmlDeviceGetCpuAffinity, handle, _MASK_WORDS)),
    )


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
