"""Checks of GPUs without torch. On a machine without GPUs, one line says so and the other checks do not apply."""

import pwd
from itertools import takewhile
from pathlib import Path

from ddp_kit.env import VISIBLE_GPUS
from ddp_kit.launcher.doctor.machine import Machine
from ddp_kit.launcher.doctor.result import CheckResult, fail, ok, warn
from ddp_kit.masking import masked

_NVIDIA = "0x10de"
_DISPLAY_CLASS = "0x03"  # in PCI's list of classes; sound and bridges are other ones
_INIT_PID = 1


def driver(machine: Machine) -> CheckResult:
    """The NVIDIA driver and its GPUs, or that there are none."""
    found = machine.driver
    if found.cards:
        cuda = ".".join(map(str, found.cuda or ())) or "unknown"
        count = len(found.cards)
        names = ", ".join(dict.fromkeys(card.gpu.name for card in found.cards))
        summary = f"{count} GPU{'s' if count > 1 else ''}: {names}; driver {found.version}, up to CUDA {cuda}"
        return ok("driver", summary)
    evidence = _evidence_of_gpu(machine)
    if not evidence and found.error and not found.absent:
        evidence = "NVML is installed"
    if not evidence:
        return ok("driver", "no NVIDIA GPU: training runs on the CPU")
    why = found.error or "it reports no GPU"
    return fail("driver", f"{evidence}, but NVIDIA's driver does not work: {why}", _driver_fix(machine))


def visible_gpus(machine: Machine) -> CheckResult | None:
    """Which GPUs CUDA_VISIBLE_DEVICES shows."""
    cards, mask = machine.driver.cards, machine.env.get(VISIBLE_GPUS)
    if not cards:
        return None
    if mask is None:
        return ok("visible GPUs", f"{VISIBLE_GPUS} is not set: all {len(cards)} visible")
    fix = f"unset {VISIBLE_GPUS}"
    asked = [word.strip() for word in mask.split(",")]
    if asked in ([""], ["-1"]):
        return warn("visible GPUs", f"{VISIBLE_GPUS}={mask!r} hides all GPUs: training runs on the CPU", fix)
    # One by one: CUDA shows the GPUs before an unknown one, and none at all if one is listed twice.
    seen = list(takewhile(bool, (machine.driver.visible({VISIBLE_GPUS: word}) for word in asked)))
    setting = f"{VISIBLE_GPUS}={mask}"
    if len(set(seen)) < len(seen):
        return fail("visible GPUs", f"{setting} lists a GPU twice: CUDA then shows none", fix)
    if len(seen) < len(asked):
        found = f"{setting}: there is no GPU {asked[len(seen)]!r}, and CUDA stops reading there: {len(seen)} visible"
        return fail("visible GPUs", found, fix)
    if any(gpu.uuid.startswith("MIG-") for (gpu,) in seen):
        return ok("visible GPUs", f"{setting}: {len(seen)} MIG device{'s' if len(seen) > 1 else ''} visible")
    return ok("visible GPUs", f"{setting}: {len(seen)} of {len(cards)} visible")


def orphaned_processes(machine: Machine) -> CheckResult | None:
    """Orphaned processes that use a GPU."""
    if not machine.driver.cards:
        return None
    proc = machine.root / "proc"
    lines, kills = [], []
    for index, pid in sorted({(card.gpu.index, pid) for card in machine.driver.cards for pid in card.processes}):
        if not (proc / str(pid)).exists():
            lines.append(f"GPU {index}: pid {pid}, which is not in {proc}")
        elif _is_orphan(proc, pid):
            command = masked(" ".join(_words(proc, pid))) or _text(proc / str(pid) / "comm")
            lines.append(f"GPU {index}: pid {pid} of {_user(proc, pid)}, {command}")
            kills.append(str(pid))
    if not lines:
        return ok("GPU processes", "no orphaned process uses a GPU")
    fix = "nvidia-smi  # on the host, because they may run outside this container"
    if kills:
        fix = f"kill {' '.join(dict.fromkeys(kills))}  # if they are not needed"
    return warn("GPU processes", f"orphaned processes use a GPU: {'; '.join(lines)}", fix)


def ecc(machine: Machine) -> CheckResult | None:
    """Uncorrected memory errors of the GPUs."""
    cards = machine.driver.cards
    if not cards:
        return None
    errors = {card.gpu.index: card.ecc_errors for card in cards if card.ecc_errors}
    if errors:
        found = "; ".join(f"GPU {index}: {number} uncorrected memory errors" for index, number in errors.items())
        reset = "; ".join(f"sudo nvidia-smi --gpu-reset -i {index}" for index in errors)
        return fail("ECC", found, f"{reset}  # if they come back, replace the GPU")
    if all(card.ecc_errors is None for card in cards):
        return ok("ECC", "these GPUs do not count memory errors (ECC)")
    return ok("ECC", "no uncorrected memory errors (ECC)")


def _evidence_of_gpu(machine: Machine) -> str:
    """Evidence of a GPU that the driver does not report; empty: none."""
    node = next(iter(sorted((machine.root / "dev").glob("nvidia[0-9]*"))), None)
    if node is not None:
        return f"there is {node}"
    for device in sorted((machine.root / "sys/bus/pci/devices").glob("*")):
        if _text(device / "vendor") == _NVIDIA and _text(device / "class").startswith(_DISPLAY_CLASS):
            return f"there is an NVIDIA card at {device.name} on the PCI bus"
    return ""


def _driver_fix(machine: Machine) -> str:
    error = machine.driver.error.lower()
    if "mismatch" in error or "lost" in error or "restart" in error:
        return "sudo reboot"
    if (machine.root / "proc/driver/nvidia/version").exists():  # the kernel module is loaded: the libraries are missing
        return "docker run --gpus all ...  # outside a container: reinstall NVIDIA's driver"
    return "sudo modprobe nvidia  # if there is no such module, install NVIDIA's driver"


def _is_orphan(proc: Path, pid: int) -> bool:
    """Whether its parent is init. In a container, process 1 may be a launcher, whose children are not orphans."""
    after_name = _text(proc / str(pid) / "stat").rpartition(")")[2].split()
    return after_name[1:2] == [str(_INIT_PID)] and not any("python" in word for word in _words(proc, _INIT_PID)[:1])


def _user(proc: Path, pid: int) -> str:
    number = (proc / str(pid)).stat().st_uid
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"


def _words(proc: Path, pid: int) -> list[str]:
    return [word for word in _text(proc / str(pid) / "cmdline").split("\0") if word]


def _text(file: Path) -> str:
    try:
        return file.read_text(errors="replace").strip()
    except OSError:
        return ""
