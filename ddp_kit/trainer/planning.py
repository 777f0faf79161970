"""Memory plans: `Trainer.plan`, and what a Trainer does in a script that `ddpkit plan` runs."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ddp_kit.config.settings import TrainerConfig
from ddp_kit.data import Data
from ddp_kit.data.collate import unpacked
from ddp_kit.data.feed import FeedBuilder, loader_batch_size
from ddp_kit.data.sampler import BatchPlan
from ddp_kit.distributed.world import World, random_states_kept
from ddp_kit.env import PlanRequest
from ddp_kit.errors import ConfigError
from ddp_kit.memory.choose import device_memory
from ddp_kit.memory.estimate import MemoryPlan, ModelMemory
from ddp_kit.memory.measure import PeakMemory, TrainingPass, measured
from ddp_kit.memory.plan_report import PlanPrinted, described, planned
from ddp_kit.texts import first_line
from ddp_kit.trainer.context import LossFunction, TrainerContext
from ddp_kit.trainer.updates import Update

_WITHOUT_EFFECT = ("save()", "resume()", "evaluate()")


class Planner:
    """Estimates the memory of training.

    `config`: the settings that the user has passed. `feeds`: creates the object that opens data, for a batch plan.
    """

    def __init__(
        self,
        context: TrainerContext,
        config: TrainerConfig,
        updates: Sequence[Update],
        feeds: Callable[[BatchPlan], FeedBuilder],
        peak_memory: PeakMemory,
    ) -> None:
        self._context = context
        self._config = config
        self._updates = updates
        self._feeds = feeds
        self._peak_memory = peak_memory
        self.settings = context.config
        """The settings to plan for."""

    @property
    def world(self) -> World:
        """The ranks that the script sees."""
        return self._context.world

    @property
    def memory(self) -> int | None:
        """The bytes of the device to plan for; None if they are not known."""
        return device_memory(self._context.world.device)

    def plan(self, data: Data, batch_plan: BatchPlan, epoch: int) -> MemoryPlan:
        """Estimate the memory per device that training on `data` needs. `epoch`: the one to read a batch of."""
        if self._context.strategy.shards:
            strategy = self._config.parallel.strategy
            raise ConfigError(
                f"trainer.plan needs the whole model, but parallel={strategy!r} has sharded it",
                "run `ddpkit plan --gpus N script.py`, which needs no GPU; or call trainer.plan in one process",
            )
        model, _ = self.measure(data, batch_plan, epoch)
        world = self.world
        _, plan, _ = planned(model, self.settings, world.world_size, self.memory, world.local_world_size)
        self._peak_memory.compare_with(plan)
        return plan

    def measure(self, data: Data, batch_plan: BatchPlan, epoch: int) -> tuple[ModelMemory, int]:
        """The model's memory, measured with fake tensors, and the number of samples per micro-batch."""
        context = self._context
        size = loader_batch_size(data, self._config) or batch_plan.micro_batch
        with random_states_kept(), context.logged.set_aside():
            batch, problem = self._batch(data, size, epoch)
            loss_functions: list[LossFunction] = [update.loss_fn for update in self._updates]
            optimizers = [(update.optimizer, update.optimizer) for update in self._updates]
            training = TrainingPass(
                loss_functions or [context.loss_fn],
                batch,
                context.precision,
                context.config.model_copy(update={"parallel": self.settings.parallel}),
                context.world.device,
                prefetched=self._prefetched(),
                problem=problem,
            )
            model = measured(
                context.model,
                optimizers or [(context.optimizer, context.stepped_optimizer)],
                training,
                accumulates=batch_plan.accumulation > 1,
            )
        return model, size

    def _batch(self, data: Data, size: int, epoch: int) -> tuple[Any, str]:
        """The first batch of `size` samples, and why there is none, if it cannot be read."""
        ranks = self._context.strategy.data_ranks
        feed = self._feeds(BatchPlan(size * ranks, size, 1, ranks)).train_feed(data, 0, epoch)
        feed.begin(epoch, 0)
        feed.next()
        return unpacked(size, feed.batch())[1], ""

    def _prefetched(self) -> int:
        """The number of micro-batches that are on the device in advance."""
        if self._context.world.device.type != "cuda":
            return 0
        return self._context.config.data.prefetch_batches


class RequestedPlanner(Planner):
    """Estimates the memory for the ranks and devices that `ddpkit plan` asks for; the model has no values."""

    def __init__(self, *arguments: Any, request: PlanRequest) -> None:
        """`request`: that of `ddpkit plan`; the other arguments are those of `Planner`."""
        super().__init__(*arguments)
        self.request = request
        self.settings = self._config

    @property
    def world(self) -> World:
        return replace(
            self._context.world, world_size=self.request.ranks, local_world_size=self.request.per_node
        )  # there is only this process

    @property
    def memory(self) -> int | None:
        return self.request.memory

    def _batch(self, data: Data, size: int, epoch: int) -> tuple[Any, str]:
        try:
            return super()._batch(data, size, epoch)
        except Exception as error:  # the user's code may read the parameters, and raises any error without values
            return None, f"the data cannot be read if the model has no values: {first_line(error)}"

    def _prefetched(self) -> int:
        return self._context.config.data.prefetch_batches


class PlanInstead:
    """Prints a plan where the script of `ddpkit plan` begins to train, and ends the script."""

    def __init__(self, planner: RequestedPlanner, config: TrainerConfig, batch_plan: BatchPlan) -> None:
        self._planner = planner
        self._config = config
        self._batch_plan = batch_plan

    def enter(self, call: str, data: Mapping[str, Any]) -> bool:
        """Print the plan and end the script if `call` trains. Returns False for calls that have no effect here.

        Raises `ConfigError` for calls that need the values of the model.
        """
        if call in _WITHOUT_EFFECT:
            return False
        if "train_data" not in data:
            raise ConfigError(
                f"the script calls trainer.{call} before training, but under `ddpkit plan` the model has no weights",
                "skip this call: the plan is made when the script calls trainer.fit(...) or trainer.steps(...)",
            )
        model, size = self._planner.measure(data["train_data"], self._batch_plan, 0)
        sys.stdout.write(f"{described(model, self._config, self._planner.request, size)}\n")
        raise PlanPrinted(0)
