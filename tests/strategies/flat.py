"""A strategy written against the interface alone: one all-reduce of all gradients, after the last backward pass."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ddp_kit.parallel import Strategy
from ddp_kit.parallel.strategy import broadcast


class FlatAllReduce(Strategy):
    """A whole replica on every rank. Gradients are joined in one tensor per type and added up over the ranks."""

    def setup(self, model: nn.Module) -> None:
        super().setup(model)
        broadcast([each.detach() for each in (*model.parameters(), *model.buffers())])

    def sync_buffers(self) -> None:
        broadcast(self.model.buffers())

    @torch.no_grad()
    def finish_reduction(self) -> None:
        used = torch.tensor([float(each.grad is not None) for each in self.parameters], device=self.world.device)
        dist.all_reduce(used)
        reduced = [each for each, ranks in zip(self.parameters, used.tolist(), strict=True) if ranks]
        for dtype in dict.fromkeys(each.dtype for each in reduced):
            group = [each for each in reduced if each.dtype == dtype]
            flat = torch.cat([_gradient(each).reshape(-1) for each in group])
            dist.all_reduce(flat)
            for each, gradient in zip(group, flat.split([each.numel() for each in group]), strict=True):
                each.grad = gradient.view_as(each)

    abandon_step = finish_reduction


def _gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        return torch.zeros_like(parameter)
    return parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
