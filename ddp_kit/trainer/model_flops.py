"""Floating-point operations (FLOPs) of a model, and the share of the GPUs' peak rate that a run reaches (MFU)."""

import copy
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from ddp_kit.config.settings import TrainerConfig
from ddp_kit.data.collate import unpacked
from ddp_kit.data.feed import Share
from ddp_kit.distributed.world import World, random_states, set_random_states
from ddp_kit.log import logger
from ddp_kit.memory.fake import FakeTensors, is_fake
from ddp_kit.metrics import Loss, checked
from ddp_kit.model.precision import Precision
from ddp_kit.structures import each_leaf
from ddp_kit.texts import first_line
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
#     Trainer(...)              copies the user's model to fake tensors, before it is compiled or distributed over ranks
#     the first step            records the shapes of its first batch
#     after the first step      runs loss_fn(copy, batch).backward() on fake tensors, and counts FLOPs
#     each log point            samples/s x FLOPs per sample / (devices x peak rate)
#
# Source: Chowdhery et al., PaLM, 2022, appendix B. Causal attention counts in full; recomputed activations do not
# count.


_KINDS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


class ModelFlops:
    """Counts the FLOPs of one sample, and computes the model FLOPs utilisation (MFU) from the samples per second."""

    def __init__(self, model: nn.Module, config: TrainerConfig, world: World, precision: Precision) -> None:
        """Copy the model if `config.mfu` is set. Must be called before the model is compiled or distributed."""
        self._world = world
        self._precision = config.precision
        self._devices = world.world_size
        if config.parallel.strategy == "device_map":
            self._devices *= max(1, len(world.gpus))
        self._copy: nn.Module | None = None
        self._batch: Any = None
        self._samples = 0  # of the batch; 0: no batch seen yet
        self._seconds_per_sample: float | None = None  # of one device at its peak rate
        if not config.mfu:
            return
        self._peak = peak_rates(device_name(world))
        if not self._peak:
            self._not_known(f"the peak rate of {device_name(world)} is not known")
            return
        if config.parallel.share_gpus:
            self._not_known("ranks share GPUs")
            return
        self._fakes = FakeTensors()
        kept = set(map(id, precision.kept_buffers(model).values()))
        # `deepcopy` takes these from the memo. Other tensors of the model stay on their device.
        memo: dict[int, Any] = {
            id(tensor): self._fakes.like(tensor, world.device, None if id(tensor) in kept else precision.weights_dtype)
            for tensor in (*model.parameters(), *model.buffers())
        }
        try:
            with _CopiesWithoutMemory(self._fakes):
                self._copy = copy.deepcopy(model, memo)
        except Exception as error:
            self._not_known(f"{type(model).__name__} cannot be copied: {first_line(error)}")

    @property
    def ready(self) -> bool:
        """Whether a batch has been recorded, and its FLOPs have not been counted yet."""
        return self._copy is not None and self._samples > 0

    def watched(self, fetch: Callable[[], Any], share: Share) -> Callable[[], Any]:
        """Wrap `fetch`, a function that returns the next batch, so that the shapes of the first batch are recorded.

        Returns `fetch` itself once the FLOPs have been counted, or if this rank has no samples in the step.
        """
        if self._copy is None or not share.passes or not share.passes[0]:
            return fetch

        def first() -> Any:
            batch = fetch()
            if not self.ready:
                samples, plain = unpacked(share.passes[0], batch)
                try:
                    self._batch, self._samples = each_leaf(self._shape, plain), samples
                except Exception as error:
                    self._copy = None
                    self._not_known(f"a batch of {type(plain).__name__} cannot be copied: {first_line(error)}")
            return batch

        return first

    def utilisation(self, samples_per_second: float) -> float | None:
        """The MFU, from 0 to 1, for this number of samples per second over all ranks; None if unknown."""
        if self._seconds_per_sample is None:
            return None
        return samples_per_second * self._seconds_per_sample / self._devices

    def count(self, context: TrainerContext, *, once_per_step: bool) -> None:
        """Count the FLOPs of one sample. May be called only once.

        `once_per_step`: whether a step evaluates a single loss, once per batch. If False, the FLOPs are not counted.
        """
        model, self._copy = self._copy, None
        batch, self._batch = self._batch, None
        assert model is not None, "it is ready"
        if not once_per_step:
            self._not_known("a step has several updates, or evaluates its loss several times")
            return
        try:
            flops = self._counted(model, batch, context)
        except NotCountedError as error:
            self._not_known(f"the FLOPs of {error} are not known")
        except Exception as error:
            self._not_known(f"the loss function does not run on fake tensors: {first_line(error)}")
        else:
            self._settle(flops)

    def _shape(self, leaf: Any) -> Any:
        return self._fakes.like(leaf) if isinstance(leaf, Tensor) and leaf.layout == torch.strided else leaf

    def _counted(self, model: nn.Module, batch: Any, context: TrainerContext) -> Mapping[torch.dtype, int]:
        if not model.training:
            model.train()
        for module in model.modules():
            if isinstance(module, nn.SyncBatchNorm):
                module.eval()  # in training mode it communicates
        count = FlopCount([*model.parameters(), *model.buffers()])
        states = random_states(self._world)
        try:
            # Compiled functions run uncompiled. Attention runs as two matrix products: fused kernels recompute one of
            # them in the backward pass.
            with self._fakes.computing(), count, torch.compiler.set_stance("force_eager"), sdpa_kernel(SDPBackend.MATH):
                with context.precision.forward(), context.logged.set_aside():
                    value = checked(context.loss_fn(model, batch), "the loss function")
                loss = value.loss if isinstance(value, Loss) else value
                if not all(map(is_fake, _leaves(loss))):  # real gradients, and the hooks of DDP, must not be touched
                    raise NotCountedError("a loss that uses parameters from outside the model")
                count.goes_backward = True
                loss.sum().backward()  # type: ignore[no-untyped-call]
        finally:
            set_random_states(states)
        return count.flops

    def _settle(self, flops: Mapping[torch.dtype, int]) -> None:
        total = sum(flops.values())
        if not total:
            self._not_known("the model has no matrix products or convolutions")
            return
        kind = self._kind(max(flops, key=lambda dtype: flops[dtype]))
        if kind not in self._peak:
            self._not_known(f"the peak rate of {device_name(self._world)} in {kind} is not known")
            return
        self._seconds_per_sample = total / self._samples / self._peak[kind]
        if self._world.is_main:
            logger.info(
                "mfu: {:.3g} GFLOP per sample, forward and backward; the peak rate of a device is {:.4g} TFLOP/s in {}",
                total / self._samples / 1e9,
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


class _CopiesWithoutMemory(TorchFunctionMode):
    """A `TorchFunctionMode` that makes `copy.deepcopy` create fake tensors instead of copying tensors."""

    def __init__(self, fakes: FakeTensors) -> None:
        super().__init__()
        self._fakes = fakes

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.clone:
            return self._fakes.like(args[0])
        if func is Tensor.__deepcopy__:
            tensor, memo = args
            return memo.setdefault(id(tensor), self._fakes.like(tensor))
        return func(*args, **(kwargs or {}))


def _leaves(loss: Tensor) -> list[Tensor]:
    """The leaf tensors whose `.grad` a backward pass from the loss would change."""
    seen, found = set(), []
    waiting = [loss.grad_fn]
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(leaf := getattr(node, "variable", None), Tensor):
            found.append(leaf)
        waiting.extend(each for each, _ in node.next_functions)
    return found


def device_name(world: World) -> str:
    """The name that torch gives to this rank's device."""
    return torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else world.device.type


# --- FLOPs and live memory --------------------------------------------------------------------------------------------


class NotCountedError(Exception):
    """Raised for an operation whose FLOPs are not known; the message names the operation."""


# Operations on weights that contain no matrix product, besides views and element-wise operations. Their FLOPs do not
# count.
_NO_PRODUCTS = {
    "embedding", "_embedding_bag", "embedding_renorm", "index", "index_select", "index_put", "gather", "scatter", "cat",
    "stack", "clone", "copy", "fill", "zero", "_to_copy", "_unsafe_view", "slice_scatter", "select_scatter", "repeat",
    "native_layer_norm", "native_layer_norm_backward", "native_group_norm", "native_group_norm_backward",
    "_fused_rms_norm", "_fused_rms_norm_backward", "_weight_norm_interface", "_weight_norm_interface_backward",
    "_prelu_kernel", "_prelu_kernel_backward", "native_dropout", "bernoulli",
    "sum", "mean", "prod", "cumsum", "linalg_vector_norm", "amax", "amin", "argmax",
    "any", "all", "std", "var", "var_mean", "logsumexp", "_softmax", "_log_softmax", "_softmax_backward_data",
    "constant_pad_nd", "tril", "triu", "flip", "roll", "zeros_like", "ones_like", "empty_like", "full_like",
    "new_zeros", "new_empty", "new_full",
}  # fmt: skip


@cache
def _has_no_products(operation: Any) -> bool:
    """Whether an operation is known to be cheap, that is, to contain no matrix product.

    It is enough that torch marks one variant of the operation as a view or as element-wise, because torch does not mark
    all variants, such as in-place ones.
    """
    name = operation.__name__.rstrip("_")
    variants = getattr(torch.ops.aten, name, operation)
    return name in _NO_PRODUCTS or any(
        variant.is_view or torch.Tag.pointwise in variant.tags
        for variant in (getattr(variants, overload, None) for overload in variants.overloads())
        if variant is not None
    )


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


class FlopCount(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts FLOPs of matrix products and convolutions in this context, by the formulas of torch.utils.flop_counter.

    Operations that recompute activations during the backward pass do not count. Raises `NotCountedError` at the first
    operation that has no formula and may need one: a custom operation, or an operation that takes a matrix in `weights`
    (parameters and buffers) and is not known to be cheap; copies, lookups and element-wise operations are cheap.
    """

    def __init__(self, weights: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        from torch.utils.flop_counter import flop_registry  # imported here, because few runs need it

        self._formulas = {**flop_registry, torch.ops.aten.convolution_backward: _convolution_backward}
        self._weights = WeakIdKeyDictionary()
        for weight in weights:
            self._weights[weight.untyped_storage()] = True
        self.flops: Counter[torch.dtype] = Counter()
        """The number of FLOPs, by the dtype of the first factor."""
        self.goes_backward = False
        """Whether the backward pass has begun, as set by the caller. Only recomputation then enables gradients."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        formula = self._formulas.get(getattr(func, "overloadpacket", None))
        if formula is None:
            return self._without_formula(func, args, kwargs)
        result = func(*args, **kwargs)
        if not (self.goes_backward and torch.is_grad_enabled()):
            flops = formula(*args, **kwargs, out_val=result)
            # The backward pass of a fused attention kernel recomputes one of its five products.
            recomputes = func.overloadpacket.__name__.endswith("attention_backward")
            self.flops[args[0].dtype] += flops * 4 // 5 if recomputes else flops
        return result

    def _without_formula(self, func: Any, args: Any, kwargs: Any) -> Any:
        space = getattr(func, "namespace", "")
        if space == "prim":  # a query, such as a tensor's device; an exception would end the process
            return func(*args, **kwargs)
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        strided = [tensor for tensor in tensors if tensor.layout == torch.strided]
        weights = [tensor for tensor in strided if tensor.untyped_storage() in self._weights]
        if tensors and space not in ("aten", "prims"):
            raise NotCountedError(str(func))
        with self:
            result = func.decompose(*args, **kwargs)  # in inference mode, composite operations arrive undecomposed
        if result is not NotImplemented:
            return result
        if any(weight.ndim > 1 for weight in weights) and not _has_no_products(func.overloadpacket):
            raise NotCountedError(str(func))
        result = func(*args, **kwargs)
        if weights and len(weights) == len(tensors):
            for leaf in pytree.tree_leaves(result):
                if isinstance(leaf, Tensor) and leaf.layout == torch.strided:
                    self._weights[leaf.untyped_storage()] = True
        return result
