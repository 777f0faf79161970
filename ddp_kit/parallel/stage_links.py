"""What the stages of a pipeline send to each other: activations forward, their gradients back."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from ddp_kit.errors import LossError
from ddp_kit.parallel.split_backward import backward_to_input

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32)
_DIMENSIONS = 12
_FAILED = -2  # in place of `Received.items`


class StageFailedError(Exception):
    """The stage before has raised a `LossError` in the first pass of a run."""


@dataclass(frozen=True)
class Received:
    """What the stage before has sent for one pass."""

    tensor: Tensor
    items: int
    """Of the tuples that its blocks return; -1: they return tensors."""


class Links:
    """The connections of one stage to those before and after it. `ranks`: of all stages, in their order.

    Before each activation goes a header with its shape, through host memory: so passes may differ in shape, and no
    device is waited for. Gradients go back in the shapes that came.
    """

    def __init__(self, ranks: list[int], stage: int, group: Any, host_group: Any, device: torch.device) -> None:
        self.ranks = ranks
        self.stage = stage
        self.group = group
        self._host_group = host_group
        self._device = device
        self._on_their_way: list[tuple[Any, Tensor]] = []

    def arriving(self) -> Received:
        """Memory for the next activation of the stage before; waits until that stage has computed it.

        Raises `StageFailedError`.
        """
        header = torch.zeros(4 + _DIMENSIONS, dtype=torch.int64)
        dist.recv(header, src=self._rank(self.stage - 1), group=self._host_group, tag=self.stage)
        items, trained, kind, dimensions, *sizes = header.tolist()
        if items == _FAILED:
            raise StageFailedError
        tensor = torch.empty(sizes[:dimensions], dtype=_DTYPES[kind], device=self._device)
        return Received(tensor.requires_grad_(bool(trained)), items)

    def announce(self, tensor: Tensor, items: int) -> None:
        """Tell the stage after of an activation that is to be sent. Raises `LossError`."""
        if tensor.dtype not in _DTYPES or tensor.ndim > _DIMENSIONS:
            raise LossError(
                f"a stage of the pipeline would send a tensor of type {tensor.dtype} with {tensor.ndim} dimensions",
                "let blocks return real numbers, such as float32 or bfloat16",
            )
        facts = [items, int(tensor.requires_grad), _DTYPES.index(tensor.dtype), tensor.ndim, *tensor.shape]
        self._send(facts)

    def announce_failure(self) -> None:
        """Let the stage after raise `StageFailedError` instead of waiting."""
        if self.stage + 1 < len(self.ranks) and self._rank(self.stage + 1) != self._rank(self.stage):
            self._send([_FAILED])

    def _send(self, facts: list[int]) -> None:
        header = torch.zeros(4 + _DIMENSIONS, dtype=torch.int64)
        header[: len(facts)] = torch.tensor(facts)
        after = self.stage + 1
        work = dist.isend(header, dst=self._rank(after), group=self._host_group, tag=after)
        self._on_their_way.append((work, header))

    def operation(self, kind: Callable[..., Any], tensor: Tensor, apart: int) -> dist.P2POp:
        """To send or to receive; `apart`: -1, the stage before, or 1, the one after."""
        # Gloo matches by tag what goes between the same two ranks; NCCL by the order, which is the schedule's.
        return dist.P2POp(kind, tensor, self._rank(self.stage + apart), self.group, max(self.stage, self.stage + apart))

    def _rank(self, stage: int) -> int:
        return self.ranks[stage]

    def settle(self) -> None:
        """Wait until the headers have left."""
        for work, _ in self._on_their_way:
            work.wait()
        self._on_their_way.clear()


Forward = Callable[[int, int, Received | None], tuple[Tensor, int]]
"""Numbers of a stage and a pass, what has come -> the loss on the last stage, else what is sent; `Received.items`."""
Backward = Callable[[Tensor | None, Callable[[], None]], None]
"""What `Forward` gave, where its pass ends with this; what computes gradients. A pass may have a part before."""


class Stage(PipelineStage):
    """One stage of torch's schedules, whose passes may differ in shape.

    Of `PipelineStage`, which needs one shape for all passes, the calls are replaced by which the schedules move and
    compute; the order of these is the schedule's. Pass number = the schedule's number + `first`.
    """

    def __init__(self, links: Links, stages: int, device: torch.device) -> None:
        nothing = torch.empty(1, device="meta")  # given, so that no hidden pass finds out shapes
        super().__init__(
            nn.Identity(), links.stage, stages, device, input_args=nothing, output_args=nothing, group=links.group
        )
        self._links = links
        self.forward_pass: Forward
        self.backward_pass: Backward
        self.first = 0
        self._came: dict[int, Received] = {}
        self._gave: dict[int, tuple[Tensor, int]] = {}
        self._gradients: dict[int, Tensor] = {}
        self._rest: dict[int, Callable[[], None]] = {}  # of backward passes in two parts
        self._before: Stage | None = None  # if it is on this rank: tensors stay here
        self._after: Stage | None = None

    def is_followed_by(self, after: "Stage") -> None:
        """Hand over to a stage on the same rank, as the schedules do by `set_local_...`."""
        self._after, after._before = after, self

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        # With "zbv", torch 2.10 would send from the rank in the middle to itself, which gloo cannot. 2.13 asks nobody.
        return [each for each in super()._get_init_p2p_neighbors_ops() if each.group_peer != self.group_rank]

    def clear_runtime_states(self) -> None:
        """Before each step."""
        for kept in (self._came, self._gave, self._gradients, self._rest):
            kept.clear()

    # --- forward --------------------------------------------------------------------------------------------------

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """The activation of a pass."""
        if self.is_first or self._before is not None:
            return []
        came = self._came[fwd_chunk_id] = self._links.arriving()
        return [self._links.operation(dist.irecv, came.tensor.detach(), -1)]

    def forward_one_chunk(self, fwd_chunk_id: int, *_args: Any, **_kwargs: Any) -> Tensor:
        """The loss on the last stage; else what is sent."""
        gave = self.forward_pass(self._links.stage, fwd_chunk_id + self.first, self._came.get(fwd_chunk_id))
        self._gave[fwd_chunk_id] = gave
        return gave[0]

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """The activation of a pass, announced."""
        if self.is_last:
            return []
        tensor, items = self._gave[fwd_chunk_id]
        if self._after is not None:
            self._after.set_local_fwd_input(tensor, fwd_chunk_id)
            return []
        self._links.announce(tensor, items)
        return [self._links.operation(dist.isend, tensor.detach().contiguous(), 1)]

    def set_local_fwd_input(self, prev_stage_outputs: Tensor, mb_index: int) -> None:
        """The activation of a pass, from a stage on this rank."""
        assert self._before is not None, "the schedule takes it for the one before"
        tensor = prev_stage_outputs.detach().requires_grad_(prev_stage_outputs.requires_grad)
        self._came[mb_index] = Received(tensor, self._before._gave[mb_index][1])

    # --- backward -------------------------------------------------------------------------------------------------

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """The gradient of what was sent, where it needs one."""
        if self.is_last or self._after is not None or not self._gave[bwd_chunk_id][0].requires_grad:
            return []
        sent = self._gave[bwd_chunk_id][0]
        gradient = self._gradients[bwd_chunk_id] = torch.empty(sent.shape, dtype=sent.dtype, device=sent.device)
        return [self._links.operation(dist.irecv, gradient, 1)]

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,  # noqa: ARG002
        full_backward: bool = True,
        last_backward: bool = False,  # noqa: ARG002
    ) -> None:
        """Adds to the gradients of this stage's weights; the first of two parts has what the stage before waits for."""
        tensor, _ = self._gave.pop(bwd_chunk_id)
        gradient, came = self._gradients.pop(bwd_chunk_id, None), self._came.get(bwd_chunk_id)

        def compute() -> None:
            if tensor.requires_grad and full_backward:
                torch.autograd.backward(tensor, gradient)
            elif tensor.requires_grad:
                self._rest[bwd_chunk_id] = backward_to_input(tensor, gradient, None if came is None else came.tensor)

        self.backward_pass(tensor if full_backward else None, compute)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:  # noqa: ARG002
        """The second part."""
        # No tensor's hook could tell when this part begins: it begins within the graph.
        self.backward_pass(torch.empty(0), self._rest.pop(bwd_chunk_id, lambda: None))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """The gradient of what has come."""
        (gradient,) = self.get_local_bwd_output(bwd_chunk_id)
        if self._before is not None:
            self._before.set_local_bwd_input((gradient,), bwd_chunk_id)
        if gradient is None or self._before is not None:
            return []
        return [self._links.operation(dist.isend, gradient.contiguous(), -1)]

    def get_local_bwd_output(self, mb_index: int) -> tuple[Tensor | None, ...]:
        """The gradient of what has come; zeros where the loss does not depend on it."""
        came = self._came.pop(mb_index, None)
        if came is None or not came.tensor.requires_grad:
            return (None,)
        return (torch.zeros_like(came.tensor) if came.tensor.grad is None else came.tensor.grad,)

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int) -> None:
        """The gradient of what was given to a stage on this rank."""
        (gradient,) = next_stage_bwd_outputs
        if gradient is not None:
            self._gradients[mb_index] = gradient

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """The strategy reduces gradients, over those ranks that hold the same weights."""


def move(operations: list[dist.P2POp]) -> None:
    """Send and receive, and wait until it is done."""
    for work in dist.batch_isend_irecv(operations) if operations else []:
        work.wait()
