"""Recovery of a step that ran out of memory, and the search for the largest micro-batch that fits."""

import gc
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddp_kit.data.sampler import BatchPlan
from ddp_kit.distributed.world import gathered, host_group
from ddp_kit.errors import LossError
from ddp_kit.log import logger
from ddp_kit.memory.choose import out_of_memory_hint
from ddp_kit.metrics import checked, total_of
from ddp_kit.model.modes import in_mode
from ddp_kit.trainer.context import TrainerContext
from ddp_kit.trainer.profile import save_memory_snapshot
from ddp_kit.trainer.snapshots import RunSnapshot, StepSnapshot
from ddp_kit.trainer.step import OptimizerStep, StepResult, StepTask
from ddp_kit.trainer.timing import StepClock

# --- Out-of-memory errors ---------------------------------------------------------------------------------------------


_OUT_OF_MEMORY_MESSAGES = (
    "can't allocate memory",  # torch's CPU allocator
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_NOT_SUPPORTED",  # cuDNN's error if a convolution's workspace does not fit
    "out of memory",
)
_BACKWARD_TWICE_HINT = (
    "the Trainer calls backward() on the loss, so the loss function must not call it; and call .detach() on tensors "
    "that are kept from one step to the next, such as the state of an RNN"
)
_FITS, _TOO_SMALL, _TOO_LARGE = range(3)  # in order of severity


class OutOfMemory(Exception):  # noqa: N818  # never shown: the loop catches it
    """Raised on all ranks after a step ran out of memory on one of them and was rolled back."""

    def __init__(self, error: BaseException | None) -> None:
        super().__init__(error)
        self.error = error
        """This rank's error; None if another rank ran out of memory."""

    def error_to_raise(self, context: TrainerContext) -> BaseException:
        """Return the error to raise if not even one sample fits. On ranks that had enough memory, it is not printed."""
        if self.error is not None:
            return with_hint(self.error, context)
        silent = LossError("another rank ran out of memory with a micro-batch of 1", "see that rank's error")
        silent.reported_elsewhere = True
        return silent


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory was exhausted, so that a smaller micro-batch may help."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _OUT_OF_MEMORY_MESSAGES)


def with_hint(error: BaseException, context: TrainerContext) -> BaseException:
    """Return the error, with a hint if a remedy is known; out-of-memory errors also name a memory snapshot, if any."""
    if "backward through the graph a second time" in str(error):
        error.add_note(f"hint: {_BACKWARD_TWICE_HINT}")
    if not is_out_of_memory(error):
        return error
    path = save_memory_snapshot(context.config.profile.dir, context.world.rank)
    hint = out_of_memory_hint(context.model, context.optimizer, context.config, context.world)
    error.add_note(f"hint: {hint}")
    if path:
        error.add_note(f"memory snapshot: {path} (open it at pytorch.org/memory_viz)")
    return error


# --- Micro-batch search -----------------------------------------------------------------------------------------------


def largest_micro_batch(context: TrainerContext, batches_of: Callable[[int], list[Any]], plan: BatchPlan) -> int:
    """Find the largest micro-batch for which a step fits in memory on every rank. A collective.

    Tries 1, 2, 4, ... samples up to a rank's whole share of the global batch. A trial runs two passes with an optimizer
    step between them, which allocates the optimizer state; then the state of the run is restored.
    `batches_of`: a function that takes a number of samples, and returns batches of that size on the device: one to run,
    and as many more as training prefetches.
    Raises the out-of-memory error if even one sample does not fit. `config/combinations.py` lists the settings that
    cannot be combined with this search.
    """
    share = -(-plan.global_batch // plan.data_ranks)
    before = RunSnapshot(context)
    found = 0
    failed = None
    for size in [*(2**power for power in range(share.bit_length()) if 2**power < share), share]:
        outcome, error = _tried(context, batches_of, size, last=size == share)
        release_cached_memory()
        before.restore()
        worst = max(outcome for (outcome,) in gathered(context.world, [outcome]))
        if worst == _TOO_LARGE:
            failed = OutOfMemory(error)
            break
        if worst == _FITS:
            found = size
    if not found and failed is not None:
        raise failed.error_to_raise(context) from None
    found = found or share  # if BatchNorm needs more samples than the largest size, training raises the error
    logger.info("micro_batch_size='auto' chose {} samples (a rank has at most {} per step)", found, share)
    return found


def _tried(
    context: TrainerContext, batches_of: Callable[[int], list[Any]], size: int, *, last: bool
) -> tuple[int, BaseException | None]:
    """Try a micro-batch of `size` samples. Returns the outcome, and the out-of-memory error, if any.

    `last`: whether the micro-batch is the rank's whole share; training then does not accumulate gradients.
    """
    outcome = _FITS
    kept = None
    try:
        with in_mode(context.model, training=True):
            batch, *_ahead = batches_of(size)
            _pass(context, batch)
            for parameter in context.strategy.parameters:
                if parameter.grad is not None:
                    parameter.grad.zero_()  # the step should only allocate state, without non-finite values
            context.stepped_optimizer.step()
            if last:
                _clear_gradients(context.model)
            _pass(context, batch)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        outcome = _TOO_LARGE
        kept = error.with_traceback(None)  # traceback frames keep tensors alive
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        outcome = _TOO_SMALL  # for BatchNorm
    _clear_gradients(context.model)
    return outcome, kept


def _pass(context: TrainerContext, batch: Any) -> None:
    with context.precision.forward(), context.activations.forward_context(), context.logged.batch(0):
        value = checked(context.loss_fn(context.model, batch), "the loss function")
    total = total_of(value)
    if total.requires_grad and not total.is_complex():  # otherwise the first step of training raises the error
        total.sum().backward()  # type: ignore[no-untyped-call]


def _clear_gradients(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def release_cached_memory() -> None:
    """Give the memory of tensors that are no longer in use back to the device."""
    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


# --- Recovery during training -----------------------------------------------------------------------------------------


class RecoverableStep(OptimizerStep):
    """An optimizer step that is abandoned on all ranks if one of them runs out of memory.

    run the passes
    if out of memory: join the step's remaining collectives, with zeros       # the other ranks wait in them
    all-reduce a flag in host memory: did any rank run out of memory?         # does not wait for the device
    if so: restore buffers and random states; all ranks raise OutOfMemory
    """

    def __init__(self, context: TrainerContext, clock: StepClock) -> None:
        self._confirmation = _Confirmation(context)
        super().__init__(context, clock, self._confirmation.confirm)

    def run(self, task: StepTask) -> StepResult:
        """Run one step. Raises `OutOfMemory` on all ranks if any of them runs out of memory."""
        self._confirmation.begin()
        try:
            return super().run(task)
        except OutOfMemory:
            self.clear()
            raise
        except (RuntimeError, MemoryError) as error:
            if self._confirmation.is_done or not is_out_of_memory(error):
                raise
            failed = error.with_traceback(None)  # the frames of the traceback keep tensors alive
        self.clear()
        release_cached_memory()
        if self._context.world.world_size > 1:  # the same collectives as on the other ranks, in the same order
            self._gradient.abandon()
        self._confirmation.confirm(failed)
        raise AssertionError("confirm has raised OutOfMemory")


class _Confirmation:
    """The confirmation of all ranks that they have completed the passes of a step."""

    def __init__(self, context: TrainerContext) -> None:
        self._context = context
        self._before: StepSnapshot
        self.is_done = False
        """Whether the ranks have confirmed the passes of the current step."""

    def begin(self) -> None:
        """Begin a step: keep what its passes will change."""
        self._before = StepSnapshot(self._context)
        self.is_done = False

    def confirm(self, failed: BaseException | None = None) -> None:
        """Tell the other ranks whether the passes have succeeded. A collective.

        `failed`: this rank's error. If any rank has one, restores the state before the passes and raises `OutOfMemory`.
        """
        flag = torch.tensor(int(failed is not None))
        if self._context.world.world_size > 1:
            dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=host_group(self._context.world))
        self.is_done = True
        if flag:
            self._before.restore()
            self._context.logged.drop_step()
            raise OutOfMemory(failed)
