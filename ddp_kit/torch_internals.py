"""All private torch APIs that a worker uses: read this first when torch changes.

Read in torch 2.10, 2.13 and 2.15. What a version may lack is said where it is used.
"""

import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import Variable
from torch.distributed import distributed_c10d
from torch.optim.lr_scheduler import LRScheduler
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

__all__ = ["pytree"]

# --- process groups -------------------------------------------------------------------------------------------------


def default_store() -> dist.Store:
    """The store of the default group, with all its prefixes."""
    return distributed_c10d._get_default_store()


def collectives_of_default_group() -> int:
    """How many this process has begun in the default group; 0 where that is not counted."""
    with suppress(RuntimeError, AttributeError, ValueError):
        return _begun(distributed_c10d._get_default_group())
    return 0


def collectives_of_all_groups() -> int:
    """How many this process has begun so far, in all groups that count them."""
    total = 0
    for group in list(distributed_c10d._world.pg_map):
        with suppress(RuntimeError, AttributeError):
            total += _begun(group)
    return total


def _begun(group: Any) -> int:
    return int(group._get_sequence_number_for_group())


def broadcast_coalesced(tensors: list[Tensor], bytes_at_once: int) -> None:
    """Rank 0's values to all ranks, in place, many tensors in one piece. A collective of the default group."""
    dist._broadcast_coalesced(dist.group.WORLD, tensors, bytes_at_once, 0)  # type: ignore[arg-type]


def gather_ranges(whole: Tensor, own: Tensor) -> None:
    """Fill `whole`, one dimension, with the ranges of all ranks, one after another. A collective."""
    # torch 2.13 renamed the function, and warns of the old name.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(whole, own)


# --- many tensors in one kernel -------------------------------------------------------------------------------------


def multiply_all(tensors: list[Tensor], factor: Tensor) -> None:
    """Multiply each tensor by a scalar, in place."""
    torch._foreach_mul_(tensors, factor)


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each source to its target."""
    torch._foreach_copy_(targets, sources)


def interpolate_all(tensors: list[Tensor], ends: list[Tensor], weight: float) -> None:
    """Move each tensor by `weight` of the way to its end, in place."""
    torch._foreach_lerp_(tensors, ends, weight)


# --- autograd, autocast, profiler, schedulers -----------------------------------------------------------------------


def call_after_backward(callback: Callable[[], None]) -> None:
    """Within a backward pass: call this at its end, before what is queued later."""
    Variable._execution_engine.queue_callback(callback)


def scale_on_device(scaler: torch.amp.GradScaler) -> Tensor | None:
    """The scale, without waiting for the device; None before the first loss was scaled."""
    return scaler._get_scale_async()


def profiler_runs() -> bool:
    """Whether a torch profiler is recording."""
    return bool(torch.autograd._profiler_enabled())  # type: ignore[attr-defined]


def inner_schedulers(scheduler: LRScheduler) -> list[LRScheduler]:
    """Those of a SequentialLR or ChainedScheduler."""
    return list(scheduler._schedulers)  # type: ignore[attr-defined]


def milestones(scheduler: LRScheduler) -> list[int]:
    """The ticks at which a SequentialLR changes to its next scheduler."""
    return list(scheduler._milestones)  # type: ignore[attr-defined]


# --- DDP, whose wrapper is never called: see parallel/ddp.py -------------------------------------------------------


class DdpReducer:
    """The reducer of a DDP wrapper."""

    def __init__(self, wrapper: Any) -> None:
        self._wrapper = wrapper
        # torch 2.13 renamed the argument, and warns of the old name; the attribute can be set in every version.
        name = "forward_sync_buffers" if hasattr(wrapper, "forward_sync_buffers") else "broadcast_buffers"
        setattr(wrapper, name, False)

    def without_log(self) -> None:
        """DDP times every 100th step for its own log, which nobody reads here, and waits for the device to do so."""
        if hasattr(self._wrapper, "_set_ddp_runtime_logging_sample_rate"):
            self._wrapper._set_ddp_runtime_logging_sample_rate(2**31 - 1)

    def reduced(self, loss: Tensor) -> Tensor:
        """The same loss; the backward pass from it reduces the gradients."""
        self._wrapper._pre_forward()
        found: Tensor = self._wrapper._post_forward(loss)
        return found

    def forward_context(self) -> AbstractContextManager[object]:
        """Where torch.compile cuts graphs at DDP's buckets."""
        context: AbstractContextManager[object] = self._wrapper._inside_ddp_forward()
        return context

    def finish_iteration(self) -> None:
        """What DDP's next forward pass would begin with: it raises a `RuntimeError` where parameters were left out.

        To be called while gradients are None, for buckets may be built anew. Costs a microsecond.
        """
        reducer = self._wrapper.reducer
        if reducer._rebuild_buckets():
            self._wrapper._has_rebuilt_buckets = True  # as DDP itself does after this call
        if self._wrapper.static_graph:
            # With a static graph DDP counts each backward pass of its first iteration, which ends when the next one
            # begins: here, or the next step's first passes and those of the user's own code would be counted too.
            reducer.prepare_for_forward()

    def settled_order(self) -> list[Tensor] | None:
        """The parameters in the order in which they are reduced; None before the buckets are in theirs.

        DDP's own log has it from the next forward pass on only; a checkpoint of the first step needs it before.
        """
        if not getattr(self._wrapper, "_has_rebuilt_buckets", False):
            return None
        return [parameter for bucket in self._zeros() for parameter in bucket.parameters()]

    def reduce_zeros(self, begun: int) -> None:
        """Begin the reductions of all buckets but the first `begun`, with zeros."""
        for bucket in self._zeros()[begun:]:
            self._wrapper.reducer._run_comm_hook(bucket)

    def _zeros(self) -> list[Any]:
        return list(self._wrapper.reducer._get_zeros_like_grad_buckets())


# --- tensors --------------------------------------------------------------------------------------------------------


def version_of(tensor: Tensor) -> int:
    """How many operations have written to the memory of a tensor, as autograd counts them."""
    return tensor._version


# --- tensors without memory, for the plan before the start (run with torch 2.13 alone) --------------------------------

_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class FakeTensors:
    """Makes tensors that have a shape, a type and a device, and no memory: what is computed of them has none either.

    They may be mixed with others. An operation that needs a value, such as `.item()`, raises a `RuntimeError`.
    """

    def __init__(self) -> None:
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._prepared: set[tuple[Any, ...]] = set()

    def parameter(self, like: Tensor) -> nn.Parameter:
        """A parameter without memory."""
        place = like.shape, like.stride(), like.device
        with torch.no_grad():
            if place not in self._prepared:
                self._prepared.add(place)
                self._prepare(like)
            return nn.Parameter(self._empty(like, like.dtype), requires_grad=like.requires_grad)

    def _empty(self, like: Tensor, dtype: torch.dtype) -> Tensor:
        with self._mode:
            return torch.empty_strided(like.shape, like.stride(), dtype=dtype, device=like.device)

    def _prepare(self, like: Tensor) -> None:
        """Let `Module.to` work later. It swaps fake tensors, which torch refuses where there is a weak reference; the
        mode keeps one to the first result of each operation, and none to those that come from its cache."""
        for dtype in dict.fromkeys((like.dtype, *_FLOATS)):
            if dtype == like.dtype or like.is_floating_point():
                empty = self._empty(like, dtype)
                for each in (empty, nn.Parameter(empty, requires_grad=dtype.is_floating_point)):
                    each.detach()
                    each.detach()


def is_fake(tensor: object) -> bool:
    """Whether it has no memory."""
    return getattr(tensor, "fake_mode", None) is not None


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the memory of the tensors that are made within, fake ones too, until nothing holds them."""

    def __init__(self, given: Iterable[Tensor] = ()) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seen = WeakIdKeyDictionary()
        for tensor in given:
            self._seen[tensor.untyped_storage()] = True
        self.now = 0
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(found):
            if isinstance(leaf, Tensor) and leaf.layout == torch.strided:
                self._note(leaf.untyped_storage())
        return found

    def _note(self, storage: Any) -> None:
        if storage in self._seen:
            return
        self._seen[storage] = True
        size = storage.nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._freed, size)

    def _freed(self, size: int) -> None:
        self.now -= size
