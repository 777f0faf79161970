"""An optimizer step: calls of the loss function, the exact gradient of the global batch, and the update."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import count
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_kit.callbacks.callback import Gradients
from ddp_kit.data.feed import Share
from ddp_kit.errors import ConfigError
from ddp_kit.heartbeat import Phase
from ddp_kit.metrics import Loss, Mean, bad_weight, reduced
from ddp_kit.parallel.strategy import clip_gradient_values, scale_gradients
from ddp_kit.structures import with_copied_containers
from ddp_kit.trainer.context import TrainerContext
from ddp_kit.trainer.learning_rates import EveryEpoch, explained_ticks
from ddp_kit.trainer.replay import Replay
from ddp_kit.trainer.run_parameters import RunParameters, check_step_hooks
from ddp_kit.trainer.snapshots import BufferCopies, all_modules
from ddp_kit.trainer.step_loss import StepLoss
from ddp_kit.trainer.timing import BACKWARD, COMMUNICATION, OPTIMIZER, StepClock

# --- What a step is given, and what it returns ------------------------------------------------------------------------


class StepTask(NamedTuple):
    """What one optimizer step has to do."""

    number: int
    """The number of the step in the run."""
    share: Share
    """This rank's share of the global batch: the number of samples in each pass."""
    batch: Callable[[], Any]
    """Returns the batch of the next pass."""
    measure_norm: bool = False
    """Whether to measure the gradient norm and to check the parameters, as at log points."""
    find_cause: bool = False
    """Whether to find the cause of a loss that is not finite."""
    is_trial: bool = False
    """Whether the scheduler is not stepped, so that trial steps do not use up its total_steps."""


class StepResult(NamedTuple):
    """What one optimizer step has done on this rank."""

    losses: Sequence[tuple[Tensor | Loss, int]] = ()
    """The detached loss of each pass, and its number of samples. Empty if the losses of a skipped step do not count."""
    norm: Tensor | None = None
    """The norm of the gradient before clipping, if it was asked for."""
    skipped: bool = False
    """Whether the gradient was not finite, so the weights are unchanged. With fp16, the host may not know it yet."""
    cause: str = ""
    """The cause of a loss that is not finite, as text; empty if there is none, or if it was not asked for."""


class StepRunner(Protocol):
    """Protocol of an object that runs optimizer steps."""

    evaluates_once: bool
    """Whether a step evaluates one loss, once per batch."""
    skipped_steps: int
    """The number of steps skipped because of a non-finite gradient. With fp16, reading it waits for the device."""

    def run(self, task: StepTask) -> StepResult:
        """Run one step."""

    def end_epoch(self, step: int) -> None:
        """Step the schedulers that are stepped once per epoch. `step`: the number of optimizer steps done."""

    def clear(self) -> None:
        """Set all gradients to None."""

    def check_parameters(self) -> None:
        """Raise `ConfigError` for parameters that changed since the Trainer was created, and for unsupported hooks."""


# --- The gradient -----------------------------------------------------------------------------------------------------


class GlobalGradient:
    """Leaves the gradient of the global batch in the parameters' `grad`, clipped.

    `compute` and the methods after it, from top to bottom, are in the order of events.
    """

    def __init__(self, context: TrainerContext, clock: StepClock, confirm: Callable[[], None] = lambda: None) -> None:
        """A collective with `verify_ranks="replay"`.

        `confirm`: called when this rank's passes and reductions are complete; all ranks may still have to confirm them.
        """
        self._context = context
        self._strategy = context.strategy
        self._clock = clock
        self._confirm = confirm
        self._parameters = RunParameters(context.model, context.optimizer, context.stepped_optimizer)
        self._loss = StepLoss(context, clock, self._parameters)
        self._run_passes: Callable[[Sequence[int], Callable[[], Any]], None] | None = None  # None: in order
        if context.config.parallel.pipeline > 1:
            from ddp_kit.trainer.pipeline_step import PipelinePasses  # slow to import

            strategy: Any = context.strategy
            self._run_passes = PipelinePasses(strategy, self._loss, clock, context.heartbeat).run
        replays = context.config.verify_ranks == "replay" and context.world.world_size > 1
        self._replay = Replay(context, self._loss.backpropagated) if replays else None
        # Whether the user's optimizer overrides `zero_grad`, which a loop by hand calls in each step.
        self._zeroes_itself = getattr(context.optimizer.zero_grad, "__func__", None) is not Optimizer.zero_grad
        self._gradients: Gradients | None = None  # for callbacks, once a step has run
        # With fp16, the gradient scaler skips steps itself.
        self.skips_non_finite = context.config.non_finite_gradients == "skip" and not context.precision.scales
        """Whether a step with a gradient that is not finite is skipped, which the host then waits to know."""

    def compute(self, task: StepTask) -> StepResult:
        """Compute the gradient. The result is `skipped` if the gradient is not finite and the step must be skipped."""
        context = self._context
        strategy = self._strategy
        config = context.config
        loss = self._loss
        self.clear()  # gradients from another Trainer, or from user code
        if self._zeroes_itself:
            context.optimizer.zero_grad()
        strategy.begin_step()
        replay = None
        if task.measure_norm and self._replay is not None and self._replay.is_due(task.number):
            replay = self._replay
        loss.begin(task.number, task.share, find_cause=task.find_cause)
        with nullcontext(task.batch) if replay is None else replay.watching(task.share, task.batch) as batch:
            if self._run_passes is None:
                self._run_in_order(task.share.passes, batch)
            else:
                self._run_passes(task.share.passes, batch)
        loss.find_cause()
        loss.reduce_weights()  # on ranks without passes
        if task.measure_norm:  # only at log points, because it walks over all modules
            self.check_parameters()
        else:
            self._parameters.check_frozen()
        strategy.finish_reduction()  # a rank without passes contributes zeros
        if context.world.world_size > 1:
            self._clock.end(COMMUNICATION)
        self._confirm()
        if replay is not None:
            replay.compare(task.number)
        context.heartbeat.enter(Phase.OPTIMIZER)
        if (correction := loss.correction()) is not None:  # before unscale(), which finds a correction that is NaN
            scale_gradients(strategy.updated_parameters, correction)
        context.precision.unscale(context.stepped_optimizer)
        if context.on_gradients is not None:
            self._call_on_gradients(context.on_gradients)
        norm = None
        if config.max_grad_norm is not None or task.measure_norm or self.skips_non_finite:
            norm = strategy.grad_norm()
            # Equal on all ranks. Waits for the device in each step.
            if self.skips_non_finite and not bool(torch.isfinite(norm)):
                return self._result(task, norm, skipped=True)
            if loss.is_repeated_by_all_ranks and not bool(torch.isfinite(norm)):
                loss.find_cause_with_all_ranks()
            if config.max_grad_norm is not None:
                nn.utils.clip_grads_with_norm_(strategy.updated_parameters, config.max_grad_norm, norm)
        if config.max_grad_value is not None:
            clip_gradient_values(strategy.updated_parameters, config.max_grad_value)
        return self._result(task, norm)

    def _run_in_order(self, passes: Sequence[int], batch: Callable[[], Any]) -> None:
        """Run this rank's passes, and add up their gradients. The last backward pass also reduces them over the ranks.

        `passes`: the number of samples in each pass. `batch`: a function that returns the batch of the next pass.
        """
        strategy = self._strategy
        several_ranks = self._context.world.world_size > 1
        for number, samples in enumerate(passes):
            last = number == len(passes) - 1
            self._context.heartbeat.enter(Phase.DATA)
            with strategy.accumulating(last=last):
                loss = self._loss.of_pass(batch(), samples)
                phase = BACKWARD
                if last:
                    self._loss.reduce_weights()  # overlapped with the backward pass
                    if several_ranks:
                        phase = self._clock.watch(loss)
                strategy.backward(loss)
            self._clock.end(phase)

    def _result(self, task: StepTask, norm: Tensor | None, *, skipped: bool = False) -> StepResult:
        return StepResult(self._loss.losses, norm if task.measure_norm else None, skipped, self._loss.cause)

    def _call_on_gradients(self, call: Callable[[Gradients], None]) -> None:
        """Let callbacks change the gradients. Raises `ConfigError` if they replaced gradients that are not used."""
        strategy = self._strategy
        if self._gradients is None:
            names = strategy.parameter_names()
            updated = {names[id(parameter)]: parameter for parameter in strategy.updated_parameters}
            self._gradients = Gradients(updated, lambda: dict(zip(updated, strategy.grad_norms(), strict=True)))
        if not strategy.shards:
            call(self._gradients)
            return
        before = [parameter.grad for parameter in strategy.parameters]
        call(self._gradients)
        used = set(map(id, strategy.updated_parameters))
        for parameter, gradient in zip(strategy.parameters, before, strict=True):
            if parameter.grad is not gradient and id(parameter) not in used:
                name = strategy.parameter_names()[id(parameter)]
                raise ConfigError(
                    f"on_gradients replaced `grad` of {name}, but with "
                    f"parallel.strategy={strategy.config.strategy!r} the optimizer uses a part of each gradient, so "
                    "this has no effect",
                    "change the argument of on_gradients instead: gradients[name] = other, or None to skip a parameter",
                )

    def check_weight(self, step: int) -> None:
        """Raise `LossError` if the gradient of a step is not finite because of an invalid weight of a `Loss`."""
        if self._loss.weighted and not bool(torch.isfinite(self._loss.weight())):
            raise bad_weight(step)

    def abandon(self) -> None:
        """Take part, with zeros, in the collectives that the other ranks still run in this step."""
        if not self._loss.agreed:
            self._loss.agree()
        self._loss.reduce_weights()
        self._strategy.abandon_step()

    def clear(self) -> None:
        """Set all gradients to None."""
        self._parameters.clear_gradients()

    def check_parameters(self) -> None:
        """Raise `ConfigError` for parameters that changed since the Trainer was created, and for unsupported hooks."""
        self._parameters.check()
        check_step_hooks(self._context)


# --- The update -------------------------------------------------------------------------------------------------------


class Ticks:
    """Steps a scheduler, if there is one."""

    def __init__(self, context: TrainerContext) -> None:
        self._scheduler = context.scheduler

    def step(self, task: StepTask) -> None:
        """Step the scheduler after an optimizer step that is not a trial."""
        if self._scheduler is not None and not task.is_trial:
            with explained_ticks(self._scheduler, task.number):
                self._scheduler.step()

    def end_epoch(self, number: int) -> None:
        """Step the scheduler if `scheduler_every="epoch"`. `number`: the number of optimizer steps done."""
        if isinstance(self._scheduler, EveryEpoch):
            with explained_ticks(self._scheduler, number):
                self._scheduler.end_epoch()


class OptimizerStep:
    """Runs steps of one optimizer.

    compute the gradient of the global batch, clipped          # GlobalGradient
    step the optimizer, unless the gradient is not finite      # restores the buffers that skipped passes have changed
    step the scheduler
    """

    evaluates_once = True

    def __init__(self, context: TrainerContext, clock: StepClock, confirm: Callable[[], None] = lambda: None) -> None:
        """`confirm`: see `GlobalGradient`."""
        self._context = context
        self._clock = clock
        self._gradient = GlobalGradient(context, clock, confirm)
        self._ticks = Ticks(context)
        self.end_epoch = self._ticks.end_epoch
        self.clear = self._gradient.clear
        self.check_parameters = self._gradient.check_parameters
        may_skip = self._gradient.skips_non_finite or context.precision.scales
        self._keeps_buffers = may_skip and any(True for _ in all_modules(context).buffers())
        # The host waits to know whether a step was skipped, but only if something on the host depends on it.
        scheduler = context.scheduler
        without_ticks = isinstance(scheduler, EveryEpoch) and scheduler.steps == 0
        ticks = scheduler is not None and not without_ticks
        self._waits_for_outcome = ticks or context.config.non_finite_gradients == "skip"
        self._skipped_steps = 0

    def run(self, task: StepTask) -> StepResult:
        """Run one step."""
        context = self._context
        logged_before = context.logged.of_step
        buffers = BufferCopies(all_modules(context)) if self._keeps_buffers else None
        result = self._gradient.compute(task)
        skipped = result.skipped or not context.precision.step_optimizer(
            context.stepped_optimizer, wait=self._waits_for_outcome
        )
        if not skipped:
            if buffers is not None and context.precision.overflowed is not None:
                buffers.restore_where(context.precision.overflowed)
            self._ticks.step(task)
        else:
            result = result._replace(skipped=True)
            self._skipped_steps += 1
            if context.config.non_finite_gradients == "skip":
                self._gradient.check_weight(task.number)
                result = result._replace(losses=())
                context.logged.drop_step(keep=logged_before)
            if buffers is not None:
                buffers.restore()
        self.clear()
        context.strategy.end_step()
        self._clock.end(OPTIMIZER)
        return result

    @property
    def skipped_steps(self) -> int:
        """The number of steps skipped because of a non-finite gradient. With fp16, reading it waits for the device."""
        self._skipped_steps += self._context.precision.take_skipped_steps()
        return self._skipped_steps

    @skipped_steps.setter
    def skipped_steps(self, steps: int) -> None:
        self._context.precision.take_skipped_steps()
        self._skipped_steps = steps


# --- Reused batches ---------------------------------------------------------------------------------------------------


class StepBatches:
    """The batches of a step, fetched once and used by each update or closure call."""

    def __init__(self, fetch: Callable[[], Any]) -> None:
        self._fetch = fetch
        self._batches: list[Any] = []

    def again(self) -> Callable[[], Any]:
        """Return a function that returns the next batch of the step at each call, starting with the first batch."""
        numbers = count()

        def batch() -> Any:
            number = next(numbers)
            if number == len(self._batches):
                self._batches.append(self._fetch())
            return with_copied_containers(self._batches[number])

        return batch


# --- Closure steps ----------------------------------------------------------------------------------------------------
# For optimizers that evaluate the loss several times per step, such as LBFGS or sharpness-aware minimisation (SAM).


class ClosureStep:
    """Runs steps of an optimizer whose `step` takes a closure.

    def closure():
        compute the gradient of the global batch, clipped                      # GlobalGradient
        return the mean loss of the global batch                               # equal on all ranks; the host waits
    optimizer.step(closure)
    scheduler.step()

    Each call of the closure uses the same batches. The result is that of the first call.
    """

    evaluates_once = False
    skipped_steps = 0  # settings that skip steps are refused with a closure

    def __init__(self, context: TrainerContext, clock: StepClock) -> None:
        self._context = context
        self._clock = clock
        self._gradient = GlobalGradient(context, clock)
        self._ticks = Ticks(context)
        self.end_epoch = self._ticks.end_epoch
        self.clear = self._gradient.clear
        self.check_parameters = self._gradient.check_parameters

    def run(self, task: StepTask) -> StepResult:
        """Run one step."""
        context = self._context
        batches = StepBatches(task.batch)
        first: StepResult | None = None

        def closure() -> Tensor:
            nonlocal first
            again = first is not None
            if again:
                self.clear()
                context.strategy.end_step()
            with torch.enable_grad(), context.logged.set_aside() if again else nullcontext():
                result = self._gradient.compute(
                    task._replace(batch=batches.again(), find_cause=task.find_cause and not again)
                )
            if not again:
                first = result
            mean = Mean(context.world.device)
            for value, samples in result.losses:
                mean.add(value, samples)
            return torch.tensor(reduced([mean])[0], dtype=torch.float64)  # on the host: optimizers read it

        context.optimizer.step(closure)  # type: ignore[arg-type] # torch calls float() on the result
        self._ticks.step(task)
        self.clear()
        context.strategy.end_step()
        self._clock.end(OPTIMIZER)
        return first or StepResult()
