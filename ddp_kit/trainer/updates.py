"""Several updates per step, each with its own loss function, optimizer and scheduler, as for a GAN."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ddp_kit.checkpoint.model_state import by_parameter_and_shared, state_of
from ddp_kit.config import combinations
from ddp_kit.config.settings import TrainerConfig
from ddp_kit.errors import ConfigError
from ddp_kit.metrics import Loss
from ddp_kit.structures import with_copied_containers
from ddp_kit.texts import kind_of
from ddp_kit.trainer.context import LoggedValues, LossFunction, SchedulerInterval, TrainerContext
from ddp_kit.trainer.out_of_memory import RecoverableStep
from ddp_kit.trainer.run_parameters import RunParameters, check_step_hooks
from ddp_kit.trainer.setup import checked_loss
from ddp_kit.trainer.step import ClosureStep, OptimizerStep, StepBatches, StepResult, StepRunner, StepTask
from ddp_kit.trainer.timing import StepClock

# --- Joint optimizer and scheduler ------------------------------------------------------------------------------------
# Adapters to save, load and compare the state of several updates.


class JointOptimizer(Optimizer):
    """Presents the optimizers of several updates as one optimizer, with the groups and state of all of them.

    `optimizers`: the optimizers by update name. The JointOptimizer is never stepped: each update steps its own
    optimizer.
    """

    def __init__(self, optimizers: Mapping[str, Optimizer]) -> None:
        self.optimizers = dict(optimizers)
        self.defaults = {}

    @property
    def kind(self) -> str:
        """The name of each update and the class of its optimizer, as text."""
        return ", ".join(f"{name}: {type(optimizer).__name__}" for name, optimizer in self.optimizers.items())

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [group for optimizer in self.optimizers.values() for group in optimizer.param_groups]

    @property
    def state(self) -> dict[Tensor, Any]:  # type: ignore[override]
        return {key: value for optimizer in self.optimizers.values() for key, value in optimizer.state.items()}

    def state_dict(self) -> dict[str, Any]:
        """The state in the format of a single optimizer that has all groups, with consecutively numbered parameters.

        What a subclass adds to its state is under "updates", by update name.
        """
        state: dict[int, Any] = {}
        groups: list[dict[str, Any]] = []
        own: dict[str, Any] = {}
        for name, optimizer in self.optimizers.items():
            saved = state_of(optimizer)
            first = sum(len(group["params"]) for group in groups)
            by_parameter, shared = by_parameter_and_shared(saved["state"])
            state |= {first + number: value for number, value in by_parameter.items()}
            groups += [
                group | {"params": [first + number for number in group["params"]]} for group in saved["param_groups"]
            ]
            if shared or saved.keys() > {"state", "param_groups"}:
                own[name] = {**saved, "state": shared}
                del own[name]["param_groups"]
        joint = {"state": state, "param_groups": groups}
        if own:
            joint["updates"] = own
        return joint

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that `state_dict()` returned."""
        groups = list(state_dict["param_groups"])
        first = 0
        own = state_dict.get("updates", {})
        for name, optimizer in self.optimizers.items():
            of_optimizer = [groups.pop(0) for _ in optimizer.param_groups]
            size = sum(len(group["params"]) for group in of_optimizer)
            by_parameter = {
                number - first: value for number, value in state_dict["state"].items() if first <= number < first + size
            }
            own_entries = own.get(name, {})
            optimizer.load_state_dict(
                {
                    **own_entries,
                    "state": {**by_parameter, **own_entries.get("state", {})},
                    "param_groups": [
                        group | {"params": [number - first for number in group["params"]]} for group in of_optimizer
                    ],
                }
            )
            first += size

    def register_step_pre_hook(self, hook: Any) -> Any:
        """Register the hook with each optimizer."""
        return [optimizer.register_step_pre_hook(hook) for optimizer in self.optimizers.values()]

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all optimizers."""
        for optimizer in self.optimizers.values():
            optimizer.zero_grad(set_to_none)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.kind})"


def optimizer_kind(optimizer: Optimizer) -> str:
    """The class name of an optimizer; for a `JointOptimizer`, the class names of all its optimizers."""
    if isinstance(optimizer, JointOptimizer):
        return optimizer.kind
    return type(optimizer).__name__


class JointScheduler(LRScheduler):
    """Presents the schedulers of several updates as one, to save and compare them together.

    Each update steps its own scheduler.
    """

    def __init__(self, schedulers: Mapping[str, LRScheduler]) -> None:
        self.schedulers = list(schedulers.values())
        self._names = list(schedulers)

    @property
    def by_update(self) -> dict[str, LRScheduler]:
        """Schedulers by update name."""
        return dict(zip(self._names, self.schedulers, strict=True))

    def state_dict(self) -> dict[str, Any]:
        """State of each scheduler, by update name."""
        return {name: scheduler.state_dict() for name, scheduler in self.by_update.items()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state that `state_dict()` returned."""
        for name, scheduler in self.by_update.items():
            scheduler.load_state_dict(state_dict[name])


# --- Updates ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Update:
    """One of several updates in a step: a loss function, and an optimizer for the parameters that it trains.

        Trainer(
            nn.ModuleDict({"generator": generator, "discriminator": discriminator}),
            updates=[
                Update("discriminator", discriminator_loss, torch.optim.Adam(discriminator.parameters(), lr=2e-4)),
                Update("generator", generator_loss, torch.optim.Adam(generator.parameters(), lr=2e-4), every=2),
            ],
            config=TrainerConfig(...),
        )

    A step runs its updates in order, on the same batch. Each update sees the weights as the previous update
    left them. An update computes gradients only for the parameters of its own optimizer.
    """

    name: str
    """A unique name. The loss of an update named "generator" is logged as "loss/generator"."""
    loss_fn: LossFunction
    """A function `loss_fn(model, batch)`, as for the Trainer. It gets the Trainer's whole model."""
    optimizer: Optimizer
    """An optimizer for a part of the model's parameters; updates must not share parameters."""
    scheduler: LRScheduler | Callable[[Optimizer], LRScheduler] | None = None
    """A scheduler, or a function that creates one; stepped each time this update runs and is not skipped."""
    scheduler_every: SchedulerInterval = "step"
    """When the scheduler is stepped: "step", each time this update runs, or "epoch", at the end of each epoch."""
    every: int = 1
    """Run this update only in steps whose number is a multiple of this value."""
    max_grad_norm: float | None = None
    """Clip this update's gradients to this norm; None: use the configuration's `max_grad_norm`."""
    closure: bool = False
    """Whether the optimizer's `step` takes a closure that evaluates the loss, possibly several times, as LBFGS does."""


def checked_updates(
    model: nn.Module, updates: Sequence[Update], others: Sequence[object], config: TrainerConfig
) -> tuple[Update, ...]:
    """Check the updates and return them as a tuple. Raises `ConfigError` for invalid updates or shared parameters.

    `others`: the Trainer's optimizer, loss function, scheduler and scheduler interval, which are only allowed if there
    are no updates.
    """
    if not updates:
        checked_loss(others[1])
        return ()
    if any(argument is not None for argument in others):
        raise ConfigError(
            "the Trainer got updates and also an optimizer, loss function or scheduler",
            "pass the optimizer, loss function and scheduler of each update in Update(name, loss_fn, optimizer, "
            "scheduler=...)",
        )
    combinations.check_with(config, combinations.UPDATES, combinations.UPDATES)
    if not isinstance(updates, Sequence) or not all(isinstance(update, Update) for update in updates):
        raise ConfigError(
            "updates is not a list of Update(...)", "pass updates=[Update(name, loss_fn, optimizer), ...]"
        )
    names = [update.name for update in updates]
    if len(set(names)) < len(names):
        raise ConfigError(f"update names are not unique: {', '.join(names)}", "give each update a unique name")
    name_of = {id(parameter): name for name, parameter in model.named_parameters()}
    holder: dict[int, str] = {}
    for update in updates:
        if not isinstance(update.optimizer, Optimizer):
            raise ConfigError(
                f"update {update.name!r} has {kind_of(update.optimizer)} as its optimizer, not an Optimizer",
                "pass a torch Optimizer with the parameters that this update trains",
            )
        checked_loss(update.loss_fn, f"loss_fn of update {update.name!r}")
        if update.every < 1:
            raise ConfigError(f"update {update.name!r} has every={update.every}", "use every=1 or more steps")
        for group in update.optimizer.param_groups:
            for parameter in group["params"]:
                first = holder.setdefault(id(parameter), update.name)
                if first != update.name:
                    raise ConfigError(
                        f"{name_of.get(id(parameter), 'a parameter')} is in the optimizers of both {first!r} and "
                        f"{update.name!r}",
                        "give it to only one optimizer; to train it on both losses, add the losses up in one update",
                    )
    if all(update.every > 1 for update in updates):
        raise ConfigError(
            "all updates set `every`, but at least one must run in every step", "leave out `every` for one of them"
        )
    return tuple(updates)


def loss_to_evaluate(updates: Sequence[Update], logged: LoggedValues) -> LossFunction:
    """Create the loss function for evaluation. It returns the loss of the first update, and logs all losses."""

    def loss_fn(model: nn.Module, batch: Any) -> Tensor | Loss:
        values = [update.loss_fn(model, with_copied_containers(batch)) for update in updates]
        logged.add({f"loss/{update.name}": value for update, value in zip(updates, values, strict=True)})
        return values[0]

    return loss_fn


class JointStep:
    """Runs optimizer steps that consist of several updates.

    for each update that is due, in order:
        run its own step, with its loss function and optimizer, on the step's batches
    """

    evaluates_once = False

    def __init__(self, context: TrainerContext, steps: Mapping[str, tuple[int, StepRunner]]) -> None:
        """`steps`: for each update, by name, the number of steps after which it runs, and what runs it."""
        self._logged = context.logged
        self._context = context
        self._parameters = RunParameters(context.model, context.optimizer, context.stepped_optimizer)
        self._steps = dict(steps)
        self.clear = self._parameters.clear_gradients

    def run(self, task: StepTask) -> StepResult:
        """Run one step. The losses of the result are those of the first update."""
        batches = StepBatches(task.batch)
        losses: Sequence[tuple[Tensor | Loss, int]] = ()
        norms = []
        cause = ""
        for name, (every, step) in self._steps.items():
            if task.number % every:
                continue
            finds_cause = task.find_cause and not cause
            result = step.run(task._replace(batch=batches.again(), find_cause=finds_cause))
            if name == next(iter(self._steps)):
                losses = result.losses
            for value, samples in result.losses:
                self._logged.note(f"loss/{name}", value, samples)
            if result.norm is not None:
                norms.append(result.norm)
            if result.cause:
                cause = f"update {name!r} at step {task.number}: {result.cause}"
        norm = torch.linalg.vector_norm(torch.stack(norms)) if norms else None
        return StepResult(losses, norm, cause=cause)

    def end_epoch(self, step: int) -> None:
        """Step the schedulers that are stepped once per epoch."""
        for _, update_step in self._steps.values():
            update_step.end_epoch(step)

    def check_parameters(self) -> None:
        """Raise `ConfigError` for parameters that changed since the Trainer was created, and for unsupported hooks."""
        self._parameters.check()
        check_step_hooks(self._context)

    @property
    def skipped_steps(self) -> int:
        """The number of updates skipped because of a non-finite gradient."""
        return sum(step.skipped_steps for _, step in self._steps.values())

    @skipped_steps.setter
    def skipped_steps(self, steps: int) -> None:
        first, *others = (step for _, step in self._steps.values())
        first.skipped_steps = steps
        for step in others:
            step.skipped_steps = 0


def optimizer_step_for(context: TrainerContext, clock: StepClock, *, closure: bool = False) -> StepRunner:
    """Create the object that runs the steps of one optimizer. `closure`: whether its `step` takes a closure.

    Raises `ConfigError` for settings that are not supported with a closure.
    """
    if closure or isinstance(context.optimizer, torch.optim.LBFGS):
        combinations.check_with(context.config, combinations.CLOSURE, type(context.optimizer).__name__)
        return ClosureStep(context, clock)
    if context.strategy.options.recoverable:
        return RecoverableStep(context, clock)
    return OptimizerStep(context, clock)


def joint_step(
    context: TrainerContext, clock: StepClock, updates: Sequence[Update], schedulers: Mapping[str, LRScheduler]
) -> JointStep:
    """Create the object that runs steps of several updates each. A collective: DDP wraps the model for each update."""
    parameters = [[p for group in update.optimizer.param_groups for p in group["params"]] for update in updates]
    steps = {}
    for update, strategy in zip(updates, context.strategy.divided(parameters), strict=True):
        config = context.config
        if update.max_grad_norm is not None:
            config = config.model_copy(update={"max_grad_norm": update.max_grad_norm})
        of_update = replace(
            context,
            strategy=strategy,
            optimizer=update.optimizer,
            stepped_optimizer=update.optimizer,
            scheduler=schedulers.get(update.name),
            loss_fn=update.loss_fn,
            config=config,
        )
        steps[update.name] = update.every, optimizer_step_for(of_update, clock, closure=update.closure)
    return JointStep(context, steps)
