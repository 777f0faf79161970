"""A whole replica on every rank; torch's DistributedDataParallel (DDP) averages the gradients.

DDP usually prepares the reduction of gradients in the forward of its wrapper, which is never called here. Instead,
`DdpReducer` prepares the reduction for one loss, so a loss function may call the model any number of times, or use only
parts of it. The backward pass of any other loss accumulates gradients on this rank, without a reduction.
"""

import re
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from ddp_kit.config.settings import ParallelConfig
from ddp_kit.distributed.world import World
from ddp_kit.errors import ConfigError
from ddp_kit.model.modes import sparse_weights
from ddp_kit.parallel.shards import check_dense_gradients
from ddp_kit.parallel.strategy import NO_OPTIONS, Options, SharedBuffers, Strategy, T, broadcast, trained

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
        self._reduces = False
        self._reductions = []
        broadcast(self._buffers.checked())

    def sync_buffers(self) -> None:
        broadcast(self._buffers.checked())

    def call(self, function: Callable[[nn.Module, T], Any], batch: T) -> Any:
        if not torch.is_grad_enabled():
            return function(self.model, batch)
        # torch.compile splits graphs at DDP's buckets, so that reductions overlap with the backward pass.
        with self._reducer.forward_context():
            return function(self.model, batch)

    def accumulating(self, *, last: bool) -> AbstractContextManager[object]:
        self._reduces = last
        return super().accumulating(last=last)

    def backward(self, loss: Tensor) -> None:
        if self._reduces:
            loss = self._reducer.reduced(loss)
        super().backward(loss)

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
        self._check_gradients(
            missing,
            "got no gradient in a step, but DDP waits for the gradients of all parameters",
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


# --- DDP --------------------------------------------------------------------------------------------------------------
# DDP is used without calling its wrapper: see parallel/ddp.py.


class DdpReducer:
    """Reduces gradients with a DDP wrapper without calling the wrapper's `forward`.

    `sparse`: the parameters whose gradients are sparse.
    """

    def __init__(self, wrapper: Any, sparse: Collection[Tensor]) -> None:
        self._wrapper = wrapper
        self._parameters: list[Tensor] = [*trained(wrapper.module.parameters())]
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
