"""What the Trainer is given, brought into the shape that the loop needs, or refused."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ddp_kit import contract
from ddp_kit.errors import ConfigError
from ddp_kit.metrics import Loss

LossFunction = Callable[[nn.Module, Any], "Tensor | Loss"]
MetricFunction = Callable[[Any, Any], "Tensor | Loss"]


def only_repeatable_algorithms() -> None:
    contract.make_cublas_repeatable()
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def optimizer_for(model: nn.Module, optimizer: Optimizer | Callable[[Iterable[nn.Parameter]], Optimizer]) -> Optimizer:
    made = optimizer if isinstance(optimizer, Optimizer) else optimizer(model.parameters())
    if not isinstance(made, Optimizer):
        raise ConfigError(
            f"optimizer is a {type(made).__name__}", "give a torch Optimizer, or a function parameters -> Optimizer"
        )
    own = set(model.parameters())
    if not any(parameter in own for group in made.param_groups for parameter in group["params"]):
        raise ConfigError(
            "the optimizer holds none of the model's parameters, so nothing would be trained",
            "make it from model.parameters() of the model that the Trainer gets",
        )
    return made


def scheduler_for(
    optimizer: Optimizer, scheduler: LRScheduler | Callable[[Optimizer], LRScheduler] | None
) -> LRScheduler | None:
    made = scheduler if scheduler is None or isinstance(scheduler, LRScheduler) else scheduler(optimizer)
    if made is not None and (not isinstance(made, LRScheduler) or isinstance(made, ReduceLROnPlateau)):
        raise ConfigError(
            f"scheduler is a {type(made).__name__}, which cannot tick once per optimizer step by itself",
            "give an LRScheduler that needs no value, or a function optimizer -> LRScheduler",
        )
    return made


def checked_metrics(metrics: Mapping[str, MetricFunction]) -> dict[str, MetricFunction]:
    if "loss" in metrics:
        raise ConfigError("a metric is called 'loss', the name of the loss itself", "choose another name for it")
    return dict(metrics)


@contextmanager
def evaluating(model: nn.Module) -> Iterator[list[Any]]:
    """The model in evaluation mode, its outputs noted; every module's own mode comes back afterwards."""
    modes = {module: module.training for module in model.modules()}
    outputs: list[Any] = []
    hook = model.register_forward_hook(lambda _module, _inputs, output: outputs.append(output))
    model.eval()
    try:
        yield outputs
    finally:
        hook.remove()
        for module, mode in modes.items():
            module.training = mode
