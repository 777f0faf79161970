"""torch, and whether it does on this machine what training asks of it."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from ddp_kit.launcher.doctor.driver import Version
from ddp_kit.launcher.doctor.machine import Machine
from ddp_kit.launcher.doctor.result import CheckResult, fail, ok, warn

_PIP = f"{sys.executable} -m pip install"
# The oldest driver (by the CUDA that it serves) for which PyTorch has packages, and their name; newest first.
_PACKAGES = (((13, 0), "cu130"), ((12, 8), "cu128"), ((12, 0), "cu126"))


def torch(machine: Machine) -> CheckResult:
    """Whether torch can be imported."""
    answer = machine.trials.torch()
    if answer.error == "ModuleNotFoundError: No module named 'torch'":
        return fail("torch", "torch is not installed", f"{_PIP} torch")
    if answer.error:
        return fail("torch", f"torch cannot be imported: {answer.error}", f"{_PIP} --force-reinstall torch")
    built = f"CUDA {answer.facts['cuda']}" if answer.facts["cuda"] else "CPU only"
    return ok("torch", f"torch {answer.facts['version']} ({built})")


def torch_and_driver(machine: Machine) -> CheckResult | None:
    """Whether torch was built for GPUs, and for a CUDA that the driver serves."""
    facts, seen = _facts(machine), machine.driver.visible(machine.env)
    if facts is None or not seen:
        return None
    built, served = facts["cuda"], machine.driver.cuda
    fix = _reinstall(_package(served))
    if built is None:
        return fail("torch and driver", f"torch {facts['version']} was built without CUDA: it uses no GPU", fix)
    if served is None:
        return ok("torch and driver", "the driver does not tell which CUDA it serves")
    words = f"torch was built for CUDA {built}, and the driver serves up to {served[0]}.{served[1]}"
    if int(built.split(".")[0]) > served[0]:
        return fail("torch and driver", words, f"{fix}  # or update NVIDIA's driver")
    return ok("torch and driver", words)


def torch_and_gpus(machine: Machine) -> CheckResult | None:
    """Whether torch has code for the GPUs' architectures."""
    facts = _facts(machine)
    seen = {gpu.uuid for gpu in machine.driver.visible(machine.env)}
    needed = {card.capability: card.gpu.name for card in machine.driver.cards if card.gpu.uuid in seen}
    needed.pop(None, None)
    if facts is None or not facts["architectures"] or not needed:
        return None
    built_for = facts["architectures"]
    for capability, name in needed.items():
        if capability and not _runs_on(built_for, capability):
            found = f"torch was built for {' '.join(built_for)}, not for {name} ({_architecture(capability)})"
            too_old = all(_number(word) > _joined(capability) for word in built_for)
            package = _PACKAGES[-1][1] if too_old else _package(machine.driver.cuda)
            return fail("torch and GPUs", found, _reinstall(package))
    return ok("torch and GPUs", f"torch has code for {', '.join(_architecture(found) for found in needed if found)}")


def nccl(machine: Machine) -> CheckResult | None:
    """Whether torch brings NCCL, which GPUs exchange gradients over."""
    facts, seen = _facts(machine), machine.driver.visible(machine.env)
    if facts is None or not facts["cuda"] or not seen:
        return None
    if facts["nccl"]:
        return ok("NCCL", f"NCCL {facts['nccl']}")
    if len(seen) == 1:
        return ok("NCCL", "torch was built without NCCL, which a single GPU does without")
    return fail(
        "NCCL", "torch was built without NCCL: GPUs cannot train together", _reinstall(_package(machine.driver.cuda))
    )


def all_reduce(machine: Machine) -> CheckResult | None:
    """Two processes add two tensors on the CPU."""
    if _facts(machine) is None:
        return None
    answer = machine.trials.gloo()
    if answer.error:
        fix = "GLOO_SOCKET_IFNAME=lo ddpkit doctor  # if that helps: the variable names the interface to use"
        return fail("all-reduce", f"2 processes cannot add up over gloo: {answer.error}", fix)
    return ok("all-reduce", "2 processes add up over gloo")


def all_reduce_of_gpus(machine: Machine) -> CheckResult | None:
    """The same on two GPUs."""
    facts = _facts(machine)
    if machine.trials.nccl is None or facts is None or not facts["nccl"]:
        return None
    answer = machine.trials.nccl()
    if answer.error:
        fix = "NCCL_P2P_DISABLE=1 ddpkit doctor  # if that helps: switch ACS or the IOMMU off in the BIOS"
        return fail("all-reduce of GPUs", f"2 GPUs cannot add up over NCCL: {answer.error}", fix)
    return ok("all-reduce of GPUs", "2 GPUs add up over NCCL")


def product(machine: Machine) -> CheckResult | None:
    """A matrix product on each GPU gives what the CPU gives."""
    facts, seen = _facts(machine), machine.driver.visible(machine.env)
    if facts is None or not facts["cuda"] or not seen:
        return None
    errors = {gpu: error for gpu in seen if (error := machine.trials.products[gpu.uuid]().error)}
    if not errors:
        return ok("matrix product", f"a matrix product is right on {len(seen)} GPU{'s' if len(seen) > 1 else ''}")
    found = "; ".join(f"GPU {gpu.index}: {error}" for gpu, error in errors.items())
    if all("out of memory" in error for error in errors.values()):
        return warn(
            "matrix product",
            f"no memory is left for a matrix product: {found}",
            "ddpkit doctor  # once the GPU is free",
        )
    if any("802" in error for error in errors.values()):  # cudaErrorSystemNotReady
        fix = "sudo systemctl start nvidia-fabricmanager"
    else:
        fix = "; ".join(f"sudo nvidia-smi --gpu-reset -i {gpu.index}" for gpu in errors)
    return fail("matrix product", f"a matrix product fails: {found}", fix)


def _facts(machine: Machine) -> Mapping[str, Any] | None:
    answer = machine.trials.torch()
    return None if answer.error else answer.facts


def _package(served: Version | None) -> str:
    return next((name for oldest, name in _PACKAGES if served is not None and served >= oldest), _PACKAGES[0][1])


def _reinstall(package: str) -> str:
    return f"{_PIP} --force-reinstall torch --index-url https://download.pytorch.org/whl/{package}"


def _runs_on(built_for: Sequence[str], capability: Version) -> bool:
    """Machine code runs on its own generation from its own number on, portable code on all that came later.

    Source: NVIDIA's CUDA C++ Programming Guide, "Binary compatibility" and "PTX compatibility".
    """
    return any(
        _number(word) <= _joined(capability) and (word.startswith("compute_") or _number(word) // 10 == capability[0])
        for word in built_for
    )


def _number(architecture: str) -> int:
    """90 of `sm_90a`."""
    return int("".join(letter for letter in architecture if letter.isdecimal()))


def _joined(capability: Version) -> int:
    return 10 * capability[0] + capability[1]


def _architecture(capability: Version) -> str:
    return f"sm_{_joined(capability)}"
