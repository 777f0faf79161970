"""A whole replica on every rank; torch's DistributedDataParallel (DDP) averages the gradients.

DDP usually prepares the reduction of gradients in the forward of its wrapper, which is never called here. Instead,
`DdpReducer` prepares the reduction for one loss, so a loss function may call the model any number of times, or use only
parts of it. The backward pass of any other loss accumulates gradients on this rank, without a reduction.
"""

import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from ddp_kit.config.settings import ParallelConfig
from ddp_kit.distributed.world import World
from ddp_kit.errors import ConfigError, LossError, some
from ddp_kit.parallel.strategy import Passes, SharedBuffers, Strategy, broadcast
from ddp_kit.torch_internals import DdpReducer


class DdpStrategy(Strategy):
    """torch's DistributedDataParallel, but with support for any loss function and for ranks without samples."""

    def __init__(self, world: World, config: ParallelConfig, *, recoverable: bool = False) -> None:
        super().__init__(world, config, recoverable=recoverable)
        self._wrapper: DdpReducer | None = None
        self._buffers: SharedBuffers
        self._begun: list[torch.futures.Future[Any]] = []  # this step's reductions, if recoverable
        self._complete = False  # every parameter has received a gradient
        self._order: list[int] | None = None  # the order of the parameters in reductions, once it is fixed
        self._updates: list[Self] = []  # see `divided`

    @property
    def divisor(self) -> int:
        return self.world.world_size

    # --- Setup --------------------------------------------------------------------------------------------------------

    def check_recoverable(self) -> None:
        super().check_recoverable()
        if self.config.find_unused_parameters:
            raise ConfigError(
                "micro_batch_size='auto' is not supported with parallel.find_unused_parameters on several ranks",
                "set micro_batch_size to a number",
            )

    def setup(self, model: nn.Module) -> None:
        super().setup(model)
        broadcast([each.detach() for each in (*model.parameters(), *model.buffers())])
        self._buffers = SharedBuffers(self.world, model)
        self._wrap()

    def divided(self, parameters: Sequence[Sequence[nn.Parameter]]) -> list[Self]:
        """Return one strategy for each of a step's several updates; see `Strategy.divided`.

        Each of them has its own DistributedDataParallel for the parameters of its update.
        """
        self.release()
        self._updates = [self._of_update(each) for each in parameters]
        for update in self._updates:
            update._updates = []
            update._wrap()
        return self._updates

    def release(self) -> None:
        self._wrapper = None  # its destructor removes the hooks from the parameters

    def _wrap(self) -> None:
        config = self.config
        wrapper = DistributedDataParallel(
            self.model if self._trains is None else nn.ParameterList(self._trains),
            init_sync=False,  # DDP's own broadcast does not support all kinds of buffers
            # Gradients are views into the buckets, which saves a copy and the memory of one set of gradients.
            gradient_as_bucket_view=True,
            bucket_cap_mb=config.bucket_mb,
            find_unused_parameters=config.find_unused_parameters,
        )
        self._add_hook(wrapper)
        self._wrapper = DdpReducer(wrapper)
        if self.world.device.type == "cuda":
            self._wrapper.without_log()

    def _add_hook(self, wrapper: DistributedDataParallel) -> None:
        compression = self.config.compression
        if compression is None and not self.recoverable:
            return
        hooks = {
            None: default_hooks.allreduce_hook,
            "bf16": default_hooks.bf16_compress_hook,
            "fp16": default_hooks.fp16_compress_hook,
        }
        hook = hooks[compression]
        try:
            wrapper.register_comm_hook(*((hook, self._noted) if self.recoverable else (None, hook)))
        except TypeError as error:
            raise ConfigError(
                f"parallel.compression={compression!r} is not available on this machine: {error}",
                "use compression='fp16', or leave compression out",
            ) from None

    def _noted(self, hook: Any, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """A communication hook that runs another hook, and records that the reduction of the bucket has begun."""
        future: torch.futures.Future[Tensor] = hook(None, bucket)
        self._begun.append(future)
        return future

    @property
    def _ddp(self) -> DdpReducer:
        assert self._wrapper is not None, "setup was called"
        return self._wrapper

    # --- Optimizer step -----------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        self._begun = []
        self.sync_buffers()

    def sync_buffers(self) -> None:
        broadcast(self._buffers.checked())

    def run_passes(self, passes: Passes) -> None:
        self.accumulate(passes, self._ddp.reduced)
        if not passes.count:
            loss = self._zero_loss()
            passes.before_reduction(loss)
            self.backward(loss)
            passes.after_backward()

    def finish_failed_passes(self) -> None:
        # DDP's own function for a rank without data (see DDP's `join`) reduces either all buckets or none.
        self._ddp.reduce_zeros(begun=len(self._begun))
        for future in self._begun:
            future.wait()

    def check_gradients(self) -> None:
        """Raise `LossError` if parameters have no gradient after the first step.

        DDP itself would raise an error only in the second step or not at all, and would not name the parameters.
        """
        if self._complete or self.config.find_unused_parameters:
            return
        missing = [name for name, parameter in self._named() if parameter.grad is None]
        if missing:
            raise _unused(missing)
        self._complete = True

    def end_step(self) -> None:
        """Finish the reduction. DDP itself finishes it in the next pass, but the last step has no next pass.

        Raises `LossError` for unused parameters, because DDP does not reduce their buckets.
        """
        try:
            self._ddp.finish_iteration()
        except RuntimeError as error:
            if "find_unused_parameters" not in str(error):
                raise
            numbers = re.findall(r"did not receive grad for rank \d+:([ \d]+)", str(error))
            names = [name for name, _ in self._named()]
            raise _unused([names[int(number)] for number in " ".join(numbers).split()]) from error

    def _named(self) -> list[tuple[str, nn.Parameter]]:
        """The parameters that this strategy trains, with their names."""
        names = {id(parameter): name for name, parameter in self.model.named_parameters()}
        return [(names[id(parameter)], parameter) for parameter in self.parameters]

    def forward_context(self) -> AbstractContextManager[object]:
        """A context in which torch.compile splits graphs at DDP's buckets, to let reductions overlap with backward."""
        return self._ddp.forward_context()

    # --- Reduction order ----------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The order in which DDP reduces the parameters; None if it is not fixed yet, need not be saved, or is unknown.

        It is unknown for a model with sparse gradients: DDP cannot list the buckets of sparse tensors.
        """
        if self._updates:
            return {"updates": [each.state_dict() for each in self._updates]}
        changes = not self.config.find_unused_parameters and not self._sparse_weights()
        if self._order is None and changes and (order := self._ddp.settled_order()) is not None:
            numbers = {id(parameter): number for number, parameter in enumerate(self.parameters)}
            self._order = [numbers[id(parameter)] for parameter in order]
        return {"reduction_order": self._order}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the reduction order, which DDP fixes in its first backward pass.

        With three or more ranks, this order affects how sums are rounded.
        """
        for update, saved in zip(self._updates, state.get("updates", []), strict=False):
            update.load_state_dict(saved)
        order = state.get("reduction_order")
        if order is not None and sorted(order) != [*range(len(order))]:
            raise ValueError("reduction_order is not a permutation of the parameters")
        if order is None or len(order) != len(self.parameters) or self._order is not None:
            return
        self._order = order
        if not self.config.find_unused_parameters:
            self.model.zero_grad()
            self._zero_loss(order).backward()  # type: ignore[no-untyped-call]
            self.model.zero_grad()
            self._ddp.finish_iteration()

    # --- Ranks without samples ----------------------------------------------------------------------------------------

    def _zero_loss(self, order: Sequence[int] | None = None) -> Tensor:
        """Return a zero loss whose backward pass contributes zeros to DDP's reduction, for a rank without samples.

        DDP needs every rank to take part in every reduction. Repeating a batch with zero weight instead would cost a
        pass and change BatchNorm's statistics, and a rank with an empty data stream has no batch to repeat. The
        gradients on this rank are undefined, not zeros, so a parameter that no rank used ends up without a gradient.

        `order`: the order in which the parameters are reduced; None: any order.
        """
        sparse = self._sparse_weights()
        parameters = list(self.parameters)
        if order is not None:
            parameters = [parameters[number] for number in reversed(order)]  # the last one is differentiated first
        device = self.world.device  # parameters may be on several devices
        zero = torch.zeros((), device=device)
        ends = [(_sparse_zero(each) if each in sparse else _zero(each)).to(device) for each in parameters]
        return self._ddp.reduced(sum(ends, zero))

    def _sparse_weights(self) -> set[Tensor]:
        """The weights whose gradients DDP reduces as sparse tensors."""
        kinds = nn.Embedding | nn.EmbeddingBag
        return {each.weight for each in self.model.modules() if isinstance(each, kinds) and each.sparse}


class _Zero(torch.autograd.Function):
    """A zero whose backward pass reaches a parameter, and leaves the parameter's gradient undefined."""

    @staticmethod
    def forward(_ctx: Any, parameter: Tensor) -> Tensor:
        return torch.zeros((), device=parameter.device)

    @staticmethod
    def backward(_ctx: Any, *_gradients: Tensor) -> None:
        return None


def _zero(parameter: nn.Parameter) -> Tensor:
    zero: Tensor = _Zero.apply(parameter)  # type: ignore[no-untyped-call]
    return zero


def _sparse_zero(parameter: nn.Parameter) -> Tensor:
    """A zero with a sparse gradient: DDP does not accept an undefined gradient in place of a sparse one."""
    first = torch.zeros(1, dtype=torch.int64, device=parameter.device)
    return nn.functional.embedding(first, parameter, sparse=True).sum() * 0.0


def _unused(names: Sequence[str]) -> LossError:
    """The error for parameters that get no gradient, although DDP waits for one."""
    return LossError(
        f"{some(names) or 'some parameters'} got no gradient in a step, but DDP waits for the gradients of all "
        "parameters",
        "use these parameters in the loss, or freeze them (requires_grad=False); if they are used only in some steps, "
        'set TrainerConfig(parallel={"find_unused_parameters": True})',
    )
