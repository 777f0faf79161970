"""Query the state, processes, usage and links of this machine's GPUs through NVML, without torch or a CUDA context."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

import psutil
import pynvml

from ddp_kit.env import VISIBLE_GPUS
from ddp_kit.masking import masked
from ddp_kit.texts import plural, shortened, used_of

# --- NVML queries -----------------------------------------------------------------------------------------------------
# Every query may fail.


@contextmanager
def handles() -> Iterator[tuple[tuple[int, Any], ...]]:
    """Context manager that initialises NVML, and yields the number and handle of each GPU that responds.

    Yields an empty tuple if there is no driver.
    """
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield ()
        return
    try:
        pairs = (
            (index, query(pynvml.nvmlDeviceGetHandleByIndex, index))
            for index in range(query(pynvml.nvmlDeviceGetCount) or 0)
        )
        yield tuple((index, handle) for index, handle in pairs if handle is not None)
    finally:
        pynvml.nvmlShutdown()


def query(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of an NVML query; None if it fails, for example because the GPU does not support the query."""
    try:
        return function(*arguments)
    except (pynvml.NVMLError, pynvml.NVMLLibraryMismatchError):  # the second error: the driver is too old
        return None


def bits(words: Any) -> tuple[int, ...]:
    """The positions of the bits that are set in a list of 64-bit words; empty if `words` is None."""
    return tuple(64 * place + bit for place, word in enumerate(words or ()) for bit in range(64) if word >> bit & 1)


# --- Processes --------------------------------------------------------------------------------------------------------
# A process of another user is described with what this process is permitted to read.


_COMMAND_LENGTH = 100


@dataclass(frozen=True)
class Process:
    """A process of this machine."""

    pid: int
    """The process id; 0 if the process is in another container, because its id is not valid in this one."""
    user: str = ""
    command: str = ""
    """The command line. `command` and `user` are empty if the caller is not permitted to read them."""

    def __str__(self) -> str:
        if not self.pid:
            return "a process in another container"
        if not self.user:
            return f"pid {self.pid} (user and command unknown)"
        if not self.command:
            return f"pid {self.pid} of {self.user}"
        return f"pid {self.pid} of {self.user}: {self.command}"


def process_info(pid: int) -> Process:
    """Return the user and the command of a process. Never raises."""
    user = command = ""
    try:
        process = psutil.Process(pid)
        user = process.username()
        command = process.name()
        argv = process.cmdline()
        if argv:
            command = " ".join([PurePath(argv[0]).name, *argv[1:]])
    except psutil.Error:  # the process has ended, or is not visible to this one
        pass
    line = "".join(letter if letter.isprintable() else " " for letter in masked(command)).strip()
    return Process(pid, user, shortened(line, _COMMAND_LENGTH))


# --- GPUs -------------------------------------------------------------------------------------------------------------


_MASK_WORDS = 32  # room for the numbers of 2048 CPU cores
_MOST_PROCESSES = 3  # in the description of a GPU
# The driver itself uses some memory. If more is used, a process uses the GPU, perhaps one that is invisible in
# this container.
_IDLE_MEMORY_SHARE = 0.1


@dataclass(frozen=True)
class GpuProcess:
    """A process that uses a GPU."""

    process: Process
    memory: int | None = None
    """Bytes of GPU memory that the process uses, or None if not known."""


@dataclass(frozen=True)
class Gpu:
    """A whole GPU or a MIG device: the unit that one training process uses. Memory sizes are in bytes."""

    index: int
    """The NVML index of the GPU; GPUs are numbered in PCI bus order."""
    uuid: str
    name: str
    memory_total: int
    """Total memory in bytes, or 0 if not known."""
    memory_used: int
    processes: tuple[GpuProcess, ...] = ()
    load: int | None = None
    """Utilisation in percent, or None if not known."""
    numa_node: int | None = None
    near: tuple[int, ...] = ()
    """The CPU cores closest to the GPU; empty if not known."""
    mig: int | None = None
    """The number of the MIG device on its GPU; None for a whole GPU."""
    usable: bool = True
    """False for a GPU in MIG mode without MIG devices."""

    @property
    def label(self) -> str:
        """The GPU's name in messages: `2`, or `2:0` for the first MIG device on GPU 2."""
        if self.mig is None:
            return str(self.index)
        return f"{self.index}:{self.mig}"

    @property
    def is_mig(self) -> bool:
        """Whether this is a MIG device. A process can use at most one MIG device through CUDA."""
        return self.uuid.startswith("MIG-")

    @property
    def busy(self) -> bool:
        """Whether a process uses the GPU."""
        return bool(self.processes) or self.memory_used > _IDLE_MEMORY_SHARE * self.memory_total > 0

    @property
    def memory(self) -> str:
        """The used and the total memory, such as `1.5 of 80 GiB`, or an empty string if not known."""
        if not self.memory_total:
            return ""
        return used_of(self.memory_used, self.memory_total)

    def state(self, holder: str = "") -> str:
        """The state in words, such as held, busy or free. `holder`: the launch that holds the GPU, if any."""
        if holder:
            return f"held by {holder}"
        if not self.usable:
            return "in MIG mode without MIG devices"
        if self.processes:
            return f"busy: {plural(len(self.processes), 'process', 'processes')}"
        if self.busy:
            return "busy: memory is in use, perhaps by a process in another container"
        return "free"

    def described(self, holder: str = "") -> str:
        """One line of text about the GPU and the processes that use it."""
        text = f"{self.label}: {self.name}, "
        if self.memory:
            text += f"{self.memory} used, "
        text += self.state(holder)
        if holder or not self.processes:
            return text
        users = [str(user.process) for user in self.processes]
        if len(users) > _MOST_PROCESSES:
            users[_MOST_PROCESSES:] = ["..."]
        return f"{text} ({'; '.join(users)})"


def gpus() -> tuple[Gpu, ...]:
    """All NVIDIA GPUs of this machine; for a GPU in MIG mode, its MIG devices. Empty if there is no driver."""
    with handles() as pairs:
        return tuple(unit for index, handle in pairs for unit in _units(index, handle))


def visible(machine: tuple[Gpu, ...], env: Mapping[str, str]) -> tuple[tuple[str, Gpu], ...]:
    """The GPUs that a process with this environment sees, each with the number or UUID that selects it.

    CUDA_VISIBLE_DEVICES lists numbers, or prefixes of UUIDs. CUDA ignores an invalid or ambiguous entry and all entries
    after it, and shows no GPU if a GPU is listed twice. Listed MIG devices unknown to NVML are assumed to exist.
    """
    mask = env.get(VISIBLE_GPUS)
    if mask is None:
        return tuple((gpu.uuid if gpu.is_mig else str(gpu.index), gpu) for gpu in machine if gpu.usable)
    seen: list[tuple[str, Gpu]] = []
    for word in (part.strip() for part in mask.split(",")):
        matches = [gpu for gpu in machine if gpu.usable and selects(word, gpu)]
        if len(matches) > 1 and not word.isdecimal():
            break
        if matches:
            gpu = matches[0]
        elif word.startswith("MIG-"):
            gpu = Gpu(len(seen), word, "MIG device", memory_total=0, memory_used=0)
        else:
            break
        if any(gpu.uuid == other.uuid for _, other in seen):
            return ()
        seen.append((word, gpu))
    return tuple(seen)


def selects(word: str, gpu: Gpu) -> bool:
    """Whether this entry of CUDA_VISIBLE_DEVICES selects this GPU or MIG device."""
    return word == str(gpu.index) or (word.startswith(("GPU-", "MIG-")) and gpu.uuid.startswith(word))


def _units(index: int, handle: Any) -> tuple[Gpu, ...]:
    """The MIG devices of a GPU in MIG mode; otherwise the GPU itself."""
    whole = _gpu(index, handle)
    if whole is None:
        return ()
    mode = query(pynvml.nvmlDeviceGetMigMode, handle)
    if not mode or mode[0] != pynvml.NVML_DEVICE_MIG_ENABLE:
        return (whole,)
    most = query(pynvml.nvmlDeviceGetMaxMigDeviceCount, handle) or 0
    parts = (_mig_device(whole, handle, number) for number in range(most))
    return tuple(filter(None, parts)) or (replace(whole, usable=False),)


def _mig_device(whole: Gpu, handle: Any, number: int) -> Gpu | None:
    part = query(pynvml.nvmlDeviceGetMigDeviceHandleByIndex, handle, number)
    if part is None:
        return None
    gpu = _gpu(whole.index, part)
    return gpu and replace(gpu, mig=number, numa_node=whole.numa_node, near=whole.near)


def _gpu(index: int, handle: Any) -> Gpu | None:
    """Query one GPU. Returns None if its UUID cannot be read, for example because the GPU has failed."""
    uuid = query(pynvml.nvmlDeviceGetUUID, handle)
    if uuid is None:
        return None
    memory = query(pynvml.nvmlDeviceGetMemoryInfo, handle)
    load = query(pynvml.nvmlDeviceGetUtilizationRates, handle)
    users = query(pynvml.nvmlDeviceGetComputeRunningProcesses, handle) or ()
    nodes = bits(query(pynvml.nvmlDeviceGetMemoryAffinity, handle, _MASK_WORDS, pynvml.NVML_AFFINITY_SCOPE_NODE))
    return Gpu(
        index=index,
        uuid=decoded(uuid),
        name=decoded(query(pynvml.nvmlDeviceGetName, handle) or "GPU"),
        memory_total=getattr(memory, "total", 0),
        memory_used=getattr(memory, "used", 0),
        processes=tuple(GpuProcess(process_info(user.pid), user.usedGpuMemory) for user in users),
        load=getattr(load, "gpu", None),
        numa_node=next(iter(nodes), None),
        near=bits(query(pynvml.nvmlDeviceGetCpuAffinity, handle, _MASK_WORDS)),
    )


# --- GPU usage --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class GpuUsage:
    """Current usage of one GPU. A value that the driver does not report is None."""

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
    """The ids of the processes that use the GPU."""


def gpu_usage() -> tuple[GpuUsage, ...]:
    """Query the usage of each GPU of this machine. Returns an empty tuple if there is no driver."""
    with gpu_usage_reader() as read:
        return read()


@contextmanager
def gpu_usage_reader() -> Iterator[Callable[[], tuple[GpuUsage, ...]]]:
    """Yield a function that does the same as `gpu_usage`, but keeps NVML initialised between calls."""
    with handles() as pairs:
        yield lambda: tuple(_usage(pairs))


def _usage(pairs: tuple[tuple[int, Any], ...]) -> Iterator[GpuUsage]:
    for index, handle in pairs:
        memory = query(pynvml.nvmlDeviceGetMemoryInfo, handle)
        load = query(pynvml.nvmlDeviceGetUtilizationRates, handle)
        power = query(pynvml.nvmlDeviceGetPowerUsage, handle)
        users = query(pynvml.nvmlDeviceGetComputeRunningProcesses, handle) or ()
        yield GpuUsage(
            index=index,
            uuid=decoded(query(pynvml.nvmlDeviceGetUUID, handle)),
            name=decoded(query(pynvml.nvmlDeviceGetName, handle)),
            load=getattr(load, "gpu", None),
            memory_used=getattr(memory, "used", None),
            memory_total=getattr(memory, "total", None),
            power=None if power is None else power / 1000,
            temperature=query(pynvml.nvmlDeviceGetTemperature, handle, pynvml.NVML_TEMPERATURE_GPU),
            pids=tuple(user.pid for user in users),
        )


def decoded(value: str | bytes | None) -> str:
    """A text from NVML; empty if the query has failed."""
    if isinstance(value, bytes):
        return value.decode()
    return value or ""


# --- Links between GPUs -----------------------------------------------------------------------------------------------
# Links have the abbreviations that `nvidia-smi topo -m` uses.


MEANING = {
    "NV": "this many NVLinks",
    "PIX": "one PCIe switch",
    "PXB": "several PCIe switches",
    "PHB": "the CPU's PCIe host bridge",
    "NODE": "host bridges of one NUMA node",
    "SYS": "the connection between NUMA nodes",
}
_LEVELS = {
    pynvml.NVML_TOPOLOGY_INTERNAL: "PIX",
    pynvml.NVML_TOPOLOGY_SINGLE: "PIX",
    pynvml.NVML_TOPOLOGY_MULTIPLE: "PXB",
    pynvml.NVML_TOPOLOGY_HOSTBRIDGE: "PHB",
    pynvml.NVML_TOPOLOGY_NODE: "NODE",
    pynvml.NVML_TOPOLOGY_SYSTEM: "SYS",
}
Address = tuple[int, int, int]
"""The PCI domain, bus and device of a GPU."""
_SWITCH: Address = (-1, -1, -1)
_TO_SWITCH = pynvml.NVML_NVLINK_DEVICE_TYPE_SWITCH


def links() -> Mapping[int, Mapping[int, str]]:
    """For each pair of GPU numbers, the kind of link between the two GPUs, such as `NV18` or `SYS`.

    Pairs that NVML does not report are left out. `NV18` means 18 NVLinks, including those through NVSwitches.
    """
    with handles() as pairs:
        cables = {index: _nvlinks(handle) for index, handle in pairs}
        addresses = {index: pci_address(handle) for index, handle in pairs}
        table: dict[int, dict[int, str]] = {index: {} for index, _ in pairs}
        for one, handle in pairs:
            for other, neighbour in pairs:
                if one == other:
                    continue
                direct = cables[one].count(addresses[other])
                switched = min(cables[one].count(_SWITCH), cables[other].count(_SWITCH))
                level = query(pynvml.nvmlDeviceGetTopologyCommonAncestor, handle, neighbour)
                kind = f"NV{direct + switched}" if direct + switched else _LEVELS.get(level)
                if kind:
                    table[one][other] = kind
        return table


def pci_address(handle: Any) -> Address | None:
    """The PCI address of a GPU; None if NVML does not report it."""
    return _address(query(pynvml.nvmlDeviceGetPciInfo, handle))


def _nvlinks(handle: Any) -> list[Address | None]:
    """The other end of each NVLink of a GPU: the PCI address of another GPU, or `_SWITCH`, or None if not known."""
    ends: list[Address | None] = []
    for link in range(pynvml.NVML_NVLINK_MAX_LINKS):
        active = query(pynvml.nvmlDeviceGetNvLinkState, handle, link)
        if active is None:  # the GPU has no link with this number
            break
        if active and query(pynvml.nvmlDeviceGetNvLinkRemoteDeviceType, handle, link) == _TO_SWITCH:
            ends.append(_SWITCH)
        elif active:
            ends.append(_address(query(pynvml.nvmlDeviceGetNvLinkRemotePciInfo, handle, link)))
    return ends


def _address(pci: Any) -> Address | None:
    return (pci.domain, pci.bus, pci.device) if pci else None
