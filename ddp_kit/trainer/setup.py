"""Checks the Trainer's arguments and converts them to what the loop needs."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ddp_kit.callbacks import Callback
from ddp_kit.config import TrainerConfig
from ddp_kit.env import make_cublas_deterministic
from ddp_kit.errors import ConfigError, nearest, some
from ddp_kit.metric_objects import MetricObject, is_metric_object
from ddp_kit.parallel import Strategy
from ddp_kit.sampler import OwnTrainBatches, TrainBatches
from ddp_kit.trainer.parts import MetricFunction


def only_repeatable_algorithms() -> None:
    make_cublas_deterministic()
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def checked_config(config: object) -> TrainerConfig:
    """The configuration; the default one for None."""
    if config is None:
        return TrainerConfig()
    if not isinstance(config, TrainerConfig):
        raise ConfigError(
            f"config is a {type(config).__name__}", "pass a TrainerConfig, such as TrainerConfig(epochs=3)"
        )
    return config


def checked_function(value: Any, name: str) -> Any:
    """The function, if it can be called."""
    if not callable(value):
        raise ConfigError(f"{name} is a {type(value).__name__}", "pass a function")
    return value


def checked_model(model: object) -> None:
    """Raise `ConfigError` if it is not a Module, or is on the meta device."""
    if not isinstance(model, nn.Module):
        what = f"the class {model.__name__}" if isinstance(model, type) else f"a {type(model).__name__}"
        raise ConfigError(f"model is {what}", "pass an instance of torch.nn.Module: Trainer(MyModel(), ...)")
    tensors = [*model.named_parameters(), *model.named_buffers()]
    meta = [name for name, each in tensors if each.is_meta]
    if meta:
        raise ConfigError(
            f"the model {type(model).__name__} is on the meta device, without values: {some(meta)}",
            "allocate it first with model.to_empty(device=...), then initialise or load its weights",
        )


def optimizer_for(
    model: nn.Module,
    optimizer: Optimizer | Callable[[Iterable[nn.Parameter]], Optimizer] | None,
    strategy: Strategy,
) -> Optimizer:
    """The optimizer, created if a function was given. Raises `ConfigError` unless it trains exactly this model."""
    made: object = optimizer
    if strategy.replaces_parameters and isinstance(optimizer, Optimizer):
        kind, name = type(optimizer).__name__, strategy.config.strategy
        raise ConfigError(
            f"parallel={name!r} replaces the model's parameters with sharded ones, but the {kind} holds the old ones",
            f"pass a function that creates it: Trainer(model, lambda parameters: {kind}(parameters, lr=...), ...)",
        )
    if not isinstance(optimizer, Optimizer) and callable(optimizer):
        made = optimizer(model.parameters())
    if not isinstance(made, Optimizer):
        raise ConfigError(
            f"optimizer is a {type(made).__name__}", "pass a torch Optimizer, or a function parameters -> Optimizer"
        )
    own = set(model.parameters())
    unknown = sum(parameter not in own for group in made.param_groups for parameter in group["params"])
    if unknown:
        raise ConfigError(
            f"the optimizer holds {unknown} parameters that the model does not have: their gradients would not be "
            "reduced over the ranks",
            "create it from model.parameters(); make a loss with parameters a submodule of the model",
        )
    _check_complete(model, made)
    strategy.setup_optimizer(made)
    if made.state:
        made.load_state_dict(made.state_dict())  # torch moves the state to where the parameters are now
    return made


def _check_complete(model: nn.Module, optimizer: Optimizer) -> None:
    held = {parameter for group in optimizer.param_groups for parameter in group["params"]}
    missing = [
        name for name, parameter in model.named_parameters() if parameter.requires_grad and parameter not in held
    ]
    if missing:
        raise ConfigError(
            f"the optimizer does not hold {some(missing)}, which require grad: they would never be updated",
            "create it from model.parameters(); call requires_grad_(False) on parameters that are not to be trained",
        )


def scheduler_for(
    optimizer: Optimizer, scheduler: LRScheduler | Callable[[Optimizer], LRScheduler] | None
) -> LRScheduler | None:
    """The scheduler, created if a function was given. Raises `ConfigError` unless it is one for this optimizer."""
    made: object = scheduler
    if scheduler is not None and not isinstance(scheduler, LRScheduler) and callable(scheduler):
        made = scheduler(optimizer)
    if made is None:
        return None
    if not isinstance(made, LRScheduler):
        raise ConfigError(
            f"scheduler is a {type(made).__name__}, not an LRScheduler",
            "pass a scheduler of torch.optim.lr_scheduler, or a function optimizer -> LRScheduler",
        )
    if made.optimizer is not optimizer:
        raise ConfigError(
            "the scheduler belongs to another optimizer",
            "create it with the optimizer that you pass to the Trainer, or pass a function optimizer -> LRScheduler",
        )
    return made


def check_sync_batch_norm(model: nn.Module, batches: TrainBatches | OwnTrainBatches | None, world_size: int) -> None:
    """Raise `ConfigError` if ranks would run SyncBatchNorm, a collective in every pass, unequally often.

    `batches`: None for a stream of unknown length.
    """
    uneven = batches is None or any(batches.samples(step) % world_size for step in (0, batches.steps - 1))
    if world_size > 1 and uneven and any(isinstance(module, nn.SyncBatchNorm) for module in model.modules()):
        raise ConfigError(
            f"the model has SyncBatchNorm, but {world_size} ranks do not share every global batch evenly",
            f"set data.drop_last=True and a global_batch_size that {world_size} divides",
        )


def checked_metrics(metrics: object) -> dict[str, MetricFunction | MetricObject]:
    """The metrics by name, none of which is the loss itself."""
    if not isinstance(metrics, Mapping):
        raise ConfigError(f"metrics is a {type(metrics).__name__}", 'pass a dict: metrics={"accuracy": accuracy}')
    if "loss" in metrics:
        raise ConfigError("a metric is called 'loss', the name of the loss itself", "rename the metric")
    return {name: _checked_metric(name, metric) for name, metric in metrics.items()}


def _checked_metric(name: str, metric: Any) -> MetricFunction | MetricObject:
    if is_metric_object(metric):
        return MetricObject(name, metric, None)
    if isinstance(metric, tuple) and len(metric) == 2 and is_metric_object(metric[0]):
        return MetricObject(name, metric[0], checked_function(metric[1], f"the second part of metric {name!r}"))
    function: MetricFunction = checked_function(metric, f"metric {name!r}")
    return function


def checked_callbacks(callbacks: object) -> tuple[Callback, ...]:
    """The callbacks as a tuple. Raises `ConfigError` if one is not a `Callback`."""
    given = callbacks if isinstance(callbacks, list | tuple) else [callbacks]
    for callback in given:
        if isinstance(callback, type) and issubclass(callback, Callback):
            raise ConfigError(
                f"callbacks contains the class {callback.__name__}", f"pass an instance: {callback.__name__}(...)"
            )
        if not isinstance(callback, Callback):
            raise ConfigError(
                f"callbacks contains a {type(callback).__name__}",
                "pass a list of instances of ddp_kit.Callback subclasses",
            )
        _check_events(callback)
    return tuple(given)


def _check_events(callback: Callback) -> None:
    """Raise `ConfigError` for a method that looks like an event and is none: nothing would call it."""
    events = [name for name in vars(Callback) if name.startswith("on_")]
    unknown = [name for name in dir(type(callback)) if name.startswith("on_") and name not in events]
    for name in unknown:
        if (likely := nearest(name, events)) is not None:
            raise ConfigError(
                f"{type(callback).__name__} has a method {name}, but there is no such event",
                f"did you mean {likely}? The events are {', '.join(events)}",
            )
