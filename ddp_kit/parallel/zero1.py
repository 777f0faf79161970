"""ZeRO-1: DDP with the optimizer's state and update sharded evenly over the ranks.

The parameters of each dtype are in one flat tensor. Each rank updates a range of that tensor, and all ranges have the
same size; an all-gather then distributes the updated ranges. Source: Rajbhandari et al. 2020, arXiv 1910.02054.

Parameters of shape (), such as CLIP's logit_scale, are not sharded: every rank updates them, as in DDP. Sharded state
is recognised by having its parameter's shape, and for these parameters scalars such as Adam's step have it too.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_kit.config.settings import ParallelConfig
from ddp_kit.distributed.barrier import wait_for_all
from ddp_kit.distributed.world import World
from ddp_kit.parallel.ddp import DdpStrategy
from ddp_kit.parallel.shards import Shards, check_dense_gradients
from ddp_kit.parallel.strategy import NO_OPTIONS, Options, Strategy, total_norm
from ddp_kit.parallel.writes import WriteCheck
from ddp_kit.state_values import Piece
from ddp_kit.torch_internals import gather_ranges, version_of

_HINT = "change the parameters of the optimizer, as with optimizer.eval(), on all ranks and at the same step"


@dataclass(frozen=True)
class _Flat:
    """All sharded parameters of one dtype, concatenated."""

    values: Tensor
    """All values, padded to a multiple of the number of ranks."""
    local: Tensor
    """This rank's range, a view of `values`."""


class Zero1Strategy(DdpStrategy):
    """ZeRO-1: each of N ranks has all weights and gradients, and 1/N of the optimizer state."""

    shards = True
    divided = Strategy.divided  # raises: several optimizers are not supported

    def __init__(self, world: World, config: ParallelConfig, options: Options = NO_OPTIONS) -> None:
        super().__init__(world, config, options)
        self.optimizer_replicas = tuple(range(rank, rank + 1) for rank in range(world.world_size))
        self._flat: list[_Flat] = []
        self._scalars: list[nn.Parameter] = []  # trained parameters that are not sharded
        self._versions: list[int] = []  # of the flat tensors, when all ranks had the same weights
        self._writes: WriteCheck

    def check(self, model: nn.Module) -> None:
        super().check(model)
        check_dense_gradients(model, f"parallel.strategy={self.config.strategy!r}")

    def setup(self, model: nn.Module) -> None:
        # DDP's buckets keep these strides, and the flat tensor is in row-major order.
        for parameter in model.parameters():
            parameter.data = parameter.data.contiguous()
        super().setup(model)
        if self._flat:  # called again: the optimizer still holds the first shards
            return
        self._scalars = [parameter for parameter in self.parameters if parameter.ndim == 0]
        by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
        for parameter in self.parameters:
            if parameter.ndim > 0:
                by_dtype.setdefault(parameter.dtype, []).append(parameter)
        pieces: dict[nn.Parameter, Piece] = {}
        for dtype, parameters in by_dtype.items():
            pieces |= self._flattened(dtype, parameters)
        names = {parameter: name for name, parameter in model.named_parameters()}
        self._shards = Shards(pieces, names)
        self._writes = WriteCheck([names[whole] for whole, _ in self._shards.trained], "ZeRO-1")
        self._versions = self._current_versions()

    @torch.no_grad()
    def _flattened(self, dtype: torch.dtype, parameters: list[nn.Parameter]) -> dict[nn.Parameter, Piece]:
        """Move parameters into one flat tensor. Returns the piece of each parameter that is in this rank's range."""
        ranks = self.world.world_size
        share = -(-sum(parameter.numel() for parameter in parameters) // ranks)
        values = torch.zeros(share * ranks, dtype=dtype, device=self.world.device)
        first = share * self.world.rank
        pieces: dict[nn.Parameter, Piece] = {}
        at = 0
        for parameter in parameters:
            view = values[at : at + parameter.numel()]
            view.copy_(parameter.reshape(-1))
            begin, end = (min(max(edge - at, 0), parameter.numel()) for edge in (first, first + share))
            parameter.data = view.view(parameter.shape)
            pieces[parameter] = Piece(view[begin:end], tuple(parameter.shape), (begin,), flat=True)
            at += parameter.numel()
        self._flat.append(_Flat(values, values[first : first + share]))
        return pieces

    def setup_optimizer(self, optimizer: Optimizer) -> None:
        self._shards.give_to(optimizer)

    def begin_step(self) -> None:
        self._shards.check_memory()
        self._gather_changed()
        super().begin_step()
        if self.world.world_size > 1:
            self._writes.begin([whole for whole, _ in self._shards.trained])

    def finish_reduction(self) -> None:
        self._writes.end()
        super().finish_reduction()
        for whole, shard in self._shards.trained:
            begin = self._shards.pieces[id(shard)].offsets[0]
            shard.grad = None
            if whole.grad is not None:
                shard.grad = whole.grad.view(-1)[begin : begin + shard.numel()]

    @property
    def updated_parameters(self) -> list[nn.Parameter]:
        return [*(shard for _, shard in self._shards.trained), *self._scalars]

    def grad_norm(self) -> Tensor:
        square = total_norm((shard for _, shard in self._shards.trained), self.world.device).square()
        dist.all_reduce(square)
        norm = square.sqrt()
        scalars = [parameter.grad for parameter in self._scalars if parameter.grad is not None]  # the same on all ranks
        if not scalars:
            return norm
        return nn.utils.get_total_norm([norm, *scalars])

    def grad_norms(self) -> Tensor:
        squares = super().grad_norms().square()
        dist.all_reduce(squares[: len(self._shards.trained)])  # scalars, which follow, are whole on all ranks
        return squares.sqrt()

    def end_step(self) -> None:
        super().end_step()
        self.gather_weights()

    # --- Weights ------------------------------------------------------------------------------------------------------

    def gather_weights(self) -> None:
        for flat in self._flat:
            gather_ranges(flat.values, flat.local)
        self._versions = self._current_versions()

    def _current_versions(self) -> list[int]:
        return [version_of(flat.values) for flat in self._flat]

    def _gather_changed(self) -> None:
        """Gather the weights if the optimizer's parameters were changed since the last time, outside of its step."""
        if self._current_versions() != self._versions:
            wait_for_all(self.world, "a gather of weights, because the optimizer's parameters were changed", hint=_HINT)
            self.gather_weights()

    def sync_buffers(self) -> None:
        self.gather_weights()  # also changes through `.data`, which versions do not count
        super().sync_buffers()

    def model_state(self) -> dict[str, Any]:
        self._gather_changed()
        return super().model_state()

    def local_parameters(self) -> list[Tensor]:
        self._gather_changed()
        return super().local_parameters()

    # --- State --------------------------------------------------------------------------------------------------------

    def parameter_names(self) -> dict[int, str]:
        return super().parameter_names() | self._shards.names

    def piece_of(self, parameter: Tensor) -> Piece | None:
        return self._shards.pieces.get(id(parameter))
