"""An optimizer on the host: its state is in host memory, and it updates copies of the weights in host memory.

Gradients are reduced, scaled and clipped on the device. Each step first copies the model's weights to the host,
so changes that other code made to the weights take effect. Source: Ren et al. 2021, arXiv 2101.06840.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_kit.errors import ConfigError
from ddp_kit.parallel.shards import settings_of


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
        self._on_host = optimizer
        trained = [each for group in self.param_groups for each in group["params"] if each.requires_grad]
        self._copies = {} if in_place else {each: _HostCopy(each) for each in trained}
        self._devices = {each.device for each in self._copies if each.is_cuda}
        for group in optimizer.param_groups:
            group["params"] = [self._copies[each].weight if each in self._copies else each for each in group["params"]]
        for each, copy in self._copies.items():
            if each in optimizer.state:
                optimizer.state[copy.weight] = optimizer.state.pop(each)
        if optimizer.state:
            optimizer.load_state_dict(optimizer.state_dict())  # moves the state to the devices of the parameters

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the weights. Parameters without a gradient are skipped."""
        assert closure is None, "gradients are complete before the step"
        for each, copy in self._copies.items():
            copy.fetch(each)
        for device in self._devices:
            torch.cuda.current_stream(device).synchronize()
        self._on_host.step()
        for each, copy in self._copies.items():
            copy.send_back(each)


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


def check_steps_on_cpu(optimizer: Optimizer) -> None:
    """Raise `ConfigError` if an optimizer does not support the CPU. Tries one step with a small tensor."""
    kind, group = type(optimizer), optimizer.param_groups[0]
    like = next(iter(group["params"]), torch.empty(0))
    parameter = nn.Parameter(torch.ones(2, 2, dtype=like.dtype))
    try:
        trial = kind([parameter], **settings_of(kind, group, kernels=True))
    except (TypeError, ValueError):  # the optimizer cannot be created from its settings, so it is not checked
        return
    except RuntimeError as error:
        raise _only_on_gpu(optimizer, error) from None
    failed: Exception | None = None
    for gradient in (torch.ones_like(parameter), torch.ones_like(parameter).to_sparse(1)):  # SparseAdam: the second
        parameter.grad = gradient
        try:
            with torch.random.fork_rng(devices=[]):
                trial.step()
        except TypeError:  # `step` needs a closure, which the Trainer refuses together with offload
            return
        except (RuntimeError, AssertionError) as error:
            failed = failed or error
        else:
            return
    assert failed is not None, "a step has failed"
    raise _only_on_gpu(optimizer, failed) from None


def _only_on_gpu(optimizer: Optimizer, error: Exception) -> ConfigError:
    return ConfigError(
        f"memory.offload runs the optimizer on the CPU, which {type(optimizer).__name__} does not support: {error}",
        "leave out capturable=True and other settings for GPU kernels (fused=True works with Adam, AdamW and SGD), "
        "or leave out memory.offload",
    )
