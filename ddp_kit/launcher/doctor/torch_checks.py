"""Checks of torch: its build, NCCL, and small computations."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from ddp_kit.launcher.doctor.driver import Version
from ddp_kit.launcher.doctor.machine import Machine
from ddp_kit.launcher.doctor.result import CheckResult, fail, ok, warn

_PIP = f"{sys.executable} -m pip install"
# CUDA version that the driver must support -> PyTorch's package index for it; newest first.
_PACKAGES = (((13, 0), "cu130"), ((12, 8), "cu128"), ((12, 0), "cu126"))


def torch(machine: Machine) -> CheckResult:
    """Whether torch can be imported."""
    result = machine.probes.torch()
    if result.error == "ModuleNotFoundError: No module named 'torch'":
        return fail("torch", "torch is not installed", f"{_PIP} torch")
    if result.error:
        return fail("torch", f"torch cannot be imported: {result.error}", f"{_PIP} --force-reinstall torch")
    built = f"CUDA {result.facts['cuda']}" if result.facts["cuda"] else "CPU only"
    return ok("torch", f"torch {result.facts['version']} ({built})")


def torch_and_driver(machine: Machine) -> CheckResult | None:
    """Whether torch was built for GPUs, and for a CUDA version that the driver supports."""
    facts, seen = _facts(machine), machine.driver.visible(machine.env)
    if facts is None or not seen:
        return None
    built, supported = facts["cuda"], machine.driver.cuda
    fix = _reinstall(_package(supported))
    if built is None:
        return fail("torch and driver", f"torch {facts['version']} was built without CUDA and cannot use a GPU", fix)
    if supported is None:
        return ok("torch and driver", "the driver does not report which CUDA version it supports")
    found = f"torch was built for CUDA {built}, and the driver supports up to {supported[0]}.{supported[1]}"
    if int(built.split(".")[0]) > supported[0]:
        return fail("torch and driver", found, f"{fix}  # or update NVIDIA's driver")
    return ok("torch and driver", found)


def torch_and_gpus(machine: Machine) -> CheckResult | None:
    """Whether torch was built for the GPUs' architectures."""
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
    """Whether torch was built with NCCL, which GPUs use to exchange gradients."""
    facts, seen = _facts(machine), machine.driver.visible(machine.env)
    if facts is None or not facts["cuda"] or not seen:
        return None
    if facts["nccl"]:
        return ok("NCCL", f"NCCL {facts['nccl']}")
    if len(seen) == 1:
        return ok("NCCL", "torch was built without NCCL, which a single GPU does not need")
    return fail(
        "NCCL", "torch was built without NCCL: GPUs cannot train together", _reinstall(_package(machine.driver.cuda))
    )


def all_reduce(machine: Machine) -> CheckResult | None:
    """An all-reduce of two processes on the CPU."""
    if _facts(machine) is None:
        return None
    result = machine.probes.gloo()
    if result.error:
        fix = "GLOO_SOCKET_IFNAME=lo ddpkit doctor  # if that helps, set it to the interface to use"
        return fail("all-reduce", f"all-reduce of 2 processes with gloo failed: {result.error}", fix)
    return ok("all-reduce", "all-reduce of 2 processes with gloo works")


def all_reduce_of_gpus(machine: Machine) -> CheckResult | None:
    """An all-reduce of two GPUs with NCCL."""
    facts = _facts(machine)
    if machine.probes.nccl is None or facts is None or not facts["nccl"]:
        return None
    result = machine.probes.nccl()
    if result.error:
        fix = "NCCL_P2P_DISABLE=1 ddpkit doctor  # if that helps, disable ACS or the IOMMU in the BIOS"
        return fail("all-reduce of GPUs", f"all-reduce of 2 GPUs with NCCL failed: {result.error}", fix)
    return ok("all-reduce of GPUs", "all-reduce of 2 GPUs with NCCL works")


def matrix_product(machine: Machine) -> CheckResult | None:
    """Whether a matrix product on each GPU has the same result as on the CPU."""
    facts, seen = _facts(machine), machine.driver.visible(machine.env)
    if facts is None or not facts["cuda"] or not seen:
        return None
    errors = {gpu: error for gpu in seen if (error := machine.probes.products[gpu.uuid]().error)}
    if not errors:
        return ok("matrix product", f"a matrix product is correct on {len(seen)} GPU{'s' if len(seen) > 1 else ''}")
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
    result = machine.probes.torch()
    return None if result.error else result.facts


def _package(supported: Version | None) -> str:
    return next((name for oldest, name in _PACKAGES if supported is not None and supported >= oldest), _PACKAGES[0][1])


def _reinstall(package: str) -> str:
    return f"{_PIP} --force-reinstall torch --index-url https://download.pytorch.org/whl/{package}"


def _runs_on(built_for: Sequence[str], capability: Version) -> bool:
    """Whether a build runs on a GPU: sm_ code on the same major version, compute_ code (PTX) on all later ones.

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
