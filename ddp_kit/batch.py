"""Divides the samples of an optimizer step among ranks and into micro-batches.

Pure arithmetic on positions. Nothing is rounded: a global batch that is not divisible by the number of ranks is split
unevenly, and every sample of a step is used exactly once, for any number of ranks.
"""

from dataclasses import dataclass

from ddp_kit.errors import ConfigError

DEFAULT_GLOBAL_BATCH = 32


@dataclass(frozen=True)
class BatchPlan:
    """The batch sizes of an optimizer step, in samples, and their division among ranks."""

    global_batch: int
    """Samples per optimizer step over all ranks."""
    micro_batch: int
    """The largest number of samples in a forward pass of one rank."""
    accumulation: int
    """Forward and backward passes per optimizer step, on the rank with the largest share."""
    world_size: int
    """The number of ranks that a global batch is divided among."""

    def steps(self, samples: int, drop_last: bool = False) -> int:
        """The number of optimizer steps in an epoch of `samples` samples. `drop_last`: only complete ones."""
        return samples // self.global_batch if drop_last else -(-samples // self.global_batch)

    def step_samples(self, step: int, samples: int) -> range:
        """The positions of the samples of step `step`, counted from 0, in an epoch of `samples` samples."""
        return range(step * self.global_batch, min((step + 1) * self.global_batch, samples))

    def micro_batches(self, rank: int, samples: int) -> tuple[range, ...]:
        """The micro-batches of `rank` in an optimizer step of `samples` samples, as positions within the step.

        A full step has `accumulation` micro-batches per rank, or fewer if the rank has fewer samples; a shorter step
        has as many as its samples need. A rank without samples has none.
        """
        own = split(samples, self.world_size, rank)
        if not own:
            return ()
        needed = -(-len(own) // self.micro_batch)
        passes = max(needed, min(self.accumulation, len(own))) if samples >= self.global_batch else needed
        shares = (split(len(own), passes, number) for number in range(passes))
        return tuple(range(own.start + share.start, own.start + share.stop) for share in shares)


def split(total: int, parts: int, number: int) -> range:
    """Range `number` of `total` positions that are split into `parts` ranges whose sizes differ by at most one."""
    size, larger = divmod(total, parts)
    start = number * size + min(number, larger)
    return range(start, start + size + (number < larger))


def plan_batches(
    global_batch: int | None, micro_batch: int | None, accumulation: int | None, world_size: int
) -> BatchPlan:
    """Compute the batch sizes that are None from the others. The default global batch is 32.

    Raises `ConfigError` if all three are given and contradict each other.
    """
    if global_batch is None:
        global_batch = DEFAULT_GLOBAL_BATCH if micro_batch is None else micro_batch * (accumulation or 1) * world_size
    share = _ceil(global_batch, world_size)
    if micro_batch is None:
        micro_batch = _ceil(share, accumulation or 1)
    passes = _ceil(share, micro_batch)
    if accumulation is None:
        accumulation = passes
    if accumulation != passes and micro_batch != _ceil(share, accumulation):
        raise _disagreement(global_batch, micro_batch, accumulation, world_size)
    return BatchPlan(global_batch, micro_batch, accumulation, world_size)


def _ceil(total: int, parts: int) -> int:
    return -(-total // parts)


def _disagreement(global_batch: int, micro_batch: int, accumulation: int, world_size: int) -> ConfigError:
    share = _ceil(global_batch, world_size)
    product = micro_batch * accumulation * world_size
    ways = (
        f"micro_batch_size={_ceil(share, accumulation)} (keeps the other two)",
        f"accumulation_steps={_ceil(share, micro_batch)} (keeps the other two)",
        f"global_batch_size={product} (keeps the other two)",
    )
    return ConfigError(
        f"the batch sizes do not agree: micro_batch_size {micro_batch} x accumulation_steps {accumulation} "
        f"x {world_size} {'rank' if world_size == 1 else 'ranks'} = {product}, "
        f"but global_batch_size is {global_batch}; the nearest settings that work:",
        "change one of the three, or leave one out: it is then computed from the others",
        ways,
    )
