"""How the ranks are divided: replicate x shard x tensor x pipeline. Pure arithmetic."""

import math
from dataclasses import dataclass

from ddp_kit.config import ParallelConfig
from ddp_kit.errors import ConfigError

_WHOLE_GRADIENTS_SHARE = 8  # of a device's memory, whole gradients take one part at most


@dataclass(frozen=True)
class Sizes:
    """The sizes of the four dimensions; ranks are numbered with `tensor` as the fastest, then shard, replicate and
    pipeline: ranks of one tensor group are neighbours, mostly on one node."""

    replicate: int
    shard: int
    tensor: int
    pipeline: int

    @property
    def data(self) -> int:
        """Into how many parts a global batch is divided."""
        return self.replicate * self.shard

    def coordinates(self, rank: int) -> tuple[int, int, int, int]:
        """Where a rank is: in pipeline, replicate, shard and tensor."""
        rank, tensor = divmod(rank, self.tensor)
        rank, shard = divmod(rank, self.shard)
        pipeline, replicate = divmod(rank, self.replicate)
        return pipeline, replicate, shard, tensor

    def rank(self, pipeline: int, replicate: int, shard: int, tensor: int) -> int:
        """The rank at these coordinates."""
        return ((pipeline * self.replicate + replicate) * self.shard + shard) * self.tensor + tensor


def sizes_of(config: ParallelConfig, world_size: int) -> Sizes:
    """The sizes that a configuration means for so many ranks. Raises `ConfigError` where they do not fit."""
    fixed = {"tensor": config.tensor, "pipeline": config.pipeline}
    free = next((name for name in ("replicate", "shard") if getattr(config, name) == -1), None)
    fixed |= {name: getattr(config, name) for name in ("replicate", "shard") if name != free}
    product = math.prod(fixed.values())
    left, rest = divmod(world_size, product)
    if rest or left == 0 or (free is None and left != 1):
        shown = " x ".join(f"{name} {size}" for name, size in fixed.items() if size > 1) or "1"
        multiple = max(1, round(world_size / product)) * product if free is not None else product
        raise ConfigError(
            f"the sizes of parallel do not match the number of ranks: {shown} = {product}, but there "
            f"{'is 1 rank' if world_size == 1 else f'are {world_size} ranks'}",
            f"start {multiple} ranks, or change one of the sizes"
            + ("" if free is not None else ", or leave out replicate, which is then computed"),
        )
    if free is not None:
        fixed[free] = left
    return Sizes(**fixed)


def whole_gradients_fit(gradients: int, memory: int) -> bool:
    """Whether FSDP keeps whole gradients while they accumulate, so that it reduces once per step rather than once per
    pass. `gradients`, `memory`: bytes, of the whole model and of one device."""
    return gradients * _WHOLE_GRADIENTS_SHARE <= memory
