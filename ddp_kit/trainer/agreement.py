"""What all ranks must have in common before they train together."""

from collections.abc import Mapping
from typing import Any, Protocol

from ddp_kit.config.settings import TrainerConfig
from ddp_kit.data.comparison import SampleComparison, facts_of_data
from ddp_kit.distributed import barrier, consistency
from ddp_kit.trainer.context import TrainerContext
from ddp_kit.trainer.position import Position


class Entry(Protocol):
    """Protocol of what happens first in each call of a Trainer that all ranks make."""

    def enter(self, call: str, data: Mapping[str, Any]) -> bool:
        """Prepare a call, such as `fit()`, with this data. Returns whether the call has an effect."""


class RankAgreement:
    """Checks that the ranks make the same call, and agree on data, settings and state, or they would diverge or hang.

    `config`: the settings that the user has passed. `metrics`: the metrics of evaluations, by name.
    """

    def __init__(
        self, context: TrainerContext, config: TrainerConfig, metrics: Mapping[str, Any], position: Position
    ) -> None:
        self._context = context
        self._config = config
        self._metrics = metrics
        self._position = position
        self._samples = SampleComparison(context.world, context.config.data, context.config.seed)

    def enter(self, call: str, data: Mapping[str, Any]) -> bool:
        """Wait until all ranks have made the call; if it has data, compare data, settings and state. A collective."""
        if self._context.world.world_size > 1:
            self.wait(call)
            if data:
                self._compare(data)
        return True

    def wait(self, call: str) -> None:
        """Wait at a monitored barrier until all ranks have made the same call."""
        barrier.wait_for_all(self._context.world, f"trainer.{call} after step {self._position.step}")

    def _compare(self, data: Mapping[str, Any]) -> None:
        context = self._context
        world = context.world
        strategy = context.strategy
        facts = facts_of_data(data) | consistency.facts_of_run(self._config, context.optimizer, self._metrics)
        consistency.check_agreement(world, facts)
        if self._position.step == 0 or "train_data" in data:
            weights = consistency.facts_of_weights(context.model, strategy.local_parameters(), world)
            consistency.check_agreement(world, weights, strategy.replicas)
            optimizer = consistency.facts_of_optimizer(
                strategy.parameter_names(), context.stepped_optimizer, context.optimizer, world
            )
            consistency.check_agreement(world, optimizer, strategy.optimizer_replicas)
            progress: consistency.Facts = {
                "the scheduler and its state": consistency.schedule(context.scheduler),
                "the state of the gradient scaling": repr(context.precision.state()),
            }
            consistency.check_agreement(world, progress)
        self._samples.compare(data)
