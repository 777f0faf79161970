"""The largest micro-batch that fits: searched before the first step, halved if a later step runs out of memory."""

import gc
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ddp_kit.batch import BatchPlan
from ddp_kit.errors import LossError
from ddp_kit.log import logger
from ddp_kit.metrics import Loss, checked
from ddp_kit.profile import save_memory_snapshot
from ddp_kit.timing import StepClock
from ddp_kit.trainer.exchange import gathered
from ddp_kit.trainer.parts import Parts
from ddp_kit.trainer.planning import what_fits
from ddp_kit.trainer.rollback import RunState, StepState
from ddp_kit.trainer.step import OptimizerStep, StepPasses
from ddp_kit.world import host_group

_SIGNS = (
    "can't allocate memory",  # torch's CPU allocator
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_NOT_SUPPORTED",  # cuDNN reports it if a convolution's workspace does not fit
    "out of memory",
)
_TWICE = (
    "the Trainer calls backward() on the loss: leave it out of the loss function; and call .detach() on tensors that "
    "are kept from one step to the next, such as the state of an RNN"
)
_FITS, _TOO_SMALL, _TOO_LARGE = range(3)  # in order of severity


class OutOfMemory(Exception):  # noqa: N818  # never shown: the loop catches it
    """A step ran out of memory on some rank, and was rolled back on all ranks."""

    def __init__(self, error: BaseException | None) -> None:
        super().__init__(error)
        self.error = error
        """This rank's error; None if another rank ran out of memory."""

    def own_or_silent(self, parts: Parts) -> BaseException:
        """The error to raise if no smaller micro-batch is left to try."""
        if self.error is not None:
            return with_hint(self.error, parts)
        silent = LossError("another rank is out of memory with a micro-batch of 1", "see the error of that rank")
        silent.reported_elsewhere = True
        return silent


def is_out_of_memory(error: BaseException) -> bool:
    """Whether a smaller micro-batch could help."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _SIGNS)


def with_hint(error: BaseException, parts: Parts) -> BaseException:
    """The same error; if it is out of memory, with a hint and the path of a memory snapshot."""
    if "backward through the graph a second time" in str(error):
        error.add_note(f"hint: {_TWICE}")
    if not is_out_of_memory(error):
        return error
    config = parts.config
    path = save_memory_snapshot(config.profile.dir, parts.world.rank)
    recompute = "" if config.memory.checkpointing else 'set memory={"checkpointing": "blocks"} in the TrainerConfig, '
    if config.micro_batch_size == "auto":
        hint = (
            f"no smaller micro-batch can help: {recompute}choose a smaller precision, or an optimizer that keeps less"
        )
    else:
        also = ', or memory={"checkpointing": "blocks"}' if recompute else ""
        hint = (
            f'set micro_batch_size="auto" in the TrainerConfig, or a smaller number{also}; the global batch stays as '
            "it is"
        )
    with suppress(Exception):  # such as too little host memory: the hint must not hide the error
        if placement := what_fits(parts):
            hint = f"{hint}; {placement}"
    error.add_note(f"hint: {hint}" + (f"\nwhat the memory held: {path} (see pytorch.org/memory_viz)" if path else ""))
    return error


# --- before the first step ----------------------------------------------------------------------------------------


def largest_micro_batch(parts: Parts, batches_of: Callable[[int], list[Any]], plan: BatchPlan) -> int:
    """The largest of 1, 2, 4, ... and a rank's whole share for which a step fits on every rank. A collective.

    A trial runs two passes with an optimizer step between them, to allocate optimizer state; then it is rolled back.
    `batches_of(n)`: a batch of n samples on the device, and the prefetched ones. Raises the out-of-memory error if not
    even the smallest fits.
    """
    share = -(-plan.global_batch // plan.world_size)
    before, found, failed = RunState(parts), 0, None
    for size in [*(2**power for power in range(share.bit_length()) if 2**power < share), share]:
        outcome, error = _tried(parts, batches_of, size, last=size == share)
        _free()
        before.restore()
        worst = max(outcome for (outcome,) in gathered(parts.world, [outcome]))
        if worst == _TOO_LARGE:
            failed = OutOfMemory(error)
            break
        if worst == _FITS:
            found = size
    if not found and failed is not None:
        raise failed.own_or_silent(parts) from None
    found = found or share  # too few samples for BatchNorm at any size: training reports it
    logger.info("micro_batch_size='auto' chose {} samples (the limit is {})", found, share)
    return found


def _tried(
    parts: Parts, batches_of: Callable[[int], list[Any]], size: int, *, last: bool
) -> tuple[int, BaseException | None]:
    """The outcome and its error, if any. `last`: the size is the whole share, so gradients do not accumulate."""
    outcome, kept = _FITS, None
    modes = {module: module.training for module in parts.model.modules()}
    parts.model.train()
    try:
        batch, *_ahead = batches_of(size)
        _pass(parts, batch)
        for parameter in parts.strategy.parameters:
            if parameter.grad is not None:
                parameter.grad.zero_()  # the step only allocates optimizer state; avoid non-finite values
        parts.device_optimizer.step()
        if last:
            _forget(parts.model)
        _pass(parts, batch)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        outcome, kept = _TOO_LARGE, error.with_traceback(None)  # traceback frames keep tensors alive
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        outcome = _TOO_SMALL  # BatchNorm
    finally:
        for module, mode in modes.items():
            module.training = mode
    _forget(parts.model)
    return outcome, kept


def _pass(parts: Parts, batch: Any) -> None:
    with parts.precision.forward(), parts.activations.forward_context(), parts.logged.batch(0):
        value = checked(parts.loss_fn(parts.model, batch), "the loss function")
    total = value.loss if isinstance(value, Loss) else value
    if total.requires_grad:  # otherwise the first step of training raises the error
        total.sum().backward()  # type: ignore[no-untyped-call]


def _forget(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = None


def _free() -> None:
    gc.collect()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()


# --- in the middle of training --------------------------------------------------------------------------------------


class RescuedStep(OptimizerStep):
    """An optimizer step that all ranks abandon together if one runs out of memory.

    run the passes
    if out of memory: join the step's remaining collectives, with zeros       # the other ranks wait in them
    all-reduce one flag between hosts: did any rank run out?                  # does not wait for the device
    if so: restore buffers and random states; all ranks raise OutOfMemory
    """

    def release(self) -> None:
        """Discard the strategy's buffers: an interrupted reduction leaves them in an unknown state."""
        self._strategy.release()
        _free()

    def _run_passes(self, passes: StepPasses) -> None:
        before, failed = StepState(self._parts), None
        try:
            super()._run_passes(passes)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            failed = error.with_traceback(None)  # traceback frames keep tensors alive
        if failed is not None:
            self.clear()
            _free()
            self._take_part(passes)
        if self._anyone(failed is not None):
            before.restore()
            passes.drop()
            self.clear()
            raise OutOfMemory(failed)

    def _take_part(self, passes: StepPasses) -> None:
        """Join the step's collectives that this rank has not reached, in their order."""
        if self._parts.world.world_size == 1:
            return
        if not self._losses.agreed:
            self._losses.agree()
        if self._losses.weighted and not passes.weighed:
            passes.add_up_weights()
            passes.weight()
        self._strategy.finish_failed_passes()

    def _anyone(self, failed: bool) -> bool:
        if self._parts.world.world_size == 1:
            return failed
        flag = torch.tensor(int(failed))
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=host_group(self._parts.world))
        return bool(flag)


def new_step(parts: Parts, clock: StepClock) -> OptimizerStep:
    """The object that does the steps; with a recoverable strategy it can abandon a step."""
    return RescuedStep(parts, clock) if parts.strategy.recoverable else OptimizerStep(parts, clock)
