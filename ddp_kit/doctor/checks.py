"""The checks of `ddpkit doctor`. A check returns a `CheckResult`, or None if it does not apply to the machine."""

import os
import pwd
import shlex
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import takewhile
from pathlib import Path
from typing import Any

from ddp_kit.clusters.engine import Engine
from ddp_kit.clusters.engines import ENGINES
from ddp_kit.control_groups import cpu_quota, memory_limit
from ddp_kit.doctor.machine import Machine, ProbeResult, Version
from ddp_kit.env import VISIBLE_GPUS
from ddp_kit.launcher.rendezvous import holder
from ddp_kit.masking import masked
from ddp_kit.texts import GIB, plural, size_text

# --- Check results ----------------------------------------------------------------------------------------------------


class Status(StrEnum):
    """The severity of a result."""

    OK = "ok"
    WARN = "warn"
    """Training works, but may fail later or be slow."""
    FAIL = "fail"
    """Training does not work, or does not work as intended."""


@dataclass(frozen=True)
class CheckResult:
    """The result of one check."""

    status: Status
    found: str
    fix: str = ""
    """A command that fixes the problem; empty if no command is known or none is needed."""


def ok(found: str) -> CheckResult:
    """Create the result of a check that passed."""
    return CheckResult(Status.OK, found)


def warn(found: str, fix: str) -> CheckResult:
    """Create a result that warns of a possible problem."""
    return CheckResult(Status.WARN, found, fix)


def fail(found: str, fix: str) -> CheckResult:
    """Create the result of a check that failed."""
    return CheckResult(Status.FAIL, found, fix)


_AGAIN = "ddpkit doctor  # run it again when this machine is less busy"


# --- Process limits ---------------------------------------------------------------------------------------------------
# Memory, cores, open files, locked memory, shared memory.


_MIN_MEMORY = 2 * GIB
_MIN_SHARED_MEMORY = GIB
_MIN_OPEN_FILES = 4096
_PROPOSED_OPEN_FILES = 65536
_MIN_LOCKED_MEMORY = 8 * 1024**2  # the kernel's default


def memory(machine: Machine) -> CheckResult:
    """Check how much memory this process may use, given the machine's memory and the cgroup limit."""
    total = _machine_memory(machine)
    may_use = min(total, memory_limit(machine.root) or total)
    found = f"memory: {size_text(total)}"
    if may_use < total:
        found = f"memory: {size_text(may_use)} of the machine's {size_text(total)} (cgroup limit)"
    if may_use < _MIN_MEMORY:
        fix = f"docker run --memory=16g ...  # {_by_engine(lambda engine: engine.memory_setting)}"
        return warn(f"{found} may be too little; torch alone takes about 0.5 GiB per process", fix)
    return ok(found)


def cpu(machine: Machine) -> CheckResult:
    """Check how many of the machine's CPU cores this process may use, given its CPU affinity and the cgroup quota."""
    quota = cpu_quota(machine.root)
    may_use = min(machine.usable_cores, quota or machine.usable_cores)
    found = f"CPU cores: {machine.cores}"
    if quota is not None and may_use == quota < machine.cores:
        found = (
            f"CPU cores: limited by a quota to {quota:g} of the machine's {machine.cores}; "
            f"programs still see {machine.cores}"
        )
    elif may_use < machine.cores:
        found = f"CPU cores: {machine.usable_cores} of the machine's {machine.cores} may be used"
    if may_use < 1:
        fix = f"docker run --cpus=4 ...  # {_by_engine(lambda engine: engine.cpus_setting)}"
        return warn(found, fix)
    return ok(found)


def open_files(machine: Machine) -> CheckResult:
    """Check the limit on open files.

    DataLoader workers keep one file open for each tensor that they send. Network connections also count as open files.
    """
    soft, hard = machine.open_files
    if soft < 0:
        return ok("open files: no limit")
    if soft >= _MIN_OPEN_FILES:
        return ok(f"open files: {soft:,}")
    may_have = min(hard, _PROPOSED_OPEN_FILES)
    if hard < 0:
        may_have = _PROPOSED_OPEN_FILES
    fix = f"ulimit -n {may_have}"
    if may_have < _MIN_OPEN_FILES:
        fix = (
            f"docker run --ulimit nofile={_PROPOSED_OPEN_FILES} ...  "
            "# outside a container: set `nofile` in /etc/security/limits.conf"
        )
    return warn(f"open files: the limit is {soft:,}; DataLoader workers may need more", fix)


def locked_memory(machine: Machine) -> CheckResult:
    """Check the limit on locked memory. Pinned buffers and InfiniBand need locked memory."""
    soft, _ = machine.locked_memory
    if soft < 0:
        return ok("locked memory: no limit")
    infiniband = machine.root / "sys/class/infiniband"
    needs_all = infiniband.is_dir() and any(infiniband.iterdir())
    if needs_all or soft < _MIN_LOCKED_MEMORY:
        why = "InfiniBand needs it to be unlimited" if needs_all else "pinned buffers may need more"
        fix = "ulimit -l unlimited  # docker run --ulimit memlock=-1 ..."
        return warn(f"locked memory: the limit is {size_text(soft)}; {why}", fix)
    return ok(f"locked memory: the limit is {size_text(soft)}, which is enough without InfiniBand")


def shared_memory(machine: Machine) -> CheckResult:
    """Check the size of shared memory (/dev/shm).

    DataLoader workers use it, and so does NCCL between GPUs without peer-to-peer access.
    """
    shm = machine.root / "dev/shm"
    larger = (
        "docker run --shm-size=8g ...  # or --ipc=host; outside a container: sudo mount -o remount,size=8G /dev/shm"
    )
    if not shm.is_dir():
        return fail(f"{shm} does not exist", "sudo mount -t tmpfs -o size=8G,mode=1777 tmpfs /dev/shm")
    if not os.access(shm, os.W_OK | os.X_OK):
        return fail(f"{shm} cannot be written to", f"sudo chmod 1777 {shm}")
    total, free = machine.space(shm)
    if total < _MIN_SHARED_MEMORY:
        return warn(f"shared memory: {size_text(total)} in {shm}; DataLoader workers need more", larger)
    if free < _MIN_SHARED_MEMORY:
        found = f"shared memory: {size_text(free)} of {size_text(total)} in {shm} are free"
        return warn(found, f"ls -lS {shm}  # then remove the files that are not used")
    return ok(f"shared memory: {size_text(total)} in {shm}")


def _by_engine(setting: Callable[[Engine], str]) -> str:
    """The setting of each engine that has one."""
    return "; ".join(f"{engine.name}: {setting(engine)}" for engine in ENGINES.values() if setting(engine))


def _machine_memory(machine: Machine) -> int:
    for line in (machine.root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemTotal:"):
            return int(line.split()[1]) * 1024
    raise ValueError("/proc/meminfo has no MemTotal line")


# --- Python, clock, network and checkpoint folder ---------------------------------------------------------------------


_OLDEST_PYTHON = (3, 11)
_ANOTHER_FOLDER = "ddpkit doctor --dir DIR  # use another folder"
_MIN_FREE_DISK = 5 * GIB
_TORCH_PORTS = (29400, 29500)
_LOOPBACK = "127.0.0.1"
_TIMEOUT_SECONDS = 5


def python(machine: Machine) -> CheckResult:
    """Check whether the Python version is supported."""
    found = f"Python {'.'.join(map(str, machine.python))}"
    if machine.python < _OLDEST_PYTHON:
        oldest = ".".join(map(str, _OLDEST_PYTHON))
        return fail(f"{found} is older than {oldest}", f"python{oldest} -m venv .venv")
    return ok(found)


def clock(machine: Machine) -> CheckResult:
    """Check whether the clock is synchronised.

    With a wrong clock, TLS certificates may be rejected, and the logs of several nodes cannot be compared.
    """
    if machine.clock_synchronised is None:
        return ok("clock: synchronisation state unknown")
    if not machine.clock_synchronised:
        return warn("clock: not synchronised", "sudo timedatectl set-ntp true")
    return ok("clock: synchronised")


def host_name(machine: Machine) -> CheckResult:
    """Check whether the host name resolves to this machine: gloo and other nodes use the name to reach the machine."""
    name = machine.host
    result = machine.probes.host()
    fix = f'echo "127.0.1.1 {name}" >> /etc/hosts'
    if result.ran_out_of_time:
        return warn(f"host name {name!r} was not checked: {result.error}", f"{_AGAIN}; `getent hosts {name}` tests it")
    if result.error:
        return warn(f"host name {name!r} does not resolve: {result.error}", fix)
    addresses = ", ".join(result.facts["addresses"])
    if not result.facts["own"]:
        found = f"host name {name!r} resolves to {addresses}, which is not this machine"
        return warn(found, f"getent hosts {name}  # then correct the address in /etc/hosts or in the DNS")
    return ok(f"host name {name!r} resolves to {addresses}")


def loopback(_machine: Machine) -> CheckResult:
    """Check whether processes on this machine can connect to each other over TCP."""
    try:
        with socket.create_server((_LOOPBACK, 0)) as server:
            server.settimeout(_TIMEOUT_SECONDS)
            with socket.create_connection(server.getsockname(), _TIMEOUT_SECONDS):
                server.accept()[0].close()
    except TimeoutError:
        return warn(f"loopback: no connection to {_LOOPBACK} within {_TIMEOUT_SECONDS} s", _AGAIN)
    except OSError as error:
        return fail(f"loopback: connecting to {_LOOPBACK} failed: {error}", "sudo ip link set lo up")
    return ok(f"loopback: {_LOOPBACK} works")


def ports(_machine: Machine, wanted: Sequence[int] = _TORCH_PORTS) -> CheckResult:
    """Check whether torch's default rendezvous ports are free."""
    taken = [port for port in wanted if not _is_free(port)]
    if taken:
        found = "; ".join(f"port {port} is in use{holder(port)}" for port in taken)
        return warn(found, f"ddpkit launch --master-port {max(wanted) + 1} ...  # or end that process")
    return ok(f"ports {' and '.join(map(str, wanted))} are free")


def checkpoints(machine: Machine) -> CheckResult | None:
    """Check whether the checkpoint folder is writable and has enough free space."""
    folder = machine.checkpoints
    if folder is None:
        return None
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(bytes(4096))
            file.flush()
            os.fsync(file.fileno())
        _, free = machine.space(folder)
    except OSError as error:
        fix = _ANOTHER_FOLDER
        if not folder.exists():
            fix = f"mkdir -p {shlex.quote(str(folder))}"
        elif isinstance(error, PermissionError):
            fix = f"sudo chown $USER {shlex.quote(str(folder))}"
        return fail(f"checkpoint folder {folder} cannot be written to: {error.strerror}", fix)
    found = f"checkpoint folder {folder}: {size_text(free)} free"
    if free < _MIN_FREE_DISK:
        return warn(found, f"{_ANOTHER_FOLDER}; or free some disk space")
    return ok(found)


def kept_processes(machine: Machine) -> CheckResult | None:
    """Name the kept processes, which use memory."""
    if not machine.kept_processes:
        return None
    return ok(machine.kept_processes)


def _is_free(port: int) -> bool:
    with socket.socket() as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port that was just closed counts as free
        try:
            tried.bind(("", port))
        except OSError:
            return False
    return True


# --- GPUs -------------------------------------------------------------------------------------------------------------
# These checks do not use torch. Without a GPU, `driver` reports that in one line, and the other checks do not apply.


_NVIDIA = "0x10de"
_DISPLAY_CLASS = "0x03"  # PCI base class; audio devices and bridges have other ones
_INIT_PID = 1


def driver(machine: Machine) -> CheckResult:
    """Check whether the NVIDIA driver works, and list its GPUs. The check passes if the machine has no GPU."""
    found = machine.driver
    if found.cards:
        cuda = ".".join(map(str, found.cuda or ())) or "unknown"
        count = plural(len(found.cards), "GPU")
        names = ", ".join(dict.fromkeys(card.gpu.name for card in found.cards))
        return ok(f"{count}: {names}; driver {found.version} supports up to CUDA {cuda}")
    evidence = _evidence_of_gpu(machine)
    if not evidence and found.error and not found.absent:
        evidence = "NVML is installed"
    if not evidence:
        return ok("no NVIDIA GPU: training runs on the CPU")
    why = found.error or "the driver reports no GPU"
    return fail(f"{evidence}, but NVIDIA's driver does not work: {why}", _driver_fix(machine))


def visible_gpus(machine: Machine) -> CheckResult | None:
    """Check which GPUs CUDA_VISIBLE_DEVICES makes visible."""
    cards = machine.driver.cards
    mask = machine.env.get(VISIBLE_GPUS)
    if not cards:
        return None
    if mask is None:
        return ok(f"{VISIBLE_GPUS} is not set: all GPUs are visible ({len(cards)})")
    fix = f"unset {VISIBLE_GPUS}"
    asked = [word.strip() for word in mask.split(",")]
    if asked in ([""], ["-1"]):
        return warn(f"{VISIBLE_GPUS}={mask!r} hides all GPUs, so training runs on the CPU", fix)
    # Check the entries in turn: CUDA shows only the GPUs before an unknown entry, and none if a GPU is listed twice.
    seen = list(takewhile(bool, (machine.driver.visible({VISIBLE_GPUS: word}) for word in asked)))
    setting = f"{VISIBLE_GPUS}={mask}"
    if len(set(seen)) < len(seen):
        return fail(f"{setting} lists a GPU twice, so CUDA shows no GPU", fix)
    if len(seen) < len(asked):
        found = (
            f"{setting}: there is no GPU {asked[len(seen)]!r}, so CUDA ignores it and the rest of the list; "
            f"visible GPUs: {len(seen)}"
        )
        return fail(found, fix)
    if any(gpu.uuid.startswith("MIG-") for (gpu,) in seen):
        return ok(f"{setting}: {plural(len(seen), 'MIG device')} visible")
    return ok(f"{setting}: {len(seen)} of {len(cards)} GPUs visible")


def orphaned_processes(machine: Machine) -> CheckResult | None:
    """Check whether orphaned processes use a GPU."""
    if not machine.driver.cards:
        return None
    proc = machine.root / "proc"
    lines = []
    kills = []
    for index, pid in sorted({(card.gpu.index, pid) for card in machine.driver.cards for pid in card.processes}):
        if not (proc / str(pid)).exists():
            lines.append(f"GPU {index}: pid {pid}, which is not in {proc}")
        elif _is_orphan(proc, pid):
            command = masked(" ".join(_argv(proc, pid))) or _content(proc / str(pid) / "comm")
            lines.append(f"GPU {index}: pid {pid} of {_owner(proc, pid)}, {command}")
            kills.append(str(pid))
    if not lines:
        return ok("no orphaned process uses a GPU")
    fix = "nvidia-smi  # run this on the host, because the processes may run outside this container"
    if kills:
        fix = f"kill {' '.join(dict.fromkeys(kills))}  # if these processes are not needed"
    return warn(f"orphaned processes use a GPU: {'; '.join(lines)}", fix)


def ecc(machine: Machine) -> CheckResult | None:
    """Check whether the GPUs have uncorrected memory errors."""
    cards = machine.driver.cards
    if not cards:
        return None
    errors = {card.gpu.index: card.ecc_errors for card in cards if card.ecc_errors}
    if errors:
        found = "; ".join(f"GPU {index}: {number} uncorrected memory errors" for index, number in errors.items())
        reset = "; ".join(f"sudo nvidia-smi --gpu-reset -i {index}" for index in errors)
        return fail(found, f"{reset}  # if the errors come back, replace the GPU")
    if all(card.ecc_errors is None for card in cards):
        return ok("the GPUs do not report memory errors (ECC)")
    return ok("no uncorrected memory errors (ECC)")


def _evidence_of_gpu(machine: Machine) -> str:
    """Evidence, in words, of a GPU that the driver does not report; an empty string if there is none."""
    nodes = sorted((machine.root / "dev").glob("nvidia[0-9]*"))
    if nodes:
        return f"{nodes[0]} exists"
    for device in sorted((machine.root / "sys/bus/pci/devices").glob("*")):
        if _content(device / "vendor") == _NVIDIA and _content(device / "class").startswith(_DISPLAY_CLASS):
            return f"there is an NVIDIA card at {device.name} on the PCI bus"
    return ""


def _driver_fix(machine: Machine) -> str:
    error = machine.driver.error.lower()
    if "mismatch" in error or "lost" in error or "restart" in error:
        return "sudo reboot"
    if (machine.root / "proc/driver/nvidia/version").exists():  # the kernel module is loaded: the libraries are missing
        return "docker run --gpus all ...  # outside a container: reinstall NVIDIA's driver"
    return "sudo modprobe nvidia  # if the module does not exist, install NVIDIA's driver"


def _is_orphan(proc: Path, pid: int) -> bool:
    """Whether a process is orphaned, which means that its parent is process 1, normally init.

    In a container, process 1 may be a Python launcher instead. Its children are not orphans.
    """
    after_name = _content(proc / str(pid) / "stat").rpartition(")")[2].split()
    return after_name[1:2] == [str(_INIT_PID)] and not any("python" in word for word in _argv(proc, _INIT_PID)[:1])


def _owner(proc: Path, pid: int) -> str:
    number = (proc / str(pid)).stat().st_uid
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"


def _argv(proc: Path, pid: int) -> list[str]:
    return [word for word in _content(proc / str(pid) / "cmdline").split("\0") if word]


def _content(file: Path) -> str:
    try:
        return file.read_text(errors="replace").strip()
    except OSError:
        return ""


# --- torch ------------------------------------------------------------------------------------------------------------
# How torch was built, NCCL, and small computations.


_PIP = f"{sys.executable} -m pip install"
# The CUDA version that the driver must support, and PyTorch's package index for this version; newest first.
_PACKAGES = (((13, 0), "cu130"), ((12, 8), "cu128"), ((12, 0), "cu126"))


def torch(machine: Machine) -> CheckResult:
    """Check whether torch can be imported."""
    result = machine.probes.torch()
    if result.error == "ModuleNotFoundError: No module named 'torch'":
        return fail("torch is not installed", f"{_PIP} torch")
    if result.ran_out_of_time:
        return warn(f"torch was not checked: its import gave {result.error}", _AGAIN)
    if result.error:
        return fail(f"torch cannot be imported: {result.error}", f"{_PIP} --force-reinstall torch")
    cuda = result.facts["cuda"]
    built = f"CUDA {cuda}" if cuda else "CPU only"
    return ok(f"torch {result.facts['version']} ({built})")


def torch_and_driver(machine: Machine) -> CheckResult | None:
    """Check that torch was built with CUDA, and that the driver supports that CUDA version."""
    facts = _facts(machine)
    if not facts or not machine.driver.visible(machine.env):
        return None
    built = facts["cuda"]
    supported = machine.driver.cuda
    fix = _reinstall(_package(supported))
    if built is None:
        return fail(f"torch {facts['version']} was built without CUDA and cannot use a GPU", fix)
    if supported is None:
        return ok("the driver does not report which CUDA version it supports")
    found = f"torch was built for CUDA {built}, and the driver supports up to {supported[0]}.{supported[1]}"
    if int(built.split(".")[0]) > supported[0]:
        return fail(found, f"{fix}  # or update NVIDIA's driver")
    return ok(found)


def torch_and_gpus(machine: Machine) -> CheckResult | None:
    """Check whether torch was built for the architectures of the visible GPUs."""
    facts = _facts(machine)
    seen = {gpu.uuid for gpu in machine.driver.visible(machine.env)}
    cards = [card for card in machine.driver.cards if card.gpu.uuid in seen]
    needed = {card.capability: card.gpu.name for card in cards if card.capability}
    built_for = facts.get("architectures")
    if not built_for or not needed:
        return None
    for capability, name in needed.items():
        if not _runs_on(built_for, capability):
            found = f"torch was built for {' '.join(built_for)}, not for {name} ({_architecture(capability)})"
            too_old = all(_number(word) > _joined(capability) for word in built_for)
            package = _PACKAGES[-1][1] if too_old else _package(machine.driver.cuda)
            return fail(found, _reinstall(package))
    return ok(f"torch has code for {', '.join(map(_architecture, needed))}")


def nccl(machine: Machine) -> CheckResult | None:
    """Check whether torch was built with NCCL, the library that exchanges gradients between GPUs."""
    facts = _facts(machine)
    seen = machine.driver.visible(machine.env)
    if not facts.get("cuda") or not seen:
        return None
    if facts["nccl"]:
        return ok(f"NCCL {facts['nccl']}")
    if len(seen) == 1:
        return ok("torch was built without NCCL, which a single GPU does not need")
    return fail(
        "torch was built without NCCL, which training on several GPUs needs",
        _reinstall(_package(machine.driver.cuda)),
    )


def all_reduce(machine: Machine) -> CheckResult | None:
    """Check whether an all-reduce between two processes on the CPU works (gloo)."""
    if not _facts(machine):
        return None
    advice = "set the variable to the network interface to use"
    return _reduced(machine.probes.gloo(), "2 processes with gloo", "GLOO_SOCKET_IFNAME=lo", advice)


def all_reduce_of_gpus(machine: Machine) -> CheckResult | None:
    """Check whether an all-reduce between two GPUs works (NCCL)."""
    if machine.probes.nccl is None or not _facts(machine).get("nccl"):
        return None
    advice = "disable ACS or the IOMMU in the BIOS"
    return _reduced(machine.probes.nccl(), "2 GPUs with NCCL", "NCCL_P2P_DISABLE=1", advice)


def _reduced(result: ProbeResult, what: str, variable: str, advice: str) -> CheckResult:
    """The result of an all-reduce. `advice`: what to do if the all-reduce works with `variable`."""
    if result.ran_out_of_time:
        fix = f"{_AGAIN}; if that does not help: {variable} ddpkit doctor"
        return fail(f"all-reduce of {what} did not end: {result.error}", fix)
    if result.error:
        fix = f"{variable} ddpkit doctor  # if that helps, {advice}"
        return fail(f"all-reduce of {what} failed: {result.error}", fix)
    return ok(f"all-reduce of {what} works")


def matrix_product(machine: Machine) -> CheckResult | None:
    """Check whether each GPU computes the same matrix product as the CPU."""
    seen = machine.driver.visible(machine.env)
    if not _facts(machine).get("cuda") or not seen:
        return None
    results = {gpu: machine.probes.products[gpu.uuid]() for gpu in seen}
    errors = {gpu: result.error for gpu, result in results.items() if result.error}
    if not errors:
        return ok(f"a matrix product is correct on {plural(len(seen), 'GPU')}")
    found = "; ".join(f"GPU {gpu.index}: {error}" for gpu, error in errors.items())
    if all("out of memory" in error for error in errors.values()):
        return warn(
            f"no memory is left for a matrix product: {found}",
            "ddpkit doctor  # run it again once the GPU is free",
        )
    resets = "; ".join(f"sudo nvidia-smi --gpu-reset -i {gpu.index}" for gpu in errors)
    if all(results[gpu].ran_out_of_time for gpu in errors):
        return fail(f"a matrix product did not end: {found}", f"{_AGAIN}; if that does not help: {resets}")
    if any("802" in error for error in errors.values()):  # cudaErrorSystemNotReady
        resets = "sudo systemctl start nvidia-fabricmanager"
    return fail(f"a matrix product fails: {found}", resets)


def _facts(machine: Machine) -> Mapping[str, Any]:
    """What torch reports about itself; empty if it cannot be imported."""
    result = machine.probes.torch()
    return {} if result.error else result.facts


def _package(supported: Version | None) -> str:
    for oldest, name in _PACKAGES:
        if supported is not None and supported >= oldest:
            return name
    return _PACKAGES[0][1]


def _reinstall(package: str) -> str:
    return f"{_PIP} --force-reinstall torch --index-url https://download.pytorch.org/whl/{package}"


def _runs_on(built_for: Sequence[str], capability: Version) -> bool:
    """Whether a build of torch for these architectures runs on a GPU with this compute capability.

    Binary code (`sm_`) runs on GPUs with the same major version and the same or a later minor version. PTX code
    (`compute_`) also runs on GPUs with later major versions.

    Source: NVIDIA's CUDA C++ Programming Guide, "Binary compatibility" and "PTX compatibility".
    """
    return any(
        _number(word) <= _joined(capability) and (word.startswith("compute_") or _number(word) // 10 == capability[0])
        for word in built_for
    )


def _number(architecture: str) -> int:
    """The number in the name of an architecture, such as 90 in `sm_90a`."""
    return int("".join(letter for letter in architecture if letter.isdecimal()))


def _joined(capability: Version) -> int:
    return 10 * capability[0] + capability[1]


def _architecture(capability: Version) -> str:
    return f"sm_{_joined(capability)}"
