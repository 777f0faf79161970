"""Checks at the start of a run: whether weights, gradients and optimizer state fit in the memory of a GPU."""

from torch import nn
from torch.optim import Optimizer

from ddp_kit.errors import ConfigError
from ddp_kit.memory.choose import device_memory
from ddp_kit.memory.estimate import MemoryPlan
from ddp_kit.memory.measure import bytes_of, state_to_come
from ddp_kit.model.modes import sparse_weights
from ddp_kit.parallel import Strategy
from ddp_kit.texts import distinct_sizes, size_text

_EXACT = ("ddp", "zero1", "fsdp", "tensor")  # for other strategies the memory per device is not known in advance


def check_weights_fit(model: nn.Module, strategy: Strategy) -> None:
    """Raise `ConfigError` if weights and gradients exceed the memory of the GPU that the model will be moved to."""
    memory = _memory_to_fit(strategy)
    if memory is not None and not strategy.replaces_parameters:
        sparse = sparse_weights(model)
        dense = [each for each in model.parameters() if each.requires_grad and each not in sparse]
        trained = sum(map(bytes_of, dense))
        check_exact_fits(MemoryPlan(sum(map(bytes_of, model.parameters())), trained, 0), memory)


def check_fits(model: nn.Module, strategy: Strategy, optimizer: Optimizer, stepped_optimizer: Optimizer) -> int | None:
    """Raise `ConfigError` if weights, gradients and optimizer state alone exceed the memory of this rank's GPU.

    Called after `strategy.setup`. `stepped_optimizer`: the optimizer that holds the model's parameters; the same object
    as `optimizer`, unless `optimizer` holds copies on the host. Returns the sum of these bytes on this rank; None on
    the CPU, or if unknown.
    """
    memory = _memory_to_fit(strategy)
    if memory is None:
        return None
    trained = strategy.parameters
    if strategy.replaces_parameters:
        trained = tuple(
            parameter
            for group in stepped_optimizer.param_groups
            for parameter in group["params"]
            if parameter.requires_grad
        )
    sparse = sparse_weights(model)
    weights = sum(map(bytes_of, strategy.local_parameters()))
    gradients = sum(bytes_of(parameter) for parameter in trained if parameter not in sparse)
    if strategy.parameters_on_host:
        weights = gradients = 0
    weights += sum(map(bytes_of, model.buffers()))
    state = state_to_come(optimizer) if optimizer is stepped_optimizer else 0
    plan = MemoryPlan(weights, gradients, state)
    check_exact_fits(plan, memory)
    return plan.exact


def _memory_to_fit(strategy: Strategy) -> int | None:
    return device_memory(strategy.world.device) if strategy.config.strategy in _EXACT else None


def check_exact_fits(plan: MemoryPlan, device_memory: int) -> None:
    """Raise `ConfigError` if weights, gradients and optimizer state alone do not fit.

    The estimated parts of the plan, such as activations, are ignored.
    """
    if plan.exact <= device_memory:
        return
    parts = {"weights": plan.weights, "gradients": plan.gradients, "optimizer state": plan.optimizer_state}
    shown = ", ".join(f"{name} {size_text(size)}" for name, size in parts.items())
    needed, has = distinct_sizes(plan.exact, device_memory)
    raise ConfigError(
        f"the run cannot fit in memory: {shown} per device, in total {needed}, but a device has {has}",
        '`ddpkit plan` shows which settings fit; parallel="fsdp" divides weights, gradients and optimizer state by the '
        "number of ranks",
    )
