"""Where the model lives: on this rank's device, in DistributedDataParallel where there are several ranks."""

from collections import Counter
from collections.abc import Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from ddp_kit.config import ParallelConfig
from ddp_kit.errors import ConfigError
from ddp_kit.world import World

_BROADCAST_BYTES = 250 * 1024 * 1024
_POWERSGD_FROM_STEP = 1000  # before it gradients travel whole, as the authors advise (Vogels et al. 2019)


class Reductions:
    """Knows which of a step's gradient buckets have begun to be reduced, and can do the others with zeros.

    For a rank whose backward pass broke off, while the others wait for it. What DDP itself calls for a rank that has
    run out of data (its `join`) does all buckets or none.
    """

    def __init__(self) -> None:
        self._waiting: list[torch.futures.Future[Any]] = []

    def begin(self) -> None:
        """A step begins."""
        self._waiting = []

    def hook(self, own: tuple[Any, Any], bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """A communication hook, with another one and its state inside."""
        state, hook = own
        future: torch.futures.Future[Tensor] = hook(state, bucket)
        self._waiting.append(future)
        return future

    def complete(self, placed: nn.Module) -> None:
        """Reduce zeros for all buckets that have not begun, and wait for all."""
        assert isinstance(placed, DistributedDataParallel)
        buckets = placed.reducer._get_zeros_like_grad_buckets()
        for bucket in buckets[len(self._waiting) :]:
            placed.reducer._run_comm_hook(bucket)
        for future in self._waiting:
            future.wait()


def place(model: nn.Module, world: World, config: ParallelConfig, reductions: Reductions | None = None) -> nn.Module:
    """Move the model to this rank's device and give all ranks rank 0's. A collective: all ranks call it.

    `reductions`: what is to know of the reductions, if anything; it costs a call per bucket.
    Returns what `reduced_with` takes: the model itself where it is alone, else its DDP wrapper. The wrapper is never
    called, so the caller sends the buffers, once per step: DDP would in each call of the model, of which a rank
    without samples has none and a loss function may make several.
    """
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError(
            f"the model {type(model).__name__} has no parameter that requires a gradient",
            "nothing could be trained; set requires_grad=True on what is to learn",
        )
    if isinstance(model, DistributedDataParallel):
        raise ConfigError(
            "the model is wrapped in DistributedDataParallel", "give the model itself; the Trainer wraps it"
        )
    model.to(world.device)
    if world.world_size == 1:
        return model
    _send([each.detach() for each in (*model.parameters(), *model.buffers())])
    return wrapped(model, config, reductions)


def wrapped(model: nn.Module, config: ParallelConfig, reductions: Reductions | None = None) -> DistributedDataParallel:
    """DDP's wrapper around a model that is placed. A collective: all ranks call it."""
    device = next(model.parameters()).device
    placed = DistributedDataParallel(
        model,
        init_sync=False,  # which does not take every kind of buffer
        # Gradients are views into the buckets: no copy into them, and one gradient's worth of memory less.
        gradient_as_bucket_view=True,
        bucket_cap_mb=config.bucket_mb,
        find_unused_parameters=config.find_unused_parameters,
        static_graph=config.static_graph,
    )
    if device.type == "cuda" and hasattr(placed, "_set_ddp_runtime_logging_sample_rate"):
        # DDP times every 100th step for its own log, which nobody reads here, and waits for the device to do so.
        placed._set_ddp_runtime_logging_sample_rate(2**31 - 1)  # type: ignore[no-untyped-call]
    # Not as an argument: torch 2.13 has another name for it, and warns of the old one.
    name = "forward_sync_buffers" if hasattr(placed, "forward_sync_buffers") else "broadcast_buffers"
    setattr(placed, name, False)
    _hook(placed, config.compression, reductions)
    return placed


def _hook(placed: DistributedDataParallel, compression: str | None, reductions: Reductions | None) -> None:
    hooks: dict[str | None, tuple[Any, Any]] = {
        None: (None, default_hooks.allreduce_hook),
        "bf16": (None, default_hooks.bf16_compress_hook),
        "fp16": (None, default_hooks.fp16_compress_hook),
    }
    if compression == "powersgd":
        state = powerSGD_hook.PowerSGDState(process_group=None, start_powerSGD_iter=_POWERSGD_FROM_STEP)
        hooks["powersgd"] = (state, powerSGD_hook.powerSGD_hook)
    own, hook = hooks[compression], None if reductions is None else reductions.hook
    if compression is not None or hook is not None:
        try:
            placed.register_comm_hook(*(own if hook is None else (own, hook)))
        except TypeError as error:
            raise ConfigError(
                f"parallel.compression={compression!r} is not available here: {error}",
                "use compression='fp16', or leave it out",
            ) from None


def compile_in_place(model: nn.Module, what: str) -> None:
    """torch.compile for the whole "model", or for each of its repeated "blocks"; the modules stay the same objects.

    Blocks are compiled once for all of a kind, so it takes less time, and graphs end where DDP's hooks have to run.
    """
    if what == "model":
        model.compile()
        return
    blocks = _repeated_blocks(model)
    if not blocks:
        raise ConfigError(
            f"compile='blocks', but {type(model).__name__} has no ModuleList or Sequential with several children of "
            "one kind that have children of their own",
            "use compile='model'",
        )
    for block in blocks:
        block.compile()


def _repeated_blocks(model: nn.Module) -> list[nn.Module]:
    found: list[nn.Module] = []
    for parent in model.modules():
        if isinstance(parent, nn.ModuleList | nn.Sequential):
            kinds = Counter(type(child) for child in parent)
            found.extend(child for child in parent if kinds[type(child)] > 1 and any(child.children()))
    inner = {module for block in found for module in block.modules() if module is not block}
    return [block for block in dict.fromkeys(found) if block not in inner]


# Types that gloo and NCCL take as they are. Others travel as whole numbers of the same size.
_SENT = {torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.int8}
_SAME_SIZE = {1: torch.uint8, 2: torch.float16, 4: torch.int32, 8: torch.int64}


@torch.no_grad()
def send_buffers(model: nn.Module, world: World) -> None:
    """Give all ranks rank 0's buffers, such as BatchNorm's statistics: one model is evaluated. A collective."""
    if world.world_size > 1:
        _send(list(model.buffers()))


def _send(tensors: list[Tensor]) -> None:
    """Give all ranks rank 0's tensors, in place. Sparse ones are compared when the model is placed, and not sent."""
    sent: list[Tensor] = []
    received: list[tuple[Tensor, Tensor]] = []
    for each in tensors:
        if each.layout != torch.strided or not each.numel():
            continue
        if each.dtype in _SENT and each.is_contiguous():
            sent.append(each)
        else:
            memory = stored(each)
            copy = memory.clone(memory_format=torch.contiguous_format).reshape(-1)
            sent.append(copy.view(_SAME_SIZE[min(copy.element_size(), 8)]))
            received.append((memory, copy))
    if sent:
        # As DDP itself sends them: many in one piece.
        dist._broadcast_coalesced(dist.group.WORLD, sent, _BROADCAST_BYTES, 0)  # type: ignore[arg-type]
    for memory, copy in received:
        memory.copy_(copy.view(memory.shape))


def stored(tensor: Tensor) -> Tensor:
    """The part of a tensor that is stored: an expanded one repeats the first index of a dimension."""
    for dimension, stride in enumerate(tensor.stride() if tensor.layout == torch.strided else ()):
        if stride == 0 and tensor.shape[dimension] > 1:
            tensor = tensor.narrow(dimension, 0, 1)
    return tensor


class _Nothing(torch.autograd.Function):
    """Zero, whose backward pass reaches a parameter and leaves its gradient undefined."""

    @staticmethod
    def forward(_ctx: Any, parameter: Tensor) -> Tensor:
        return torch.zeros((), device=parameter.device)

    @staticmethod
    def backward(_ctx: Any, *_gradients: Tensor) -> None:
        return None


def reduced_with(placed: nn.Module, loss: Tensor) -> Tensor:
    """The same loss; the backward pass from it reduces the gradients over the ranks.

    DDP prepares this in the wrapper's forward pass, which nobody calls here: a loss function may call the model any
    number of times, also none, or use its parts. Backward passes from any other tensor add to the gradients of their
    own rank. All ranks call it once per step.
    """
    if not isinstance(placed, DistributedDataParallel):
        return loss
    placed._pre_forward()  # type: ignore[no-untyped-call]
    armed: Tensor = placed._post_forward(loss)  # type: ignore[no-untyped-call]
    return armed


def forward_context(placed: nn.Module) -> AbstractContextManager[object]:
    """Where torch.compile cuts graphs at DDP's buckets, so that reductions overlap with the backward pass."""
    return placed._inside_ddp_forward() if isinstance(placed, DistributedDataParallel) else nullcontext()


def check_reduced(placed: nn.Module) -> None:
    """Raise the `RuntimeError` of DDP's next forward pass, if it was to be one: a parameter was left out of this one.

    Its gradient, and those in the same bucket, are then each rank's own. To be called without gradients at hand, for
    buckets may be built anew. Costs a microsecond.
    """
    if not isinstance(placed, DistributedDataParallel):
        return
    if placed.reducer._rebuild_buckets():
        placed._has_rebuilt_buckets = True  # as DDP itself does after this call
    if placed.static_graph:
        # With a static graph DDP counts each backward pass of its first iteration, which ends when the next one
        # begins: here, or the next step's first passes and those of the user's own code would be counted too.
        placed.reducer.prepare_for_forward()


def reduction_order(placed: nn.Module) -> list[int] | None:
    """The parameters in the order in which they are reduced; None where that is not settled, or never changes."""
    if not isinstance(placed, DistributedDataParallel) or placed.static_graph:
        return None
    if placed.find_unused_parameters or not getattr(placed, "_has_rebuilt_buckets", False):
        return None
    # DDP's own log has it from the next forward pass on only; a checkpoint of the first step needs it before.
    numbers = {id(parameter): number for number, parameter in enumerate(_reduced(placed))}
    buckets = placed.reducer._get_zeros_like_grad_buckets()
    return [numbers[id(parameter)] for bucket in buckets for parameter in bucket.parameters()]


def reduce_in(placed: nn.Module, order: list[int]) -> None:
    """Let DDP reduce the parameters in this order from now on. A collective.

    It settles its order by the first backward pass, and from three ranks on the order decides how sums are rounded: a
    run that goes on has to have that of before. Gradients are None before and after.
    """
    if isinstance(placed, DistributedDataParallel) and not placed.find_unused_parameters and not placed.static_graph:
        stand_in(placed, order).backward()  # type: ignore[no-untyped-call]
        for parameter in placed.module.parameters():
            parameter.grad = None
        check_reduced(placed)


def stand_in(
    placed: nn.Module, order: list[int] | None = None, unused: Collection[nn.Parameter] = frozenset()
) -> Tensor:
    """A zero loss, for a rank without samples: its backward pass takes part in DDP's reduction with zeros.

    DDP needs every rank in every reduction. A batch used for nothing would do as well, but costs a pass, and moves
    BatchNorm's statistics; and a stream that is empty has none. `order`: in which the gradients come. `unused`:
    parameters that no pass of a static graph uses. On this rank gradients stay undefined, so that a parameter that no
    rank's samples used has none in the end, rather than zeros.
    """
    assert isinstance(placed, DistributedDataParallel), "a rank that is alone has samples"
    sparse = {
        module.weight  # DDP reduces its gradient as a sparse one
        for module in placed.module.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
    }
    parameters = _reduced(placed)
    if order is not None:
        parameters = [parameters[number] for number in reversed(order)]  # computed last is differentiated first
    zero = torch.zeros((), device=parameters[0].device)
    ends = [_sparse_end(each) if each in sparse else _end(each) for each in parameters if each not in unused]
    return reduced_with(placed, sum(ends, zero))


def _reduced(placed: DistributedDataParallel) -> list[nn.Parameter]:
    return [each for each in placed.module.parameters() if each.requires_grad]


def _end(parameter: nn.Parameter) -> Tensor:
    end: Tensor = _Nothing.apply(parameter)  # type: ignore[no-untyped-call]
    return end


def _sparse_end(parameter: nn.Parameter) -> Tensor:
    """Zero, with a sparse gradient: DDP takes no undefined one where it expects such."""
    first = torch.zeros(1, dtype=torch.int64, device=parameter.device)
    return nn.functional.embedding(first, parameter, sparse=True).sum() * 0.0
