"""How one model is spread over the ranks: one file per strategy.

    strategy.py   the interface: everything that the trainer and the checkpoints know of a strategy
    single.py     one rank, which needs nothing of the others
    ddp.py        torch's DistributedDataParallel
    replicas.py   what strategies with a whole model on every rank share

A new strategy is a subclass of `Strategy` in a file of its own, and one line in `ddp_kit.config.STRATEGIES`.
"""

from importlib import import_module

from ddp_kit.config import STRATEGIES, ParallelConfig
from ddp_kit.parallel.mesh import sizes_of
from ddp_kit.parallel.single import SingleRank
from ddp_kit.parallel.strategy import Passes, Strategy
from ddp_kit.world import World

__all__ = ["Passes", "SingleRank", "Strategy", "strategy_for"]


def strategy_for(config: ParallelConfig, world: World, *, recoverable: bool) -> Strategy:
    """The strategy that the configuration names; `SingleRank` where there is one rank.

    Raises `ConfigError` where the sizes do not fit the number of ranks.

    `recoverable`: steps have to survive that a rank runs out of memory, see `Strategy.finish_failed_passes`.
    """
    sizes_of(config, world.world_size)
    if world.world_size == 1:
        return SingleRank(world, config, recoverable=recoverable)
    module, _, name = STRATEGIES[config.strategy].partition(":")
    kind: type[Strategy] = getattr(import_module(module), name)
    return kind(world, config, recoverable=recoverable)
