"""Checks of the Trainer's arguments, and creation of the optimizer and the scheduler."""

import inspect
import multiprocessing
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, get_args

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ddp_kit.callbacks import Callback
from ddp_kit.checkpoint.packing import unstorable_values
from ddp_kit.config.settings import CheckpointConfig, TrainerConfig
from ddp_kit.distributed.world import World
from ddp_kit.env import make_cublas_deterministic
from ddp_kit.errors import ConfigError, nearest
from ddp_kit.metrics import MetricObject, is_metric_object
from ddp_kit.parallel import Strategy
from ddp_kit.parallel.strategy import stored
from ddp_kit.texts import kind_of, some
from ddp_kit.trainer.context import MetricFunction, SchedulerInterval


def check_main() -> None:
    """Raise `ConfigError` if a spawned child process, such as a DataLoader worker, creates a Trainer.

    This happens if the child imports a script without a main guard. Without the error, the child would join the process
    group with the rank of its parent, and wait forever.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):  # as multiprocessing.spawn itself checks
        raise ConfigError(
            "a spawned process, such as a DataLoader worker, imports the script, which creates a Trainer",
            'move the code that creates the Trainer under `if __name__ == "__main__":`; keep classes and functions '
            "above it",
        )


def use_deterministic_algorithms() -> None:
    """Make torch, cuBLAS and cuDNN use only deterministic algorithms."""
    make_cublas_deterministic()
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


def checked_config(config: object) -> TrainerConfig:
    """Return `config`, or the default configuration if it is None. Raises `ConfigError` for other types."""
    if config is None:
        return TrainerConfig()
    if not isinstance(config, TrainerConfig):
        how = {"dict": "TrainerConfig(**settings)", "str": f"TrainerConfig.load({config!r})"}
        raise ConfigError(
            f"config is {kind_of(config)}, not a TrainerConfig",
            f"pass config={how.get(type(config).__name__, 'TrainerConfig(epochs=3)')}",
        )
    return config


def checked_function(value: Any, name: str, *arguments: str) -> Any:
    """Return the function if it can be called with the positional `arguments`; otherwise raise `ConfigError`."""
    wanted = ", ".join(arguments)
    hint = f"pass a function of ({wanted})"
    if not callable(value):
        raise ConfigError(f"{name} is {kind_of(value)}, not a function", hint)
    try:
        # Module.__call__ accepts any arguments; `forward` has the real signature.
        signature = inspect.signature(value.forward if isinstance(value, nn.Module) else value)
    except (TypeError, ValueError):  # written in C
        return value
    try:
        signature.bind(*arguments)
    except TypeError:
        taken = ", ".join(signature.parameters)
        if isinstance(value, type):
            hint = f"pass lambda {wanted}: {value.__name__}({wanted}, ...)"
        raise ConfigError(f"{name} takes ({taken}), but it is called with ({wanted})", hint) from None
    return value


def checked_loss(loss_fn: Any, name: str = "loss_fn") -> Any:
    """Return the loss function; raise `ConfigError` for other objects, and for torch's losses, which take no model."""
    hint = "pass a function of (model, batch): lambda model, batch: F.cross_entropy(model(batch[0]), batch[1])"
    if loss_fn is None:
        raise ConfigError(f"the Trainer got no {name}", f"{hint}; or pass updates=[Update(...), ...]")
    if isinstance(loss_fn, Optimizer):
        raise ConfigError(
            f"{name} is {kind_of(loss_fn)}, not a function",
            "the order of the arguments is Trainer(model, optimizer, loss_fn, config)",
        )
    if isinstance(loss_fn, type) and issubclass(loss_fn, nn.Module):
        raise ConfigError(f"{name} is {kind_of(loss_fn)}, not a function", hint)
    kind = type(loss_fn) if isinstance(loss_fn, nn.Module) else loss_fn
    if getattr(kind, "__module__", None) in ("torch.nn.modules.loss", "torch.nn.functional"):
        raise ConfigError(
            f"{name} is torch's {kind.__name__}, which takes predictions and targets, not a model and a batch", hint
        )
    return checked_function(loss_fn, name, "model", "batch")


def checked_model(model: object) -> None:
    """Raise `ConfigError` if the model is not a Module, or has parameters or buffers without values."""
    if not isinstance(model, nn.Module):
        raise ConfigError(*_no_module(model))
    tensors = [*model.named_parameters(), *model.named_buffers()]
    lazy = [name for name, tensor in tensors if is_lazy(tensor)]
    if lazy:
        raise ConfigError(
            f"the model {type(model).__name__} has lazy modules that are not initialised: {some(lazy)}",
            "call the model once with a batch before creating the Trainer",
        )
    meta = [name for name, tensor in tensors if tensor.is_meta]
    if meta:
        raise ConfigError(
            f"the model {type(model).__name__} has tensors on the meta device, which have no values: {some(meta)}",
            "allocate it first with model.to_empty(device=...), then initialise or load its weights",
        )


def check_writable(model: nn.Module, world: World, config: CheckpointConfig) -> None:
    """Raise `ConfigError` for tensors of the model that an optimizer, other ranks or a checkpoint cannot write to."""
    kind = f"the model {type(model).__name__}"
    parameters = dict(model.named_parameters())
    trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    odd = [name for name, tensor in parameters.items() if tensor.layout != torch.strided or tensor.is_nested]
    if odd:
        raise ConfigError(f"{kind} has sparse or nested parameters: {some(odd)}", "use dense parameters: .to_dense()")
    repeated = [name for name, tensor in trained.items() if stored(tensor).shape != tensor.shape]
    if repeated:
        raise ConfigError(
            f"{kind} has parameters whose values share memory, as expand() makes them, so that no optimizer can update "
            f"them: {some(repeated)}",
            "make them from a copy: nn.Parameter(tensor.clone())",
        )
    state: dict[str, Any] = {}
    if config.dir is not None:
        state = model.state_dict()
    if config.trainable_only:
        state = {name: value for name, value in state.items() if name in trained or name not in parameters}
    # Ranks receive rank 0's values.
    buffers = dict(model.named_buffers())
    tensors = {**parameters, **buffers}
    written = {
        name: tensor for name, tensor in tensors.items() if world.world_size > 1 or name in trained or name in state
    }
    if world.device.type == "cpu" and (read_only := _in_read_only_memory(written)):
        raise ConfigError(
            f"{kind} has tensors in memory that is read-only, such as a file opened with "
            f'numpy.load(..., mmap_mode="r"): {some(read_only)}',
            'copy them: tensor.clone(); or open the file with mmap_mode="c", which copies what is written',
        )
    for name, value in state.items():
        if name in buffers and buffers[name].is_inference():
            found = "was made in torch.inference_mode()"
        elif unstorable := unstorable_values(value):
            found = f"is {_kind_and_layout(unstorable[0])}"
        else:
            continue
        raise ConfigError(
            f"{name} of {kind} {found}, which no checkpoint can restore",
            "register a plain dense tensor, such as the result of clone(), to_dense() or dequantize(); or leave it "
            "out of checkpoints with register_buffer(..., persistent=False); or set checkpoint.dir=None",
        )


def _kind_and_layout(value: Any) -> str:
    if not isinstance(value, torch.Tensor):
        return kind_of(value)
    layout = "quantized" if value.is_quantized else value.layout
    return f"{kind_of(value)} ({layout})"


def _in_read_only_memory(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    """The names of the tensors whose memory this process cannot write; empty if the system does not tell."""
    regions = []
    with suppress(OSError):
        for line in Path("/proc/self/maps").read_text().splitlines():
            addresses, permissions, *_ = line.split()
            if permissions[1] != "w":
                begin, end = addresses.split("-")
                regions.append((int(begin, 16), int(end, 16)))
    names = []
    for name, tensor in tensors.items():
        if tensor.is_cpu and tensor.layout == torch.strided:
            address = tensor.data_ptr()
            if any(begin <= address < end for begin, end in regions):
                names.append(name)
    return names


def _no_module(model: object) -> tuple[str, str]:
    """The message and the hint for a model that is not a Module."""
    name = kind_of(model)
    items: list[object] = []
    if isinstance(model, Mapping):
        items = [*model.values()]
        if items and all(isinstance(item, torch.Tensor) for item in items):
            return f"model is a state_dict ({name})", "create the model, and call model.load_state_dict(...) on it"
    elif isinstance(model, Iterable):
        items = [*model]
    if items and all(isinstance(item, nn.Module) for item in items):
        return (
            f"model is {name} of {len(items)} modules",
            'put them into one module: Trainer(nn.ModuleDict({"first": first, "second": second}), ...), and call '
            'model["first"](...) in loss_fn; for several optimizers, pass updates=[Update(...), ...]',
        )
    if callable(model) and not isinstance(model, type):
        return f"model is {name}", "call it and pass the torch.nn.Module that it returns: Trainer(make_model(), ...)"
    return f"model is {name}", "pass an instance of torch.nn.Module: Trainer(MyModel(), ...)"


def optimizer_for(
    model: nn.Module,
    optimizer: Optimizer | Callable[[Iterable[nn.Parameter]], Optimizer] | None,
    strategy: Strategy,
) -> Optimizer:
    """Return or create the optimizer. Raises `ConfigError` if its parameters are not the model's parameters."""
    if strategy.replaces_parameters and isinstance(optimizer, Optimizer):
        kind = type(optimizer).__name__
        name = strategy.config.strategy
        raise ConfigError(
            f"parallel={name!r} replaces the model's parameters with sharded ones, but the {kind} holds the old ones",
            f"pass a function that creates it: Trainer(model, lambda parameters: {kind}(parameters, lr=...), ...)",
        )
    made, source = _made(optimizer, Optimizer, "optimizer", "parameters", model.parameters())
    if not isinstance(made, Optimizer):
        hint = (
            "pass a torch Optimizer, such as torch.optim.AdamW(model.parameters(), lr=1e-3), or a function "
            "parameters -> Optimizer"
        )
        if isinstance(made, list | tuple | Mapping):
            hint = "for several optimizers, pass updates=[Update(name, loss_fn, optimizer), ...]"
        raise ConfigError(f"{source} {kind_of(made)}, not an Optimizer", hint)
    parameters = dict(model.named_parameters())
    optimized = {parameter for group in made.param_groups for parameter in group["params"]}
    if unknown := len(optimized - set(parameters.values())):
        raise ConfigError(
            f"the optimizer holds {unknown} parameters that the model does not have: their gradients would not be "
            "reduced over the ranks",
            "create the optimizer from model.parameters(); if the loss has parameters, make it a submodule of the "
            "model",
        )
    trained = {name: parameter for name, parameter in parameters.items() if parameter.requires_grad}
    if missing := [name for name, parameter in trained.items() if parameter not in optimized]:
        raise ConfigError(
            f"the optimizer does not hold {some(missing)}, which require grad: they would never be updated",
            "create the optimizer from model.parameters(); call requires_grad_(False) on parameters that must not be "
            "trained",
        )
    strategy.setup_optimizer(made)
    if made.state:
        made.load_state_dict(made.state_dict())  # moves the state to the parameters' current devices
    return made


def _made(given: object, kind: type, name: str, parameter: str, value: object) -> tuple[object, str]:
    """The argument `name`, or what it returns if it is a function of `parameter`; and which of the two it is, as text.

    `kind`: the class that the argument should have. `value`: what the function is called with.
    """
    if isinstance(given, kind) or not callable(given):
        return given, f"{name} is"
    return checked_function(given, name, parameter)(value), f"the function passed as {name} returned"


def scheduler_for(
    optimizer: Optimizer,
    scheduler: LRScheduler | Callable[[Optimizer], LRScheduler] | None,
    every: SchedulerInterval = "step",
) -> LRScheduler | None:
    """Return or create the scheduler. Raises `ConfigError` if it does not belong to this optimizer.

    `every`: "step" or "epoch". Raises `ConfigError` if the scheduler cannot be stepped at the end of each epoch.
    """
    if every not in get_args(SchedulerInterval):
        raise ConfigError(
            f"scheduler_every is {every!r}, not 'step' or 'epoch'",
            'set it to "epoch" to step the scheduler at the end of each epoch, or to "step", the default',
        )
    if scheduler is None:
        if every != "step":
            raise ConfigError(f"scheduler_every is {every!r}, but there is no scheduler", "pass scheduler=...")
        return None
    made, source = _made(scheduler, LRScheduler, "scheduler", "optimizer", optimizer)
    if not isinstance(made, LRScheduler):
        hint = "pass a scheduler of torch.optim.lr_scheduler, or a function optimizer -> LRScheduler"
        if hasattr(made, "step_update"):
            hint = (
                "step a scheduler of timm in a callback: scheduler.step_update(trainer.step) in on_fit_start and "
                "on_step"
            )
        raise ConfigError(f"{source} {kind_of(made)}, not an LRScheduler", hint)
    if made.optimizer is not optimizer:
        raise ConfigError(
            "the scheduler belongs to another optimizer",
            "create the scheduler with the optimizer that you pass to the Trainer, or pass a function "
            "optimizer -> LRScheduler",
        )
    if every != "step" and isinstance(made, ReduceLROnPlateau):
        raise ConfigError(
            f"scheduler_every is {every!r}, but a ReduceLROnPlateau is stepped at each evaluation",
            "leave out scheduler_every; the scheduler is then stepped at each evaluation, by default after each epoch",
        )
    return made


def checked_metrics(metrics: object) -> dict[str, MetricFunction | MetricObject]:
    """Return the metrics by name. Raises `ConfigError` for metrics that cannot be called, and for the name "loss"."""
    if not isinstance(metrics, Mapping):
        raise ConfigError(f"metrics is {kind_of(metrics)}, not a dict", 'pass metrics={"accuracy": accuracy}')
    if "loss" in metrics:
        raise ConfigError("a metric is called 'loss', which is the name of the loss itself", "rename the metric")
    checked: dict[str, MetricFunction | MetricObject] = {}
    for name, metric in metrics.items():
        first = metric[0] if isinstance(metric, tuple) and len(metric) == 2 else metric
        if isinstance(first, type) and is_metric_object(first):
            raise ConfigError(f"metric {name!r} is {kind_of(first)}", f"pass an instance: {first.__name__}(...)")
        if is_metric_object(first):
            select = None
            if first is not metric:
                select = checked_function(metric[1], f"the second item of metric {name!r}", "output", "batch")
            checked[name] = MetricObject(name, first, select)
        else:
            checked[name] = checked_function(metric, f"metric {name!r}", "output", "batch")
    return checked


def checked_callbacks(callbacks: object) -> tuple[Callback, ...]:
    """Return the callbacks as a tuple. Raises `ConfigError` if one is not a `Callback`."""
    if callbacks is None:
        raise ConfigError("callbacks is None", "leave it out, or pass a list: callbacks=[]")
    events = [name for name in vars(Callback) if name.startswith("on_")]
    several = callbacks if isinstance(callbacks, list | tuple) else [callbacks]
    for callback in several:
        if isinstance(callback, type) and issubclass(callback, Callback):
            raise ConfigError(
                f"callbacks contains the class {callback.__name__}", f"pass an instance: {callback.__name__}(...)"
            )
        if not isinstance(callback, Callback):
            raise ConfigError(
                f"callbacks contains {kind_of(callback)}, which is not a Callback",
                "write a subclass of ddp_kit.Callback with methods such as on_step(self, trainer); pass an instance",
            )
        # A method named almost like an event, or like an event of another framework, would never be called.
        for name in sorted({name for name in dir(type(callback)) if name.startswith("on_")} - set(events)):
            from ddp_kit.config.other_frameworks import equivalent  # imported only if a name is unknown

            message = f"{type(callback).__name__} has a method {name}, but there is no such event"
            if (answer := equivalent(name)) is not None:
                raise ConfigError(message, answer)
            if (likely := nearest(name, events)) is not None:
                raise ConfigError(message, f"did you mean {likely}? The events are {', '.join(events)}")
    return tuple(several)
