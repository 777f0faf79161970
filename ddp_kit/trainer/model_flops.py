"""Floating-point operations (FLOPs) of a model, and the share of the GPUs' peak rate that a run reaches (MFU)."""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ddp_kit.distributed.world import World, gathered
from ddp_kit.heartbeat import HeartbeatWriter, Phase
from ddp_kit.log import logger
from ddp_kit.trainer.context import TrainerContext

# --- Peak rates of GPUs -----------------------------------------------------------------------------------------------
# The rates are stated by the manufacturers, for dense matrix products (without sparsity) at boost clock.


@dataclass(frozen=True)
class PeakRates:
    """Peak rates of one kind of GPU."""

    name: str
    """A regular expression that must match the full device name that torch reports, without the prefix "NVIDIA "."""
    teraflops: Mapping[str, float]
    """Peak TFLOP/s of matrix products for each supported data type: fp32, tf32, bf16, fp16 or fp8."""
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
    """The peak FLOP/s of a device by data type; empty for devices that are not in the table, such as MIG slices."""
    name = device_name.removeprefix("NVIDIA ")
    found = next((rates.teraflops for rates in TABLE if re.fullmatch(rates.name, name)), {})
    return {kind: rate * 1e12 for kind, rate in found.items()}


# --- Model FLOPs utilisation (MFU) ------------------------------------------------------------------------------------
# The FLOPs per second that the model needs, divided by the peak rate of the devices.
#
#     the first step     each rank counts the FLOPs of its passes; their sum is divided by the samples of the step
#     each log point     samples/s x FLOPs per sample / (devices x peak rate)
#
# Source: Chowdhery et al., PaLM, 2022, appendix B. Causal attention counts in full; recomputed activations do not
# count.


_KINDS = {
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8",
    torch.float8_e5m2: "fp8",
}
_NOTHING = nullcontext()
_OTHER = torch.float64  # stands for all other types, whose peak rates are not known


class ModelFlops:
    """Counts the FLOPs of one sample in the first step, and computes the MFU from the samples per second."""

    def __init__(self, context: TrainerContext, *, evaluates_once: bool) -> None:
        """`evaluates_once`: whether a step evaluates one loss, once per batch; otherwise, FLOPs are not counted."""
        config = context.config
        self._world = context.world
        self._heartbeat = context.heartbeat
        self._precision = config.precision
        self._devices = self._world.world_size
        if config.parallel.strategy == "device_map":
            self._devices *= max(1, len(self._world.gpus))
        self._copies = max(1, config.parallel.tensor)  # each rank of a tensor-parallel group counts whole products
        self._seconds_per_sample: float | None = None  # of one device at its peak rate
        self._counts = False
        if not config.mfu:
            return
        self._peak = peak_rates(device_name(self._world))
        if not self._peak:
            self._not_known(f"the peak rate of {device_name(self._world)} is not known")
        elif config.parallel.share_gpus:
            self._not_known("ranks share GPUs")
        elif not evaluates_once:
            self._not_known("a step has several updates, or evaluates its loss several times")
        else:
            self._counts = True

    def counted(self, samples: int) -> AbstractContextManager[None]:
        """Context manager for a step. In the first one that succeeds, counts the FLOPs, which is a collective.

        `samples`: the samples of the step on all ranks.
        """
        return self._counting(samples) if self._counts else _NOTHING

    def utilisation(self, samples_per_second: float) -> float | None:
        """The MFU, from 0 to 1, for this number of samples per second over all ranks; None if unknown."""
        if self._seconds_per_sample is None:
            return None
        return samples_per_second * self._seconds_per_sample / self._devices

    @contextmanager
    def _counting(self, samples: int) -> Iterator[None]:
        with FlopCount(self._heartbeat) as count:
            yield
        self._counts = False
        kinds = [*_KINDS, _OTHER]
        numbers = [count.flops[dtype] for dtype in kinds]
        of_ranks = gathered(self._world, [*numbers, count.flops.total(), int(bool(count.unknown))])
        *sums, total, unknown = map(sum, zip(*of_ranks, strict=True))
        if unknown:
            self._not_known(f"the FLOPs of {count.unknown or 'an operation on another rank'} are not known")
            return
        if not total:
            self._not_known("the model has no matrix products or convolutions")
            return
        kind = self._kind(kinds[sums.index(max(sums))])
        if kind not in self._peak:
            self._not_known(f"the peak rate of {device_name(self._world)} in {kind} is not known")
            return
        per_sample = total / self._copies / samples
        self._seconds_per_sample = per_sample / self._peak[kind]
        if self._world.is_main:
            logger.info(
                "mfu: {:.3g} GFLOP per sample, forward and backward; the peak rate of a device is {:.4g} TFLOP/s in {}",
                per_sample / 1e9,
                self._peak[kind] / 1e12,
                kind,
            )

    def _kind(self, dtype: torch.dtype) -> str:
        """The key in the table of peak rates for `dtype`, the data type of most matrix products."""
        if self._precision in ("fp8", "tf32") and dtype in (torch.float32, torch.bfloat16):
            return self._precision
        return _KINDS.get(dtype, str(dtype).removeprefix("torch."))

    def _not_known(self, reason: str) -> None:
        if self._world.is_main:
            logger.info("mfu: not available: {}", reason)


_WITHOUT_FORMULA = ("_cudnn_rnn", "miopen_rnn", "mkldnn_rnn_layer", "_trilinear")
"""Operations of torch that contain matrix products, but have no formula."""


class FlopCount(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the FLOPs of matrix products, convolutions and attention in the passes of a step, by torch's formulas.

    Operations that recompute activations during the backward pass do not count, nor do products outside of the passes,
    such as those of the optimizer. torch's `FlopCounterMode` would run composite operations in parts, whose results
    differ in the last bits.
    """

    supports_higher_order_operators = True  # such as flex_attention

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Tell torch.compile that it may compile in this mode, which then sees the operations of compiled code."""
        return True

    def __init__(self, heartbeat: HeartbeatWriter) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._heartbeat = heartbeat
        self._formulas = _formulas()
        self.flops: Counter[torch.dtype] = Counter()
        """The number of FLOPs, by the dtype of the first factor."""
        self.unknown = ""
        """The name of an operation whose FLOPs are not known; empty if there was none."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = getattr(func, "overloadpacket", func)
        formula = self._formulas.get(packet)
        if formula is None and torch.is_inference_mode_enabled():  # there, composite operations arrive as such
            with self:
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        result = func(*args, **kwargs)
        if formula is not None and self._is_counted():
            self.flops[args[0].dtype] += formula(*args, **kwargs, out_val=result)
        elif getattr(packet, "__name__", "") in _WITHOUT_FORMULA:
            self.unknown = str(packet)
        return result

    def _is_counted(self) -> bool:
        phase = self._heartbeat.phase
        # In the backward pass, only recomputation enables gradients.
        return phase is Phase.FORWARD or (phase is Phase.BACKWARD and not torch.is_grad_enabled())


def _formulas() -> dict[Any, Callable[..., int]]:
    """Operation -> a function of its arguments that returns its FLOPs."""
    from torch.utils.flop_counter import flop_registry  # imported here, because few runs need it

    aten = torch.ops.aten
    formulas: dict[Any, Callable[..., int]] = {**flop_registry}
    for packet, formula in flop_registry.items():
        if str(packet).endswith("attention_backward"):
            formulas[packet] = _without_recomputed_product(formula)
    return formulas | {
        aten.convolution_backward: _convolution_backward,
        aten._scaled_dot_product_flash_attention_for_cpu: _attention,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
        aten.mv: _matrix_and_vector,
    }


def _matrix_and_vector(matrix: Tensor, _vector: Tensor, **_: Any) -> int:
    return 2 * matrix.numel()


def _without_recomputed_product(formula: Callable[..., int]) -> Callable[..., int]:
    """The formula of attention's backward pass without the one of its five products that it computes again."""
    return lambda *args, **kwargs: formula(*args, **kwargs) * 4 // 5


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """FLOPs of attention: the products of queries and keys, and of the scores and values."""
    batch, heads, length, width = query.shape
    return 2 * batch * heads * length * key.shape[2] * (width + value.shape[3])


def _attention_backward(_gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    return 2 * _attention(query, key, value)


def _convolution_backward(
    gradient: Tensor,
    inputs: Tensor,
    weight: Tensor,
    *settings: Any,
    out_val: object = None,  # noqa: ARG001
) -> int:
    """FLOPs of a convolution's backward pass: as many as in the forward pass for each requested gradient.

    torch's own formula wrongly multiplies the FLOPs of the weight's gradient by the number of groups.
    """
    *_, transposed, _output_padding, _groups, requested = settings
    positions = (inputs if transposed else gradient).shape[2:]
    return 2 * inputs.shape[0] * prod(positions) * weight.numel() * int(sum(requested[:2]))


def device_name(world: World) -> str:
    """The name that torch gives to this rank's device."""
    if world.device.type == "cuda":
        return torch.cuda.get_device_name(world.device)
    return world.device.type
