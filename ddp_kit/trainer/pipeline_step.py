"""The passes of an optimizer step in a pipeline: a schedule of torch.distributed.pipelining determines their order."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed.pipelining import Schedule1F1B, ScheduleGPipe, ScheduleLoopedBFS

from ddp_kit.heartbeat import HeartbeatWriter, Phase
from ddp_kit.parallel.pipeline.buffers import changed_buffers
from ddp_kit.parallel.pipeline.model import Activation, StageBoundary, leaves_of
from ddp_kit.parallel.pipeline.stage import StageFailedError, move
from ddp_kit.parallel.pipeline.strategy import PipelineStrategy
from ddp_kit.trainer.timing import BACKWARD, FORWARD, StepClock


class PipelineLoss(Protocol):
    """Protocol of the trainer's StepLoss."""

    def of_pass(self, batch: object, samples: int) -> Tensor:
        """Return the loss to backpropagate, which it computes with `Strategy.call`."""

    def agree(self) -> None:
        """Take part in the exchange of the kind of the first loss, on a rank that has no loss."""

    def reduce_weights(self) -> None:
        """Start to sum the weights of all ranks."""


class PipelinePasses:
    """Runs the passes of optimizer steps on this rank's stage.

    first pass of a run        alone: the ranks compare what the loss function returns, and learn which weights and
                               buffers each stage uses
    other passes               in the order of the schedule

    The schedule calls `_forward` and `_backward` through the strategy's `Stage`.
    """

    def __init__(
        self, strategy: PipelineStrategy, loss: PipelineLoss, clock: StepClock, heartbeat: HeartbeatWriter
    ) -> None:
        self._strategy = strategy
        self._stage = strategy.stage
        self._stage.run_forward = self._forward
        self._stage.run_backward = self._backward
        self._loss = loss
        self._clock = clock
        self._heartbeat = heartbeat
        self._schedules: dict[int, Any] = {}  # by number of passes
        self._passes: Sequence[int] = ()  # of the current step, as the function below
        self._batch: Callable[[], Any]

    def run(self, passes: Sequence[int], batch: Callable[[], Any]) -> None:
        """Add up the gradients of a step's passes, as `OptimizerStep.run_passes` does."""
        self._passes = passes
        self._batch = batch
        alone = 0
        if not self._strategy.learned:
            if passes:
                self._run_first_pass()
                alone = 1
            else:
                self._strategy.learn(set(), set())
        if count := len(passes) - alone:
            self._stage.first_pass = alone
            self._schedule(count).step(target=torch.arange(count), return_outputs=False)

    def _run_first_pass(self) -> None:
        stage = self._stage
        buffers = self._strategy.buffers
        versions = buffers.versions()
        try:
            move(stage.get_fwd_recv_ops(0))
        except StageFailedError:
            stage.send_failure()
            self._loss.agree()  # raises, because the failed rank reports its error
            raise
        used = leaves_of(stage.forward_one_chunk(0))
        move(stage.get_fwd_send_ops(0))
        if not stage.is_last:
            self._loss.agree()
        changed = changed_buffers(versions, buffers.versions())
        self._strategy.learn(used, changed)  # before the backward pass, which may start the sum of the loss weights
        move(stage.get_bwd_recv_ops(0))
        stage.backward_one_chunk(0, last_backward=len(self._passes) == 1)
        move(stage.get_bwd_send_ops(0))

    def _schedule(self, passes: int) -> Any:
        """torch's schedule for a number of passes.

        1F1B needs at least as many passes as stages. With fewer passes, all forward passes run before all backward
        passes, as in GPipe; `ScheduleLoopedBFS` does this, because in torch 2.10 `ScheduleGPipe` fails with fewer
        passes than stages (pytorch#171462).
        """
        if passes not in self._schedules:
            settings: dict[str, Any] = {"loss_fn": lambda loss, _target: loss, "scale_grads": False}
            if passes < self._strategy.sizes.pipeline:
                self._schedules[passes] = ScheduleLoopedBFS([self._stage], passes, **settings)
            else:
                kind = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}[self._strategy.config.pipeline_schedule]
                self._schedules[passes] = kind(self._stage, passes, **settings)
        return self._schedules[passes]

    def _forward(self, number: int, received: Activation | None) -> Activation:
        self._heartbeat.enter(Phase.DATA)
        try:
            with self._strategy.training_pass(number, received):
                return Activation(self._loss.of_pass(self._batch(), self._passes[number]))
        except StageBoundary as boundary:
            self._clock.end(FORWARD)
            self._heartbeat.enter(Phase.BACKWARD)
            return boundary.activation

    def _backward(self, output: Tensor, gradient: Tensor | None, last: bool) -> None:
        phase = BACKWARD
        if last:
            self._loss.reduce_weights()
            phase = self._clock.watch(output)
        with self._strategy.accumulating(last=last):
            if output.requires_grad:
                torch.autograd.backward(output, gradient)
        self._clock.end(phase)
