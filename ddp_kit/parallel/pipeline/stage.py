"""One rank's stage of a pipeline, as torch's schedules call it: runs passes, and exchanges tensors with its neighbours.

`PipelineStage` alone (torch 2.13) supports fewer models: blocks may return only tensors, and all passes need the same
shapes, which it infers by calling the stage's module once more, and sends as pickles. It also turns errors of the model
into RuntimeErrors.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from ddp_kit.errors import LossError
from ddp_kit.parallel.pipeline.model import Activation

_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32)
_DIMENSIONS = 12
_FAILED = -2  # sent instead of `Activation.items`


class StageFailedError(Exception):
    """The previous stage has raised a `LossError` in the first pass of a run."""


Forward = Callable[[int, Activation | None], Activation]
"""Runs a pass, given its number and its input. Returns the activation to send; on the last stage, the loss."""
Backward = Callable[[Tensor, Tensor | None, bool], None]
"""Runs the backward pass from an output, given its gradient, and whether it is the last one of the step."""


class Stage(PipelineStage):
    """A stage whose passes may differ in shape. torch's schedules call its methods in the order of the schedule:

        get_fwd_recv_ops    forward_one_chunk     get_fwd_send_ops      for the forward pass of a chunk (micro-batch)
        get_bwd_recv_ops    backward_one_chunk    get_bwd_send_ops      for its backward pass

    The number of a pass is the schedule's chunk number plus `first_pass`.

    Before each activation, a header with the activation's shape is sent through host memory, so the host does not wait
    for a device. Gradients have the shapes of the activations.
    """

    run_forward: Forward
    run_backward: Backward

    def __init__(self, group: dist.ProcessGroup, host_group: dist.ProcessGroup, device: torch.device) -> None:
        """Create this rank's stage. `group`, `host_group`: groups of the ranks of all stages, in order."""
        unused = torch.empty(1, device="meta")  # without it, torch runs a hidden pass to infer the shapes
        super().__init__(
            nn.Identity(), group.rank(), group.size(), device, input_args=unused, output_args=unused, group=group
        )
        self.first_pass = 0
        self._ranks = dist.get_process_group_ranks(group)  # of all stages
        self._host_group = host_group
        self._inputs: dict[int, Activation] = {}  # by chunk, as the dictionaries below
        self._outputs: dict[int, Activation] = {}
        self._output_gradients: dict[int, Tensor] = {}
        self._headers: list[tuple[Any, Tensor]] = []  # that may still be on their way

    def clear_runtime_states(self) -> None:
        """Clear the state of the last step. torch's schedules call this method before each step."""
        self._inputs.clear()
        self._outputs.clear()
        self._output_gradients.clear()

    # --- Forward ------------------------------------------------------------------------------------------------------

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Receive the header of the previous stage's activation. Returns the operation that receives the activation.

        Waits until the previous stage has computed the activation. Raises `StageFailedError` if that stage failed.
        """
        if self.is_first:
            return []
        header = torch.zeros(4 + _DIMENSIONS, dtype=torch.int64)
        dist.recv(header, src=self._ranks[self.stage_index - 1], group=self._host_group, tag=self.stage_index)
        items, requires_grad, dtype, dimensions, *sizes = header.tolist()
        if items == _FAILED:
            raise StageFailedError
        tensor = torch.empty(sizes[:dimensions], dtype=_DTYPES[dtype], device=self.device)
        self._inputs[fwd_chunk_id] = Activation(tensor.requires_grad_(bool(requires_grad)), items)
        return [self._operation(dist.irecv, tensor.detach(), self.stage_index - 1)]

    def forward_one_chunk(self, fwd_chunk_id: int, *_args: Any, **_kwargs: Any) -> Tensor:
        """Run a forward pass. Returns the loss on the last stage, and the tensor to send on other stages."""
        output = self.run_forward(fwd_chunk_id + self.first_pass, self._inputs.get(fwd_chunk_id))
        self._outputs[fwd_chunk_id] = output
        return output.tensor

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        """Send the header of a pass's activation. Returns the operation that sends the activation.

        Raises `LossError` if the activation cannot be sent.
        """
        if self.is_last:
            return []
        output = self._outputs[fwd_chunk_id]
        tensor = output.tensor
        if tensor.dtype not in _DTYPES or tensor.ndim > _DIMENSIONS:
            raise LossError(
                f"a pipeline stage cannot send a tensor of dtype {tensor.dtype} with {tensor.ndim} dimensions",
                "make the blocks return tensors of dtype float32, float64, bfloat16, float16, int64 or int32, with at "
                f"most {_DIMENSIONS} dimensions",
            )
        dtype = _DTYPES.index(tensor.dtype)
        self._send_header(output.items, int(tensor.requires_grad), dtype, tensor.ndim, *tensor.shape)
        return [self._operation(dist.isend, tensor.detach().contiguous(), self.stage_index + 1)]

    # --- Backward -----------------------------------------------------------------------------------------------------

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the operation that receives the gradient of the sent activation, if that requires a gradient."""
        tensor = self._outputs[bwd_chunk_id].tensor
        if self.is_last or not tensor.requires_grad:
            return []
        gradient = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
        self._output_gradients[bwd_chunk_id] = gradient
        return [self._operation(dist.irecv, gradient, self.stage_index + 1)]

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,  # noqa: ARG002
        full_backward: bool = True,  # noqa: ARG002
        last_backward: bool = False,
    ) -> None:
        """Run a backward pass. `last_backward`: whether it is the last one of the schedule, and so of the step."""
        output = self._outputs.pop(bwd_chunk_id).tensor
        self.run_backward(output, self._output_gradients.pop(bwd_chunk_id, None), last_backward)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        """Return the operation that sends the gradient of the received activation; zeros if no loss depends on it."""
        received = self._inputs.pop(bwd_chunk_id, None)
        if received is None or not received.tensor.requires_grad:
            return []
        gradient = received.tensor.grad
        if gradient is None:
            gradient = torch.zeros_like(received.tensor)
        return [self._operation(dist.isend, gradient.contiguous(), self.stage_index - 1)]

    def perform_reduce_grad(self, grad_scale_factor: int) -> None:
        """Do nothing: the strategy reduces gradients over the ranks that hold the same weights."""

    # --- Without a schedule -------------------------------------------------------------------------------------------

    def receive(self) -> Activation | None:
        """Receive an activation from the previous stage, and wait for it; None on the first stage."""
        move(self.get_fwd_recv_ops(0))
        return self._inputs.pop(0, None)

    def send(self, activation: Activation) -> None:
        """Send an activation to the next stage, and wait until it is sent."""
        self._outputs[0] = activation
        move(self.get_fwd_send_ops(0))
        del self._outputs[0]
        self.wait_for_headers()

    def send_failure(self) -> None:
        """Make the next stage, which waits for a header, raise `StageFailedError`."""
        if not self.is_last:
            self._send_header(_FAILED)

    def wait_for_headers(self) -> None:
        """Wait until all headers are sent."""
        for work, _ in self._headers:
            work.wait()
        self._headers.clear()

    # --- Messages -----------------------------------------------------------------------------------------------------

    def _send_header(self, *values: int) -> None:
        header = torch.zeros(4 + _DIMENSIONS, dtype=torch.int64)
        header[: len(values)] = torch.tensor(values)
        tag = self.stage_index + 1
        work = dist.isend(header, dst=self._ranks[self.stage_index + 1], group=self._host_group, tag=tag)
        self._headers.append((work, header))

    def _operation(self, kind: Callable[..., Any], tensor: Tensor, neighbour: int) -> dist.P2POp:
        """Create a send or receive operation. `neighbour`: the index of the previous or the next stage."""
        # Gloo matches messages between two ranks by tag; NCCL by order, which the schedule determines.
        return dist.P2POp(kind, tensor, self._ranks[neighbour], self.group, max(self.stage_index, neighbour))


def move(operations: list[dist.P2POp]) -> None:
    """Run sends and receives, and wait until they are complete."""
    if operations:
        for work in dist.batch_isend_irecv(operations):
            work.wait()
