"""An optimizer on the host: its state is in host memory, and it updates copies of the weights in host memory.

Gradients are reduced, scaled and clipped on the device. Each step first copies the model's weights to the host,
so changes that other code made to the weights take effect. Source: Ren et al. 2021, arXiv 2101.06840.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_kit.errors import ConfigError
from ddp_kit.parallel.optimizer_trial import check_steps_on_cpu


class OffloadedOptimizer(Optimizer):
    """Holds the parameters that this rank updates, and lets another optimizer update copies of them on the host.

    step():
        copy all weights and gradients to the host, and wait until these copies are complete
        step the optimizer on the host
        copy the weights back, without waiting

    `optimizer`: the user's own optimizer, whose parameters are replaced with the copies.
    `in_place`: whether the parameters are already in host memory, so that nothing is copied.
    Raises `ConfigError` for an optimizer that does not support the CPU.
    """

    def __init__(self, optimizer: Optimizer, *, in_place: bool = False) -> None:
        super().__init__([{"params": [*group["params"]]} for group in optimizer.param_groups], {})
        check_steps_on_cpu(optimizer)
        if not in_place and all(callable(getattr(optimizer, name, None)) for name in ("train", "eval")):
            raise ConfigError(
                f"the optimizer {type(optimizer).__name__} has train() and eval(), which change the weights outside of "
                "step(), but with memory.offload='optimizer' it holds copies, from which only step() updates the model",
                "leave out memory.offload, or use an optimizer without train() and eval()",
            )
        self._on_host = optimizer
        self._copies: dict[nn.Parameter, _HostCopy] = {}
        if not in_place:
            trained = [each for group in self.param_groups for each in group["params"] if each.requires_grad]
            self._copies = {parameter: _HostCopy(parameter) for parameter in trained}
        weights = {parameter: copy.weight for parameter, copy in self._copies.items()}
        for group in optimizer.param_groups:
            group["params"] = [weights.get(parameter, parameter) for parameter in group["params"]]
        self._devices = {parameter.device for parameter in self._copies if parameter.is_cuda}
        for parameter, copy in self._copies.items():
            if parameter in optimizer.state:
                optimizer.state[copy.weight] = optimizer.state.pop(parameter)
        if optimizer.state:
            optimizer.load_state_dict(optimizer.state_dict())  # moves the state to the devices of the parameters

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the weights. Parameters without a gradient are skipped."""
        assert closure is None, "gradients are complete before the step"
        for parameter, copy in self._copies.items():
            copy.fetch(parameter)
        for device in self._devices:
            torch.cuda.current_stream(device).synchronize()
        self._on_host.step()
        for parameter, copy in self._copies.items():
            copy.send_back(parameter)


class _HostCopy:
    """Host copies of a parameter and its gradient; in pinned memory if the parameter is on a GPU."""

    def __init__(self, parameter: nn.Parameter) -> None:
        self.weight = nn.Parameter(_on_host(parameter).copy_(parameter.detach()))
        self._gradient = _on_host(parameter)

    def fetch(self, parameter: nn.Parameter) -> None:
        """Start copying the weights and the gradient to the host."""
        gradient = parameter.grad
        if gradient is None:
            return
        self.weight.copy_(parameter, non_blocking=True)
        if gradient.is_sparse:
            self.weight.grad = gradient.to("cpu")
        else:
            self.weight.grad = self._gradient.copy_(gradient, non_blocking=True)

    def send_back(self, parameter: nn.Parameter) -> None:
        """Start copying the updated weights to the device."""
        if self.weight.grad is not None:
            parameter.copy_(self.weight, non_blocking=True)
            self.weight.grad = None


def _on_host(like: nn.Parameter) -> Tensor:
    return torch.empty_like(like, device="cpu", pin_memory=like.is_cuda, requires_grad=False)
