"""How one model is spread over the ranks: one file per strategy.

    strategy.py      the interface: everything that the trainer and the checkpoints know of a strategy; one rank alone;
                     how the ranks are divided: replicate x shard x tensor x pipeline
    ddp.py           torch's DistributedDataParallel
    zero1.py         the same, with the optimizer state divided over the ranks
    fsdp.py          torch's FSDP2: weights, gradients and optimizer state sharded; with tensor.py, layers are split too
    device_map.py    the layers of one model on several devices of each rank
    pipeline.py      the blocks of one model in stages, each on a rank: stages.py cuts it and sends between stages;
                     tensor.py splits the blocks of a stage, fsdp.py shards them
    memory.py        bytes per device, by arithmetic; what `parallel="auto"` tries
    offload.py       the optimizer on the host
    activations.py   what the forward pass keeps for the backward pass
    shards.py        tensors of which each rank holds a part, for several strategies

A new strategy is a subclass of `Strategy` in a file of its own, and one line in `ddp_kit.config.settings.STRATEGIES`.
"""

from importlib import import_module

from ddp_kit.config.settings import STRATEGIES, ParallelConfig
from ddp_kit.distributed.world import World
from ddp_kit.parallel.strategy import Parallelize, PassedOn, Passes, SingleRank, Strategy, sizes_of

__all__ = ["Parallelize", "PassedOn", "Passes", "SingleRank", "Strategy", "strategy_for"]

_SINGLE = "ddp_kit.parallel.strategy:SingleRank"
_OF_ONE_RANK = {"device_map": "ddp_kit.parallel.device_map:SingleRankDeviceMap"}
"""Strategies that one rank has a use for."""


def strategy_for(
    config: ParallelConfig, world: World, *, recoverable: bool, parallelize: Parallelize | None = None
) -> Strategy:
    """The strategy that the configuration names; where there is one rank, `SingleRank` or what it is with a device map.

    Raises `ConfigError` where the sizes do not fit the number of ranks.

    `parallelize`: the user's own function that spreads the model, in place of the strategy's.
    `recoverable`: steps have to survive that a rank runs out of memory, see `Strategy.finish_failed_passes`.
    """
    sizes_of(config, world.world_size)
    alone = world.world_size == 1
    path = _OF_ONE_RANK.get(config.strategy, _SINGLE) if alone else STRATEGIES[config.strategy]
    module, _, name = path.partition(":")
    kind: type[Strategy] = getattr(import_module(module), name)
    strategy = kind(world, config, recoverable=recoverable)
    if parallelize is not None and not alone:
        strategy.use(parallelize)
    return strategy
