"""What the stages of a pipeline send to each other: activations forward, their gradients back."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from ddp_kit.errors import LossError

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32)
_DIMENSIONS = 12


@dataclass(frozen=True)
class Received:
    """What the stage before has sent for one pass."""

    tensor: Tensor
    items: int
    """Of the tuples that its blocks return; -1: they return tensors."""


class Links:
    """The connections of one stage to those before and after it. `ranks`: of the pipeline, which take turns.

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
        """Memory for the next activation of the stage before; waits until that stage has computed it."""
        header = torch.zeros(4 + _DIMENSIONS, dtype=torch.int64)
        dist.recv(header, src=self._rank(self.stage - 1), group=self._host_group, tag=self.stage)
        items, trained, kind, dimensions, *sizes = header.tolist()
        tensor = torch.empty(sizes[:dimensions], dtype=_DTYPES[kind], device=self._device)
        return Received(tensor.requires_grad_(bool(trained)), items)

    def announce(self, tensor: Tensor, items: int) -> None:
        """Tell the stage after of an activation that is to be sent. Raises `LossError`."""
        if tensor.dtype not in _DTYPES or tensor.ndim > _DIMENSIONS:
            raise LossError(
                f"a stage of the pipeline would send a tensor of type {tensor.dtype} with {tensor.ndim} dimensions",
                "let blocks return real numbers, such as float32 or bfloat16",
            )
        header = torch.zeros(4 + _DIMENSIONS, dtype=torch.int64)
        facts = [items, int(tensor.requires_grad), _DTYPES.index(tensor.dtype), tensor.ndim, *tensor.shape]
        header[: len(facts)] = torch.tensor(facts)
        after = self.stage + 1
        work = dist.isend(header, dst=self._rank(after), group=self._host_group, tag=after)
        self._on_their_way.append((work, header))

    def operation(self, kind: Callable[..., Any], tensor: Tensor, apart: int) -> dist.P2POp:
        """To send or to receive; `apart`: -1, the stage before, or 1, the one after."""
        # Gloo matches by tag what goes between the same two ranks; NCCL by the order, which is the schedule's.
        return dist.P2POp(kind, tensor, self._rank(self.stage + apart), self.group, max(self.stage, self.stage + apart))

    def _rank(self, stage: int) -> int:
        return self.ranks[stage % len(self.ranks)]

    def settle(self) -> None:
        """Wait until the headers have left."""
        for work, _ in self._on_their_way:
            work.wait()
        self._on_their_way.clear()


Forward = Callable[[int, int, Received | None], tuple[Tensor, int]]
"""Numbers of a stage and a pass, what has come -> the loss on the last stage, else what is sent; `Received.items`."""
Backward = Callable[[Tensor, Tensor | None], None]
"""What `Forward` gave, its gradient (None: it is a loss)."""


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

    def clear_runtime_states(self) -> None:
        """Before each step."""
        for kept in (self._came, self._gave, self._gradients):
            kept.clear()

    # --- forward --------------------------------------------------------------------------------------------------

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """The activation of a pass."""
        if self.is_first:
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
        self._links.announce(tensor, items)
        return [self._links.operation(dist.isend, tensor.detach().contiguous(), 1)]

    # --- backward -------------------------------------------------------------------------------------------------

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """The gradient of what was sent, where it needs one."""
        if self.is_last or not self._gave[bwd_chunk_id][0].requires_grad:
            return []
        sent = self._gave[bwd_chunk_id][0]
        gradient = self._gradients[bwd_chunk_id] = torch.empty(sent.shape, dtype=sent.dtype, device=sent.device)
        return [self._links.operation(dist.irecv, gradient, 1)]

    def backward_one_chunk(self, bwd_chunk_id: int, *_args: Any, **_kwargs: Any) -> None:
        """Adds to the gradients of this stage's weights."""
        tensor, _ = self._gave.pop(bwd_chunk_id)
        self.backward_pass(tensor, self._gradients.pop(bwd_chunk_id, None))

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """The gradient of what has come; zeros where the loss does not depend on it."""
        came = self._came.pop(bwd_chunk_id, None)
        if came is None or not came.tensor.requires_grad:
            return []
        gradient = torch.zeros_like(came.tensor) if came.tensor.grad is None else came.tensor.grad
        return [self._links.operation(dist.isend, gradient.contiguous(), -1)]

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """The strategy reduces gradients, over those ranks that hold the same weights."""


def move(operations: list[dist.P2POp]) -> None:
    """Send and receive, and wait until it is done."""
    for work in dist.batch_isend_irecv(operations) if operations else []:
        work.wait()
