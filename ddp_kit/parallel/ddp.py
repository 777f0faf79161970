"""A whole replica on every rank; torch's DistributedDataParallel (DDP) averages the gradients.

DDP usually prepares the reduction of gradients in the forward of its wrapper, which is never called here. Instead,
`DdpReducer` prepares the reduction for one loss, so a loss function may call the model any number of times, or use only
parts of it. The backward pass of any other loss accumulates gradients on this rank, without a reduction.
"""

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from ddp_kit.config.settings import ParallelConfig
from ddp_kit.distributed.world import World
from ddp_kit.errors import ConfigError, LossError, some
from ddp_kit.parallel.shards import check_dense_gradients
from ddp_kit.parallel.strategy import NO_OPTIONS, Options, SharedBuffers, Strategy, T, broadcast
from ddp_kit.structures import sparse_weights
from ddp_kit.torch_internals import DdpReducer

Reduction = torch.futures.Future[Tensor]


class DdpStrategy(Strategy):
    """torch's DistributedDataParallel, but with support for any loss function and for ranks without samples."""

    def __init__(self, world: World, config: ParallelConfig, options: Options = NO_OPTIONS) -> None:
        super().__init__(world, config, options)
        self.divisor = world.world_size
        self._reducer: Any = None  # a DdpReducer, after `setup`
        self._buffers: SharedBuffers
        # Whether this is the rank's last pass, whose backward pass reduces. Still False in finish_reduction: no passes.
        self._reduces = False
        self._reductions: list[Reduction] = []  # of this step's buckets, if steps are recoverable
        self._order: list[int] | None = None  # the order of the parameters in reductions, once it is fixed
        self._updates: list[Self] = []  # see `divided`

    # --- Setup --------------------------------------------------------------------------------------------------------

    def check(self, model: nn.Module) -> None:
        super().check(model)
        if self.config.compression is not None:
            setting = f"parallel.compression={self.config.compression!r}"
            check_dense_gradients(model, setting, "leave out compression")

    def setup(self, model: nn.Module) -> None:
        super().setup(model)
        broadcast([tensor.detach() for tensor in (*model.parameters(), *model.buffers())])
        self._buffers = SharedBuffers(self.world, model)
        self._wrap(model)

    def divided(self, parameters: Sequence[Sequence[nn.Parameter]]) -> list[Self]:
        """Return one strategy per update, with a DistributedDataParallel of its own; see `Strategy.divided`."""
        self._reducer = None  # the wrapper's destructor removes its hooks from the parameters
        updates = [self._of_update(of_update) for of_update in parameters]
        for update in updates:
            update._wrap(nn.ParameterList(update.parameters))
        self._updates = updates
        return updates

    def _wrap(self, module: nn.Module) -> None:
        config = self.config
        self._reducer = None  # frees the buckets of an earlier wrapper
        wrapper = DistributedDataParallel(
            module,
            init_sync=False,  # DDP's own broadcast does not support all kinds of buffers
            # Gradients are views into the buckets, which saves a copy and the memory of one set of gradients.
            gradient_as_bucket_view=True,
            bucket_cap_mb=config.bucket_mb,
            find_unused_parameters=config.find_unused_parameters,
        )
        hooks: dict[str | None, Any] = {
            None: default_hooks.allreduce_hook,
            "bf16": default_hooks.bf16_compress_hook,
            "fp16": default_hooks.fp16_compress_hook,
        }
        hook = hooks[config.compression]
        try:
            if self.options.recoverable:
                wrapper.register_comm_hook(hook, self._reduce)
            elif config.compression is not None:
                wrapper.register_comm_hook(None, hook)
        except TypeError as error:
            raise ConfigError(
                f"parallel.compression={config.compression!r} is not available on this machine: {error}",
                "use compression='fp16', or omit compression",
            ) from None
        self._reducer = DdpReducer(wrapper, sparse_weights(self.model))

    # --- Step ---------------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        self._reduces, self._reductions = False, []
        broadcast(self._buffers.checked())

    def sync_buffers(self) -> None:
        broadcast(self._buffers.checked())

    def call(self, function: Callable[[nn.Module, T], Any], batch: T) -> Any:
        # torch.compile splits graphs at DDP's buckets, so that reductions overlap with the backward pass.
        with self._reducer.forward_context() if torch.is_grad_enabled() else nullcontext():
            return function(self.model, batch)

    def accumulating(self, *, last: bool) -> AbstractContextManager[object]:
        self._reduces = last
        return super().accumulating(last=last)

    def backward(self, loss: Tensor) -> None:
        super().backward(self._reducer.reduced(loss) if self._reduces else loss)

    def finish_reduction(self) -> None:
        """Complete the reduction, and check that all parameters have gradients. DDP does not check the last step."""
        if not self._reduces:
            self._reducer.reduce_zeros()
        if not self.config.find_unused_parameters:
            self._check_reached([parameter for parameter in self.parameters if parameter.grad is None])

    def abandon_step(self) -> None:
        for reduction in self._reductions:
            reduction.wait()
        self._reducer.restart()
        self._reducer.reduce_zeros()

    def _reduce(self, hook: Callable[[None, dist.GradBucket], Reduction], bucket: dist.GradBucket) -> Reduction:
        """A communication hook that runs another hook, unless this step has already reduced the bucket.

        This is the case in `abandon_step`. DDP reduces buckets in the order of their indices.
        """
        if bucket.index() == len(self._reductions):
            self._reductions.append(hook(None, bucket))
        return self._reductions[bucket.index()]

    def end_step(self) -> None:
        # After accumulation, a parameter that only the last pass did not reach has a gradient, but not a reduced one.
        self._check_reached(self._reducer.finish_iteration())

    def _check_reached(self, missing: Collection[Tensor]) -> None:
        """Raise `LossError` if there are parameters that no backward pass, or not the last one, has reached."""
        if missing:
            names = [
                name for name, parameter in self.model.named_parameters() if any(parameter is one for one in missing)
            ]
            raise LossError(
                f"{some(names)} got no gradient in a step, but DDP waits for the gradients of all parameters",
                "use these parameters in the loss, or freeze them (requires_grad=False); if they are used only in some "
                'steps, set TrainerConfig(parallel={"find_unused_parameters": True})',
            )

    # --- State --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The order in which DDP reduces the parameters; None if it is not fixed yet, need not be saved, or is unknown.

        It is unknown for a model with sparse gradients: DDP cannot list the buckets of sparse tensors.
        """
        if self._updates:
            return {"updates": [update.state_dict() for update in self._updates]}
        changes = not self.config.find_unused_parameters and not sparse_weights(self.model)
        if self._order is None and changes:
            self._order = self._reducer.settled_order()
        return {"reduction_order": self._order}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the reduction order, which DDP fixes in its first backward pass.

        With three or more ranks, this order affects how sums are rounded.
        """
        for update, of_update in zip(self._updates, state.get("updates", []), strict=False):
            update.load_state_dict(of_update)
        order = state.get("reduction_order")
        if order is not None and sorted(order) != [*range(len(order))]:
            raise ValueError("reduction_order is not a permutation of the parameters")
        if order is None or len(order) != len(self.parameters) or self._order is not None:
            return
        self._order = order
        if not self.config.find_unused_parameters:
            self.model.zero_grad()
            self._reducer.reduce_zeros(order)
            self.model.zero_grad()
            self._reducer.finish_iteration()
