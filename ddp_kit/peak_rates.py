"""The peak rates of GPUs, as their makers state them: dense matrix products, without sparsity, at boost clock."""

import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class PeakRates:
    """One kind of GPU."""

    name: str
    """A regular expression for the whole name that torch gives the device, without "NVIDIA "."""
    teraflops: Mapping[str, float]
    """By type of the products: fp32, tf32, bf16, fp16, fp8. A type that the device does not support is left out."""
    source: str


_HOPPER_SXM = {"fp32": 66.9, "tf32": 494.7, "bf16": 989.4, "fp16": 989.4, "fp8": 1978.9}
_HOPPER_NVL = {"fp32": 60.0, "tf32": 417.5, "bf16": 835.5, "fp16": 835.5, "fp8": 1670.5}

TABLE: tuple[PeakRates, ...] = (
    PeakRates(r"H100 80GB HBM3|H100 SXM5.*", _HOPPER_SXM, "H100 Tensor Core GPU Architecture white paper"),
    PeakRates(
        r"H100 PCIe",
        {"fp32": 51.2, "tf32": 378.0, "bf16": 756.0, "fp16": 756.0, "fp8": 1513.0},
        "H100 Tensor Core GPU Architecture white paper",
    ),
    PeakRates(r"H100 NVL", _HOPPER_NVL, "H100 Tensor Core GPU data sheet; half of the rates with sparsity"),
    PeakRates(r"H200", _HOPPER_SXM, "H200 Tensor Core GPU data sheet: the rates of the H100 SXM"),
    PeakRates(r"H200 NVL", _HOPPER_NVL, "H200 Tensor Core GPU data sheet; half of the rates with sparsity"),
    PeakRates(
        r"B200",
        {"fp32": 75.0, "tf32": 1100.0, "bf16": 2250.0, "fp16": 2250.0, "fp8": 4500.0},
        "HGX B200 data sheet, per GPU; half of the rates with sparsity",
    ),
    PeakRates(
        r"A100-(SXM4|PCIE)-(40|80)GB|A100 80GB PCIe",
        {"fp32": 19.5, "tf32": 156.0, "bf16": 312.0, "fp16": 312.0},
        "A100 Tensor Core GPU data sheet",
    ),
    PeakRates(r"A10", {"fp32": 31.2, "tf32": 62.5, "bf16": 125.0, "fp16": 125.0}, "A10 Tensor Core GPU data sheet"),
    PeakRates(
        r"L4",
        {"fp32": 30.3, "tf32": 60.0, "bf16": 121.0, "fp16": 121.0, "fp8": 242.5},
        "L4 Tensor Core GPU data sheet; half of the rates with sparsity",
    ),
    PeakRates(
        r"L40S",
        {"fp32": 91.6, "tf32": 183.0, "bf16": 362.0, "fp16": 362.0, "fp8": 733.0},
        "L40S GPU data sheet",
    ),
    PeakRates(r"Tesla V100-SXM[23]-(16|32)GB.*", {"fp32": 15.7, "fp16": 125.0}, "V100 Tensor Core GPU data sheet"),
    PeakRates(r"Tesla V100-PCIE-(16|32)GB", {"fp32": 14.0, "fp16": 112.0}, "V100 Tensor Core GPU data sheet"),
    PeakRates(r"Tesla T4", {"fp32": 8.1, "fp16": 65.0}, "T4 Tensor Core GPU data sheet"),
    PeakRates(
        r"GeForce RTX 3090",
        {"fp32": 35.6, "tf32": 35.6, "bf16": 71.0, "fp16": 71.0},
        "Ampere GA102 GPU Architecture white paper, with FP32 accumulation",
    ),
    PeakRates(
        r"GeForce RTX 4090",
        {"fp32": 82.6, "tf32": 82.6, "bf16": 165.2, "fp16": 165.2, "fp8": 330.3},
        "Ada GPU Architecture white paper, with FP32 accumulation",
    ),
    PeakRates(
        r"AMD Instinct MI300X",
        {"fp32": 163.4, "bf16": 1307.4, "fp16": 1307.4, "fp8": 2614.9},
        "AMD Instinct MI300X data sheet",
    ),
)


def peak_rates(device_name: str) -> Mapping[str, float]:
    """FLOP per second of one device by type; empty for a device that is not in the table, such as a part of a GPU."""
    name = device_name.removeprefix("NVIDIA ")
    found = next((each.teraflops for each in TABLE if re.fullmatch(each.name, name)), {})
    return {kind: rate * 1e12 for kind, rate in found.items()}
