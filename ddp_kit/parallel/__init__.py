"""Distributes one model over the ranks, with one file per strategy.

    strategy.py      the interface that the trainer and the checkpoints use, the strategy for a single rank, and the
                     arrangement of the ranks: replicate x shard x tensor x pipeline
    ddp.py           torch's DistributedDataParallel
    zero1.py         DDP with the optimizer state divided over the ranks
    fsdp.py          torch's FSDP2: weights, gradients and optimizer state sharded; tensor.py also splits layers
    device_map.py    the layers of one model on several devices of each rank
    pipeline/        the blocks of one model in stages on different ranks; tensor.py splits the blocks of a stage,
                     fsdp.py shards them
    offload.py       an optimizer that runs on the host
    shards.py        the part of each parameter that the optimizer of this rank updates; optimizer_trial.py shows
                     whether the optimizer supports that
    writes.py        finds writes to weights that a strategy would lose

A new strategy needs a subclass of `Strategy`, in a file of its own, and a line in `ddp_kit.config.settings.STRATEGIES`.
"""

from dataclasses import replace
from importlib import import_module

from ddp_kit.config.settings import STRATEGIES, ParallelConfig
from ddp_kit.distributed.world import World
from ddp_kit.parallel.strategy import NO_OPTIONS, Options, Parallelize, SingleRank, Strategy, sizes_of

__all__ = ["Options", "Parallelize", "SingleRank", "Strategy", "strategy_for"]

_SINGLE = "ddp_kit.parallel.strategy:SingleRank"
_OF_ONE_RANK = {"device_map": "ddp_kit.parallel.device_map:SingleRankDeviceMap"}
"""Strategy name -> the class for a single rank, for strategies that have their own."""


def strategy_for(config: ParallelConfig, world: World, options: Options = NO_OPTIONS) -> Strategy:
    """Create the configured strategy. For one rank, this is `SingleRank`, or `SingleRankDeviceMap` with a device map.

    Raises `ConfigError` if the sizes do not match the number of ranks.
    """
    sizes_of(config, world.world_size)
    if world.world_size == 1:
        path = _OF_ONE_RANK.get(config.strategy, _SINGLE)
        options = replace(options, parallelize=None)
    else:
        path = STRATEGIES[config.strategy]
    module, _, name = path.partition(":")
    kind: type[Strategy] = getattr(import_module(module), name)
    return kind(world, config, options)
