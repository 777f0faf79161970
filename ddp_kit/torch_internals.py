"""All private torch APIs that a worker uses. Check these first when torch changes.

The exception is launcher/warm/worker.py, which must run before this module is imported.

Written against the sources of torch 2.10, 2.13 and 2.15. Where these versions differ, a comment describes how.
"""

import re
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import AbstractContextManager, suppress
from functools import cache
from math import prod
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses import fake_tensor
from torch.autograd import Variable
from torch.distributed import distributed_c10d
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

__all__ = ["pytree"]

# --- Process groups ---------------------------------------------------------------------------------------------------


def default_store() -> dist.Store:
    """The store of the default process group. It adds the group's prefixes to all keys."""
    return distributed_c10d._get_default_store()


class CommunicationError(Exception):
    """Code ran a collective where it must not: see `WithoutCollectives`."""


class WithoutCollectives(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context in which a collective raises `CommunicationError` before it sends anything."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "namespace", "") in ("c10d", "_c10d_functional", "_c10d_functional_autograd"):
            raise CommunicationError(str(func))
        return func(*args, **(kwargs or {}))


def abort_process_groups() -> None:
    """Abort all process groups without waiting for other ranks, and end their NCCL kernels."""
    distributed_c10d._abort_process_group()


def collectives_of_default_group() -> int:
    """The number of collectives that this process has started in the default group; 0 if the backend does not count."""
    with suppress(RuntimeError, AttributeError, ValueError):
        return _begun(distributed_c10d._get_default_group())
    return 0


def collectives_of_all_groups() -> int:
    """The number of collectives that this process has started in all groups whose backend counts them."""
    total = 0
    for group in list(distributed_c10d._world.pg_map):
        with suppress(RuntimeError, AttributeError):
            total += _begun(group)
    return total


# --- torch.compile ----------------------------------------------------------------------------------------------------


def compilations() -> int:
    """The number of graphs that torch.compile has compiled in this process, including recompilations."""
    counters = getattr(sys.modules.get("torch._dynamo.utils"), "counters", {})
    return int(counters.get("stats", {}).get("unique_graphs", 0))


def compile_module(module: nn.Module) -> None:
    """Call `module.compile()`. Also works for modules whose `forward` is torch's own code, such as Sequential."""
    with _with_outer_frame(module):
        module.compile()


def compile_like(wrapper: Any, module: nn.Module) -> None:
    """Compile a module in place, with the settings of `wrapper`: the result of `torch.compile` for the same module."""
    with _with_outer_frame(module):
        module._compiled_call_impl = wrapper.dynamo_ctx(module._call_impl)  # as in `module.compile()`


def compiled_module(module: nn.Module) -> nn.Module | None:
    """The module inside a wrapper that `torch.compile` has returned; None if `module` is not such a wrapper."""
    # Recognised by its class name, because the class is in torch._dynamo, which takes a second to import.
    return dict(module.named_children()).get("_orig_mod") if type(module).__name__ == "OptimizedModule" else None


def _with_outer_frame(module: nn.Module) -> AbstractContextManager[object]:
    """A context in which Dynamo compiles `module.forward` even if it is torch's own code, which Dynamo would skip."""
    from torch._dynamo import config  # imported only if needed, because it takes a second

    context: AbstractContextManager[object] = config.patch(
        wrap_top_frame=type(module).forward.__module__.startswith("torch.")
    )
    return context


# --- Collectives ------------------------------------------------------------------------------------------------------


def _begun(group: Any) -> int:
    return int(group._get_sequence_number_for_group())


def broadcast_coalesced(tensors: list[Tensor], bytes_at_once: int) -> None:
    """Broadcast rank 0's tensors in place, coalesced into buffers of `bytes_at_once` bytes. A collective."""
    dist._broadcast_coalesced(dist.group.WORLD, tensors, bytes_at_once, 0)  # type: ignore[arg-type]


def memory_of(tensor: Any) -> Tensor:
    """The local tensor inside a DTensor. Any other tensor is returned unchanged.

    Setting `data` of the returned tensor also changes the DTensor. In torch 2.13, this is not true of `to_local`, which
    returns a new tensor with the same memory if the DTensor is a parameter.
    """
    local: Tensor = getattr(tensor, "_local_tensor", tensor)
    return local


def gather_ranges(whole: Tensor, part: Tensor) -> None:
    """All-gather the `part` of each rank, in rank order, into the 1-D tensor `whole`. A collective."""
    # torch 2.13 renamed the function and deprecated the old name.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(whole, part)


# --- Multi-tensor kernels ---------------------------------------------------------------------------------------------


def multiply_all(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply each tensor by a scalar, in place."""
    torch._foreach_mul_(tensors, factor)


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each source to its target."""
    torch._foreach_copy_(targets, sources)


def interpolate_all(tensors: list[Tensor], ends: list[Tensor], weight: float) -> None:
    """Interpolate linearly, in place: tensor + weight * (end - tensor)."""
    torch._foreach_lerp_(tensors, ends, weight)


# --- Autograd, autocast, profiler, schedulers -------------------------------------------------------------------------


def call_after_backward(callback: Callable[[], None]) -> None:
    """Queue a callback for the end of the current backward pass. Callbacks run in the order they were queued."""
    Variable._execution_engine.queue_callback(callback)


def scale_on_device(scaler: torch.amp.GradScaler) -> Tensor | None:
    """The loss scale, as a scalar on the device; None before the first loss is scaled. Does not wait for the device."""
    return scaler._get_scale_async()


def join_overflow_flags(scaler: torch.amp.GradScaler, optimizer: Optimizer) -> Tensor | None:
    """Replace the flags of `unscale_` with one: 1.0 if a gradient on any device of any rank is not finite, else 0.0.

    Fused kernels skip a step only if the sum of the flags is exactly 1, and need a scalar, but there is a flag per
    device, and `ShardedGradScaler` adds up those of all ranks, in tensors of shape (1,). Returns the flag; None if
    there are no gradients.
    """
    flags: dict[Any, Tensor] = scaler._found_inf_per_device(optimizer)
    scale = scale_on_device(scaler)
    if not flags or scale is None:
        return None
    total = torch.stack([flag.reshape(()).to(scale.device, non_blocking=True) for flag in flags.values()]).sum()
    flags.clear()
    flags[scale.device] = total.clamp(max=1.0)
    return flags[scale.device]


def has_gradient_hooks(parameter: Tensor) -> bool:
    """Whether `register_hook` or `register_post_accumulate_grad_hook` was called on a parameter."""
    return bool(parameter._backward_hooks) or bool(parameter._post_accumulate_grad_hooks)


def profiler_runs() -> bool:
    """Whether a torch profiler is recording."""
    return bool(torch.autograd._profiler_enabled())  # type: ignore[attr-defined]


def step_hooks(optimizer: Optimizer) -> list[Callable[..., Any]]:
    """The hooks that run before and after `optimizer.step()`, except those of torch and ddpkit."""
    hooks = [*optimizer._optimizer_step_pre_hooks.values(), *optimizer._optimizer_step_post_hooks.values()]
    return [hook for hook in hooks if not str(getattr(hook, "__module__", "")).startswith(("torch.", "ddp_kit."))]


def inner_schedulers(scheduler: LRScheduler) -> list[LRScheduler]:
    """The schedulers inside a SequentialLR or a ChainedScheduler."""
    return list(scheduler._schedulers)  # type: ignore[attr-defined]


def milestones(scheduler: LRScheduler) -> list[int]:
    """The numbers of `step()` calls after which a SequentialLR switches to its next scheduler."""
    return list(scheduler._milestones)  # type: ignore[attr-defined]


# --- DDP --------------------------------------------------------------------------------------------------------------
# DDP is used without calling its wrapper: see parallel/ddp.py.


class DdpReducer:
    """Reduces gradients with a DDP wrapper without calling the wrapper's `forward`.

    `sparse`: the parameters whose gradients are sparse.
    """

    def __init__(self, wrapper: Any, sparse: Collection[Tensor]) -> None:
        self._wrapper = wrapper
        self._parameters = [parameter for parameter in wrapper.module.parameters() if parameter.requires_grad]
        self._sparse = sparse
        # The setting is not passed as an argument, because torch 2.13 renamed the argument and deprecated the old name.
        name = "forward_sync_buffers" if hasattr(wrapper, "forward_sync_buffers") else "broadcast_buffers"
        setattr(wrapper, name, False)
        if self._parameters[0].is_cuda and hasattr(wrapper, "_set_ddp_runtime_logging_sample_rate"):
            # Turn off DDP's runtime statistics, for which DDP waits for the device in every 100th step.
            wrapper._set_ddp_runtime_logging_sample_rate(2**31 - 1)

    def reduced(self, loss: Tensor) -> Tensor:
        """The same loss, but with a backward pass that also reduces the gradients."""
        self._wrapper._pre_forward()
        reducing: Tensor = self._wrapper._post_forward(loss)
        return reducing

    def reduce_zeros(self, order: Sequence[int] | None = None) -> None:
        """Contribute zeros to the reduction, on a rank without samples.

        DDP needs every rank to take part in every reduction. Repeating a batch with zero weight instead would cost a
        pass and change BatchNorm's statistics, and a rank with an empty data stream has no batch to repeat. The
        gradients on this rank are undefined, not zeros, so a parameter that no rank used ends up without a gradient.

        `order`: the order in which the parameters are reduced; None: any order.
        """
        parameters = self._parameters
        if order is not None:
            parameters = [parameters[number] for number in reversed(order)]  # the last one is differentiated first
        loss = torch.zeros((), device=self._parameters[0].device)  # parameters may be on several devices
        for parameter in parameters:
            if parameter in self._sparse:  # DDP needs a sparse gradient then
                first = torch.zeros(1, dtype=torch.int64, device=parameter.device)
                zero = nn.functional.embedding(first, parameter, sparse=True).sum() * 0.0
            else:
                zero = _UndefinedGradient.apply(parameter)  # type: ignore[no-untyped-call]
            loss = loss + zero.to(loss.device)
        self.reduced(loss).backward()  # type: ignore[no-untyped-call]

    def restart(self) -> None:
        """Forget an incomplete reduction, such as one whose backward pass failed."""
        self._wrapper.reducer._reset_state()

    def forward_context(self) -> AbstractContextManager[object]:
        """The context in which torch.compile splits graphs at DDP's buckets."""
        context: AbstractContextManager[object] = self._wrapper._inside_ddp_forward()
        return context

    def finish_iteration(self) -> list[Tensor]:
        """Rebuild DDP's buckets in the order of the first reduction, as DDP does at the start of its next forward pass.

        Must be called while gradients are None, because buckets may be rebuilt. Takes a microsecond.

        Returns the parameters whose reduction is incomplete, because the last backward pass did not reach them.
        """
        try:
            rebuilt = self._wrapper.reducer._rebuild_buckets()
        except RuntimeError as error:
            if "find_unused_parameters" not in str(error):
                raise
            numbers = " ".join(re.findall(r"did not receive grad for rank \d+:([ \d]+)", str(error)))
            return [self._parameters[int(number)] for number in numbers.split()] or self._parameters
        if rebuilt:
            self._wrapper._has_rebuilt_buckets = True  # as DDP itself does after this call
            self._wrapper.logger.set_runtime_stats_and_log()  # with the new order; DDP does it in the next forward pass
        return []

    def settled_order(self) -> list[int] | None:
        """The numbers of the parameters in the order in which they are reduced; None before the buckets are rebuilt."""
        if not getattr(self._wrapper, "_has_rebuilt_buckets", False):
            return None
        buckets = self._wrapper._get_ddp_logging_data()["rebuilt_per_bucket_param_indices"]
        return [int(index) for index in buckets.replace(",", " ").split()]


class _UndefinedGradient(torch.autograd.Function):
    """A zero whose backward pass reaches a parameter, and leaves the parameter's gradient undefined."""

    @staticmethod
    def forward(_ctx: Any, parameter: Tensor) -> Tensor:
        return torch.zeros((), device=parameter.device)

    @staticmethod
    def backward(_ctx: Any, *_gradients: Tensor) -> None:
        return None


# --- GPU allocator ----------------------------------------------------------------------------------------------------
# Written against the source of torch 2.13 only.


def record_allocations(entries: int) -> None:
    """Record the last `entries` allocations and frees of GPU memory, with Python stacks.

    If `entries` is 0, stop recording, and discard what has been recorded.
    """
    record = torch.cuda.memory._record_memory_history
    if entries:
        record("all", context="alloc", stacks="python", max_entries=entries)
    else:
        record(None)


def memory_snapshot() -> dict[str, Any]:
    """The state of the allocator, and the recorded history. `torch.cuda.memory._snapshot` documents its structure."""
    return torch.cuda.memory._snapshot()  # type: ignore[no-any-return]


# --- Tensors ----------------------------------------------------------------------------------------------------------


def storage_id(tensor: Tensor) -> int:
    """A number that identifies a tensor's storage, and changes if `tensor.data` is set, also for a DTensor."""
    return int(tensor.untyped_storage()._cdata)


def version_of(tensor: Tensor) -> int:
    """Autograd's version counter: the number of in-place operations on the tensor's memory."""
    return tensor._version


# --- Modules ----------------------------------------------------------------------------------------------------------


def persistent_buffers(model: nn.Module) -> list[Tensor]:
    """The buffers that are in the model's state_dict, each once, in the order of `model.buffers()`."""
    buffers = {
        buffer: None
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None and name not in module._non_persistent_buffers_set
    }
    return [*buffers]


def is_extra_state(name: str) -> bool:
    """Whether a name in a state_dict is what `get_extra_state` returned, which may have another shape at each save."""
    return name.rpartition(".")[2] == "_extra_state"


def loaded_by_own_code(model: nn.Module) -> Callable[[str], bool]:
    """Return a function that tells whether custom code loads the value of a given name in the state_dict.

    Custom code may accept other names and shapes. It is an overridden `load_state_dict` of the model, or an overridden
    `_load_from_state_dict` or a load pre-hook of a module that contains the name. The overrides in torch's norms do not
    count, because they accept no other names or shapes.
    """
    usual = {_loader_of(kind) for kind in (nn.Module, nn.BatchNorm1d, nn.InstanceNorm1d)}
    modules = [
        f"{name}." if name else ""
        for name, module in model.named_modules(remove_duplicate=False)
        if _loader_of(type(module)) not in usual or module._load_state_dict_pre_hooks
    ]
    overridden = type(model).load_state_dict is not nn.Module.load_state_dict
    prefixes = ("",) if overridden else tuple(modules)
    return lambda name: name.startswith(prefixes)


def _loader_of(kind: type[nn.Module]) -> object:
    return kind._load_from_state_dict


# --- Fake tensors -----------------------------------------------------------------------------------------------------
# For memory plans and FLOPs. Tested with torch 2.13 only.


class _WithoutReferences(fake_tensor.FakeTensorConverter):
    """Creates the results of operations on fake tensors, and keeps no references to them.

    `Module.to` swaps fake parameters with what `Tensor.to` returns (`torch.utils.swap_tensors`), and refuses tensors
    that have weak references. torch's own converter keeps one to each result.
    """

    def set_tensor_memo(self, t: Tensor, v: Tensor) -> None:
        pass


class FakeTensors:
    """Creates fake tensors, which have a shape, dtype and device, but no memory. Results computed from them are fake.

    Fake and real tensors may be mixed. An operation that needs a value, such as `.item()`, raises a `RuntimeError`.
    """

    def __init__(self) -> None:
        self._mode = fake_tensor.FakeTensorMode(allow_non_fake_inputs=True)
        self._mode.fake_tensor_converter = _WithoutReferences()

    def like(self, tensor: Tensor, device: torch.device | None = None, dtype: torch.dtype | None = None) -> Tensor:
        """A fake copy of a tensor or parameter. `dtype`: ignored unless `tensor` is floating-point.

        `Module.to` can convert and move a module with fake parameters, even to a GPU that does not exist, unless an
        autograd graph uses the parameters.
        """
        floats = dtype if tensor.is_floating_point() else None
        with self._mode, torch.no_grad():
            fake = torch.empty_strided(
                tensor.shape, tensor.stride(), dtype=floats or tensor.dtype, device=device or tensor.device
            )
            if isinstance(tensor, nn.Parameter):
                return nn.Parameter(fake, requires_grad=tensor.requires_grad)
        return fake

    def computing(self) -> AbstractContextManager[object]:
        """A context in which operations, even on real tensors, compute only shapes and dtypes, and no values."""
        return self._mode


def is_fake(tensor: object) -> bool:
    """Whether a value is a fake tensor."""
    return getattr(tensor, "fake_mode", None) is not None


class TensorsOnCpu(TorchFunctionMode):
    """A context in which all tensors are on the CPU, so that code that puts them on a GPU runs without one.

    model.to("cuda"), tensor.to(0)                    leave the tensors on the CPU
    torch.zeros(3, device="cuda:1")                   creates the tensor on the CPU
    with torch.device("cuda"): torch.zeros(3)         likewise; not with `torch.set_default_device("cuda")`
    tensor.cuda(), tensor.pin_memory()                return the tensor
    """

    _DEVICE_POSITION: ClassVar = {"to": 1, "_parse_to": 0}  # `Module.to` calls torch._C._nn._parse_to

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.cuda, Tensor.pin_memory):
            return args[0]
        if func is torch.device and not (args and isinstance(args[0], torch.device)):
            return func(*args, **(kwargs or {}))  # torch.random.fork_rng, for example, looks up the module torch.cuda
        position = self._DEVICE_POSITION.get(getattr(func, "__name__", ""))
        args = [_on_cpu(value, number=index == position) for index, value in enumerate(args)]
        kwargs = {name: _on_cpu(value, number=name == "device") for name, value in (kwargs or {}).items()}
        if kwargs.get("pin_memory"):
            kwargs["pin_memory"] = False
        return func(*args, **kwargs)


def _on_cpu(value: Any, *, number: bool) -> Any:
    """The CPU in place of a GPU; other values unchanged. `number`: whether an integer is the index of a GPU."""
    kind = value.type if isinstance(value, torch.device) else value
    is_gpu = isinstance(kind, str) and kind.partition(":")[0] == "cuda"
    return torch.device("cpu") if is_gpu or (number and type(value) is int) else value


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


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Measures the bytes of live tensors that were created in this context, including fake tensors.

    `existing`: tensors whose memory does not count. `now`: bytes that are alive; `peak`: their maximum so far.
    """

    def __init__(self, existing: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen = WeakIdKeyDictionary()
        for tensor in existing:
            self._seen[tensor.untyped_storage()] = True
        self.now = 0
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(result):
            if not isinstance(leaf, Tensor) or leaf.layout != torch.strided:
                continue
            storage = leaf.untyped_storage()
            if storage not in self._seen:
                self._seen[storage] = True
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self._freed, storage.nbytes())
        return result

    def _freed(self, size: int) -> None:
        self.now -= size
