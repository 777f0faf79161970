"""Communication between the stages of a pipeline: activations forward, gradients backward."""

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
_FAILED = -2  # sent instead of `Received.items`


class StageFailedError(Exception):
    """The previous stage has raised a `LossError` in the first pass of a run."""


@dataclass(frozen=True)
class Received:
    """The activation that the previous stage sent for one pass."""

    tensor: Tensor
    items: int
    """The length of the tuples that the blocks return; -1 if they return tensors."""


class Links:
    """The connections of one stage to the previous and the next one. `ranks`: the rank of each stage, in order.

    A header with its shape is sent before each activation, through host memory: passes may therefore differ in shape,
    and the host does not wait for a device. Gradients have the shapes of the activations.
    """

    def __init__(self, ranks: list[int], stage: int, group: Any, host_group: Any, device: torch.device) -> None:
        self.ranks = ranks
        self.stage = stage
        self.group = group
        self._host_group = host_group
        self._device = device
        self._pending_headers: list[tuple[Any, Tensor]] = []

    def arriving(self) -> Received:
        """Receive the header of the previous stage's next activation, and allocate memory for the activation.

        Waits until that stage has computed it. Raises `StageFailedError`.
        """
        header = torch.zeros(4 + _DIMENSIONS, dtype=torch.int64)
        dist.recv(header, src=self._rank(self.stage - 1), group=self._host_group, tag=self.stage)
        items, trained, kind, dimensions, *sizes = header.tolist()
        if items == _FAILED:
            raise StageFailedError
        tensor = torch.empty(sizes[:dimensions], dtype=_DTYPES[kind], device=self._device)
        return Received(tensor.requires_grad_(bool(trained)), items)

    def announce(self, tensor: Tensor, items: int) -> None:
        """Send the header of an activation to the next stage. Raises `LossError`."""
        if tensor.dtype not in _DTYPES or tensor.ndim > _DIMENSIONS:
            raise LossError(
                f"a pipeline stage cannot send a tensor of dtype {tensor.dtype} with {tensor.ndim} dimensions",
                f"let blocks return float32, float64, bfloat16, float16, int64 or int32 with at most {_DIMENSIONS} "
                "dimensions",
            )
        self._send([items, int(tensor.requires_grad), _DTYPES.index(tensor.dtype), tensor.ndim, *tensor.shape])

    def announce_failure(self) -> None:
        """Make the next stage raise `StageFailedError` instead of waiting."""
        if self.stage + 1 < len(self.ranks) and self._rank(self.stage + 1) != self._rank(self.stage):
            self._send([_FAILED])

    def _send(self, values: list[int]) -> None:
        header = torch.zeros(4 + _DIMENSIONS, dtype=torch.int64)
        header[: len(values)] = torch.tensor(values)
        following = self.stage + 1
        work = dist.isend(header, dst=self._rank(following), group=self._host_group, tag=following)
        self._pending_headers.append((work, header))

    def operation(self, kind: Callable[..., Any], tensor: Tensor, offset: int) -> dist.P2POp:
        """A send to or a receive from the previous stage (`offset` -1) or the next one (1)."""
        # Gloo matches messages between two ranks by tag; NCCL by order, which the schedule determines.
        peer = self.stage + offset
        return dist.P2POp(kind, tensor, self._rank(peer), self.group, max(self.stage, peer))

    def _rank(self, stage: int) -> int:
        return self.ranks[stage]

    def settle(self) -> None:
        """Wait until all headers are sent."""
        for work, _ in self._pending_headers:
            work.wait()
        self._pending_headers.clear()


Forward = Callable[[int, int, Received | None], tuple[Tensor, int]]
"""(stage, pass, received activation) -> (the loss on the last stage, else the activation to send; `Received.items`)."""
Backward = Callable[[Tensor | None, Callable[[], None]], None]
"""Gets the output of `Forward` if this call completes the pass's backward, else None; and the function to run."""


class Stage(PipelineStage):
    """A stage for torch's pipeline schedules whose passes may differ in shape.

    `PipelineStage` needs the same shape in all passes, so the methods that send, receive and compute are overridden;
    torch's schedule calls them in its order. Pass number = the schedule's chunk number + `first`.
    """

    def __init__(self, links: Links, stages: int, device: torch.device) -> None:
        unused = torch.empty(1, device="meta")  # without it, torch runs a hidden pass to infer the shapes
        super().__init__(
            nn.Identity(), links.stage, stages, device, input_args=unused, output_args=unused, group=links.group
        )
        self._links = links
        self.forward_pass: Forward
        self.backward_pass: Backward
        self.first = 0
        self._received: dict[int, Received] = {}
        self._outputs: dict[int, tuple[Tensor, int]] = {}
        self._gradients: dict[int, Tensor] = {}
        self._weight_backward: dict[int, Callable[[], None]] = {}  # the second half of split backward passes
        self._previous: Stage | None = None  # the neighbours, if they are on this rank: nothing is sent then
        self._next: Stage | None = None

    def is_followed_by(self, following: "Stage") -> None:
        """Connect the next stage, on the same rank; the schedules pass tensors to it with `set_local_...`."""
        self._next, following._previous = following, self

    def _get_init_p2p_neighbors_ops(self) -> list[dist.P2POp]:
        # With "zbv", torch 2.10 would send from the middle rank to itself, which gloo does not support. 2.13 does not.
        return [each for each in super()._get_init_p2p_neighbors_ops() if each.group_peer != self.group_rank]

    def clear_runtime_states(self) -> None:
        """Forget the last step; torch's schedules call it before each step."""
        for kept in (self._received, self._outputs, self._gradients, self._weight_backward):
            kept.clear()

    # --- forward --------------------------------------------------------------------------------------------------

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """The receive of a pass's activation."""
        if self.is_first or self._previous is not None:
            return []
        received = self._received[fwd_chunk_id] = self._links.arriving()
        return [self._links.operation(dist.irecv, received.tensor.detach(), -1)]

    def forward_one_chunk(self, fwd_chunk_id: int, *_args: Any, **_kwargs: Any) -> Tensor:
        """The loss on the last stage, else the activation to send."""
        output = self.forward_pass(self._links.stage, fwd_chunk_id + self.first, self._received.get(fwd_chunk_id))
        self._outputs[fwd_chunk_id] = output
        return output[0]

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """The send of a pass's activation, after its header."""
        if self.is_last:
            return []
        tensor, items = self._outputs[fwd_chunk_id]
        if self._next is not None:
            self._next.set_local_fwd_input(tensor, fwd_chunk_id)
            return []
        self._links.announce(tensor, items)
        return [self._links.operation(dist.isend, tensor.detach().contiguous(), 1)]

    def set_local_fwd_input(self, prev_stage_outputs: Tensor, mb_index: int) -> None:
        """Take the activation of a pass from the previous stage, on this rank."""
        assert self._previous is not None, "called without a previous stage on this rank"
        tensor = prev_stage_outputs.detach().requires_grad_(prev_stage_outputs.requires_grad)
        self._received[mb_index] = Received(tensor, self._previous._outputs[mb_index][1])

    # --- backward -------------------------------------------------------------------------------------------------

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """The receive of the gradient of the sent activation, if that requires one."""
        if self.is_last or self._next is not None or not self._outputs[bwd_chunk_id][0].requires_grad:
            return []
        sent = self._outputs[bwd_chunk_id][0]
        gradient = self._gradients[bwd_chunk_id] = torch.empty(sent.shape, dtype=sent.dtype, device=sent.device)
        return [self._links.operation(dist.irecv, gradient, 1)]

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,  # noqa: ARG002
        full_backward: bool = True,
        last_backward: bool = False,  # noqa: ARG002
    ) -> None:
        """Compute gradients. Without `full_backward`, only the one of the input, which the previous stage waits for."""
        tensor, _ = self._outputs.pop(bwd_chunk_id)
        gradient, received = self._gradients.pop(bwd_chunk_id, None), self._received.get(bwd_chunk_id)

        def compute() -> None:
            if tensor.requires_grad and full_backward:
                torch.autograd.backward(tensor, gradient)
            elif tensor.requires_grad:
                self._weight_backward[bwd_chunk_id] = backward_to_input(
                    tensor, gradient, None if received is None else received.tensor
                )

        self.backward_pass(tensor if full_backward else None, compute)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:  # noqa: ARG002
        """The second half of a split backward pass: the gradients of the weights."""
        # An unused tensor: this half starts inside the graph, so no hook on the output would run.
        self.backward_pass(torch.empty(0), self._weight_backward.pop(bwd_chunk_id, lambda: None))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """The send of the received activation's gradient."""
        (gradient,) = self.get_local_bwd_output(bwd_chunk_id)
        if self._previous is not None:
            self._previous.set_local_bwd_input((gradient,), bwd_chunk_id)
        if gradient is None or self._previous is not None:
            return []
        return [self._links.operation(dist.isend, gradient.contiguous(), -1)]

    def get_local_bwd_output(self, mb_index: int) -> tuple[Tensor | None, ...]:
        """The gradient of the received activation; zeros if the loss does not depend on it."""
        received = self._received.pop(mb_index, None)
        if received is None or not received.tensor.requires_grad:
            return (None,)
        return (torch.zeros_like(received.tensor) if received.tensor.grad is None else received.tensor.grad,)

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int) -> None:
        """Take the gradient of a pass's output from the next stage, on this rank."""
        (gradient,) = next_stage_bwd_outputs
        if gradient is not None:
            self._gradients[mb_index] = gradient

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Nothing: the strategy reduces gradients over the ranks that hold the same weights."""


def move(operations: list[dist.P2POp]) -> None:
    """Run sends and receives, and wait until they are complete."""
    for work in dist.batch_isend_irecv(operations) if operations else []:
        work.wait()
