"""All private torch APIs that a worker uses. Check these first when torch changes.

The exception is launcher/warm/worker.py, which must run before this module is imported.

Written against the sources of torch 2.10, 2.13 and 2.15. Where these versions differ, a comment describes how.
"""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Variable
from torch.distributed import distributed_c10d
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

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
    if type(module).__name__ != "OptimizedModule":  # the class itself is in torch._dynamo: a second to import
        return None
    return dict(module.named_children()).get("_orig_mod")


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


def gather_ranges(whole: Tensor, part: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """All-gather the `part` of each rank, in rank order, into the 1-D tensor `whole`. A collective of the group."""
    # torch 2.13 renamed the function and deprecated the old name.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(whole, part, group=group)


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
