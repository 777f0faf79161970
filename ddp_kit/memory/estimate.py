"""Memory estimates: the bytes that a model needs on each device, before anything is allocated.

    weights, gradients, optimizer state    exact: computed from shapes, dtypes and the sizes of the parallel dimensions;
                                           only estimates for `tensor` without a tensor plan, and for `pipeline` if it
                                           is unknown which stages use which weights
    activations, temporaries               estimates, measured in a pass without data (measure.py). Sparse gradients
                                           are temporaries: their size depends on the rows that a batch uses
    communication, fixed                   estimates

The total includes activations or the optimizer's temporary copies, whichever is larger, because they do not exist at
the same time. Estimates were not verified on a GPU. Tensor parallelism is assumed not to reduce activations.
"""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal

from ddp_kit.config.settings import ParallelConfig
from ddp_kit.parallel.strategy import Sizes, sizes_of, whole_gradients_fit
from ddp_kit.texts import GIB, MIB, size_text

CONTEXT_BYTES = GIB // 2
"""Approximate memory of the CUDA context. NCCL's buffers are assumed to need the same amount."""


# --- A model, its optimizer, and one pass -----------------------------------------------------------------------------


@dataclass(frozen=True)
class ParameterRow:
    """One parameter of the model; tied parameters count once."""

    name: str
    shape: tuple[int, ...]
    itemsize: int
    """Bytes of one value."""
    trained: bool
    unit: str = ""
    """The block that contains the parameter; "" if no block or several blocks contain it."""
    state_per_value: int = 0
    """Bytes of optimizer state per value."""
    constant_state_bytes: int = 0
    """Bytes of optimizer state of constant size, such as a step count."""
    split: int | None = None
    """The dimension that tensor parallelism splits; None if the parameter stays whole."""
    has_sparse_gradient: bool = False
    """Whether the gradient contains only the rows that a batch uses."""

    @property
    def numel(self) -> int:
        """The number of values."""
        return math.prod(self.shape)

    @property
    def size(self) -> int:
        """Bytes of the parameter."""
        return self.numel * self.itemsize

    @property
    def gradient(self) -> int:
        """Bytes of the parameter's gradient; 0 if there is none, or if it is sparse."""
        return self.size * (self.trained and not self.has_sparse_gradient)

    @property
    def state(self) -> int:
        """Bytes of the parameter's optimizer state."""
        return self.numel * self.state_per_value + self.constant_state_bytes

    def in_half(self) -> "ParameterRow":
        """The same parameter with two bytes per value instead of four."""
        if self.itemsize != 4:
            return self
        return replace(self, itemsize=2, state_per_value=self.state_per_value // 2)


@dataclass(frozen=True)
class BlockMemory:
    """Bytes of one repeated block in one pass."""

    activations: int
    """Bytes saved for the backward pass."""
    input: int
    """Bytes of the block's input, which is about all that activation checkpointing keeps."""


@dataclass(frozen=True)
class PassMemory:
    """Bytes of one forward and backward pass of one micro-batch, without weights and gradients."""

    batch: int = 0
    """Bytes of the micro-batch and of prefetched micro-batches."""
    activations: int = 0
    """Bytes of activations at the end of the forward pass."""
    peak: int = 0
    """The most bytes in use at any time, including activations."""
    blocks: tuple[BlockMemory, ...] = ()
    casts: int = 0
    """Bytes of the casts of the blocks' weights that autocast keeps until the end of the forward pass."""

    def with_less(self, *, checkpointing: float, offload: bool) -> "PassMemory":
        """Estimate the same pass with checkpointing or offloaded activations.

        `checkpointing`: the fraction of the blocks that are recomputed. `offload`: whether activations are offloaded.
        """
        if not self.blocks or not (checkpointing or offload):
            return self
        recomputed = round(checkpointing * len(self.blocks))
        saved = [block.input - block.activations for block in self.blocks[:recomputed]]
        kept = [block.input for block in self.blocks[:recomputed]]
        kept += [block.activations for block in self.blocks[recomputed:]]
        activations = self.activations + sum(saved)
        if offload and len(kept) > 1:  # one block is computed while the next one is copied
            activations += 2 * max(kept) - sum(kept)
        temporary = self.peak - self.activations
        if recomputed:  # one block exists again in its backward pass; casts exist at the end of the forward pass
            largest = max(block.activations - block.input for block in self.blocks)
            temporary = max(temporary + largest, self.casts)
        return replace(self, activations=activations, peak=activations + temporary, blocks=())


@dataclass(frozen=True)
class ModelMemory:
    """The input of a memory plan: a model, its optimizer, and one pass."""

    rows: tuple[ParameterRow, ...]
    buffers: int
    """Bytes of buffers."""
    passed: PassMemory = PassMemory()
    copies_weights: bool = False
    """Whether `optimizer.step()` allocates a copy of the weights, as torch's foreach optimizers do."""
    accumulates: bool = False
    """Whether an optimizer step has several forward and backward passes."""
    stages: tuple[frozenset[str], ...] = ()
    """The names of the parameters on each rank of the configured pipeline; empty if unknown."""
    problems: tuple[str, ...] = ()
    """Descriptions of what is unknown and counted as 0 bytes."""

    @property
    def splits_known(self) -> bool:
        """Whether a tensor plan specifies which parameters tensor parallelism splits."""
        return any(row.split is not None for row in self.rows)

    def in_half(self) -> "ModelMemory":
        """The same model with two bytes per weight. The measured activations are kept, as an upper bound."""
        rows = tuple(row.in_half() for row in self.rows)
        return replace(self, rows=rows, passed=replace(self.passed, casts=0))


def tensor_size(rows: Sequence[ParameterRow], most: int) -> int:
    """The number of ranks over which the layers of the tensor plan can be split; 1 without a plan.

    This is the largest divisor of `most` that also divides the size of the split dimension of each layer.
    """
    widths = [row.shape[row.split] for row in rows if row.split is not None]
    return math.gcd(most, *widths) if widths else 1


# --- Memory plan ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes by purpose, on the device that needs the most memory; see `ddp_kit.memory.estimate`."""

    weights: int
    """Weights and buffers."""
    gradients: int
    """Gradients of the trained parameters, without sparse ones."""
    optimizer_state: int
    """State tensors of the optimizer."""
    activations: int = 0
    """Activations saved for the backward pass, and batches. An estimate."""
    temporaries: int = 0
    """Other tensors of the forward and backward pass. An estimate."""
    optimizer_temporaries: int = 0
    """Temporary copies that `optimizer.step()` makes, at a time when no activations exist."""
    communication: int = 0
    """Gathered weights, and buffers of reductions. An estimate."""
    fixed: int = 0
    """The CUDA context and NCCL. An estimate."""
    problems: tuple[str, ...] = ()
    """Descriptions of what is unknown and counted as 0 bytes."""
    host: int = 0
    """Bytes of host memory per rank: optimizer state, weights and gradients that are offloaded."""
    certain: bool = True
    """Whether weights, gradients and optimizer state are exact."""
    has_sparse_gradients: bool = False
    """Whether there are sparse gradients, which `temporaries` contains."""

    @property
    def exact(self) -> int:
        """Bytes of weights, gradients and optimizer state; exact if `certain`."""
        return self.weights + self.gradients + self.optimizer_state

    @property
    def total(self) -> int:
        """Peak memory in bytes: the largest total of what is in memory at the same time."""
        step = max(self.activations + self.temporaries, self.optimizer_temporaries)
        return self.exact + step + self.communication + self.fixed

    def __str__(self) -> str:
        """A table of the plan."""
        known = "exact" if self.certain else "estimate"
        gradients = known
        if self.has_sparse_gradients:
            gradients += "; sparse ones are temporary tensors"
        passes = "estimate"
        copies = "estimate; not needed with fused=True"
        if self.activations + self.temporaries > self.optimizer_temporaries:
            copies = "not counted: smaller than the activations"
        else:
            passes = "not counted: smaller than the optimizer's copies"
        rows = [
            ("weights", self.weights, known),
            ("gradients", self.gradients, gradients),
            ("optimizer state", self.optimizer_state, known),
            ("activations", self.activations, passes),
            ("temporary tensors", self.temporaries, passes),
            ("optimizer's copies", self.optimizer_temporaries, copies),
            ("communication", self.communication, "estimate"),
            ("CUDA context, NCCL", self.fixed, "estimate"),
            ("total", self.total, ""),
        ]
        if self.host:
            rows.append(("in host memory", self.host, "for each rank"))
        return "\n".join(f"  {name:<20}{size_text(size):>12}  {note}".rstrip() for name, size, note in rows)


def plan_memory(
    model: ModelMemory,
    parallel: ParallelConfig,
    ranks: int,
    *,
    device_memory: int | None = None,
    checkpointing: float = 0.0,
    offload_activations: bool = False,
    offload: Literal["optimizer", "all"] | None = None,
) -> MemoryPlan:
    """Calculate the memory plan for the device that needs the most memory.

    `device_memory`: the bytes of a device, which determine what FSDP keeps unsharded. `checkpointing`: the fraction of
    the blocks that are recomputed. `offload_activations`, `offload`: as in `MemoryConfig`.
    Raises `ConfigError` if the sizes of `parallel` do not match the number of ranks.
    """
    sizes = sizes_of(parallel, ranks)

    def fit_whole(rows: Sequence[ParameterRow]) -> bool:
        return device_memory is None or whole_gradients_fit(_size(rows), device_memory)

    staged = _stage(model, sizes.pipeline)
    sharded = [row for row in staged if _shards(row, sizes) > 1]
    rows = [_split(row, sizes.tensor, known=model.splits_known) for row in staged]
    local = [_part(row, 0, _shards(row, sizes)) for row in rows]
    weights = _size(local)
    gradients = sum(row.gradient for row in local)
    state = sum(row.state for row in local)
    gathered = sizes.pipeline > 1 and fit_whole(sharded)
    communication = _communication(rows, parallel, sizes, gathered=gathered)
    updating = sizes.data if parallel.strategy == "zero1" else 1  # the ranks that divide the optimizer's work
    if updating > 1:
        state, padding = _flat_state(rows, updating)
        weights += padding
    copies = -(-gradients // updating) * model.copies_weights
    whole = 0
    if sizes.shard > 1 and model.accumulates and fit_whole([row for row in sharded if row.trained]):
        whole = sum(row.gradient for row in rows)
    held = whole or gradients

    host = 0
    if offload == "all" and sizes.data > 1:
        host = weights + gradients + state
        held = whole
        weights = state = copies = 0
    elif offload is not None:
        host = 2 * -(-gradients // updating) + state
        state = copies = 0

    passed = model.passed.with_less(checkpointing=checkpointing, offload=offload_activations)
    return MemoryPlan(
        weights=weights + model.buffers,
        gradients=held,
        optimizer_state=state,
        activations=passed.batch + passed.activations,
        temporaries=passed.peak - passed.activations,
        optimizer_temporaries=copies,
        communication=communication,
        fixed=CONTEXT_BYTES * min(ranks, 2),
        problems=model.problems,
        host=host,
        certain=(sizes.tensor == 1 or model.splits_known)
        and (sizes.pipeline == 1 or len(model.stages) == sizes.pipeline),
        has_sparse_gradients=any(row.trained and row.has_sparse_gradient for row in rows),
    )


def _stage(model: ModelMemory, stages: int) -> list[ParameterRow]:
    """The parameters of the pipeline stage that needs the most memory for parameters.

    If the stages are unknown, this stage is assumed to have an equal share of the blocks and, of the parameters outside
    of the blocks, only the largest. Activations need no such division. With 1F1B, the first stage keeps activations for
    as many micro-batches as there are stages, but only those of its own layers; this takes about as much memory as one
    micro-batch on one device without a pipeline.
    """
    rows = model.rows
    if stages == 1:
        return list(rows)
    if len(model.stages) == stages:
        each_stage = ([row for row in rows if row.name in names] for names in model.stages)
        return max(each_stage, key=lambda own: sum(row.size * (1 + row.trained) + row.state for row in own))
    units = [unit for unit in dict.fromkeys(row.unit for row in rows) if unit]
    first = set(units[: -(-len(units) // stages)])
    outside = sorted((row for row in rows if not row.unit), key=lambda row: row.size)
    return [row for row in rows if row.unit in first] + outside[-1:]


def _split(row: ParameterRow, tensor: int, *, known: bool) -> ParameterRow:
    """A rank's part of a parameter with tensor parallelism.

    `known`: whether the split dimensions are known; if not, all matrices are assumed to be split.
    """
    dimension = row.split
    if not known and len(row.shape) == 2:
        dimension = 0
    return row if dimension is None else _part(row, dimension, tensor)


def _shards(row: ParameterRow, sizes: Sizes) -> int:
    """The number of ranks over which a parameter is sharded. A pipeline shards only its blocks."""
    return sizes.shard if row.unit or sizes.pipeline == 1 else 1


def _part(row: ParameterRow, dimension: int, parts: int) -> ParameterRow:
    """The first of `parts` parts of a parameter. No other part is larger, because torch.chunk rounds sizes up."""
    if parts == 1 or not row.shape:
        return row
    shape = list(row.shape)
    shape[dimension] = -(-shape[dimension] // parts)
    return replace(row, shape=tuple(shape))


def _size(rows: Iterable[ParameterRow]) -> int:
    return sum(row.size for row in rows)


def _flat_state(rows: Sequence[ParameterRow], ranks: int) -> tuple[int, int]:
    """Return two numbers of bytes for ZeRO-1: the largest optimizer state of any rank, and the padding.

    The padding makes the shards of all ranks equal in size. All ranks have the state of scalar parameters.
    """
    state = [0] * ranks
    padding = 0
    sharded = [row for row in rows if row.trained and row.shape]
    for itemsize in dict.fromkeys(row.itemsize for row in sharded):
        flat = [row for row in sharded if row.itemsize == itemsize]
        values = sum(row.numel for row in flat)
        share = -(-values // ranks)
        padding += (share * ranks - values) * itemsize
        for row, end in zip(flat, accumulate(row.numel for row in flat), strict=True):
            begin = end - row.numel
            for rank in range(begin // share, -(-end // share)):
                state[rank] += (min(end, (rank + 1) * share) - max(begin, rank * share)) * row.state_per_value
    scalars = sum(row.state_per_value for row in rows if not row.shape)
    return max(state) + scalars + sum(row.constant_state_bytes for row in rows), padding


def _communication(rows: Sequence[ParameterRow], parallel: ParallelConfig, sizes: Sizes, *, gathered: bool) -> int:
    """Bytes for communication: buffers and gathered weights.

    DDP's buckets take no extra memory, because gradients are views into them. FSDP gathers the weights of one unit
    while it computes another. `gathered`: whether `reshard_after_forward="auto"` keeps all units gathered.
    """
    if sizes.shard == 1 and parallel.compression is None:
        return 0
    if sizes.shard == 1:
        return int(parallel.bucket_mb * MIB)
    weights = Counter({"": 0})
    trained = Counter({"": 0})
    for row in rows:
        if _shards(row, sizes) > 1:
            weights[row.unit] += row.size
            trained[row.unit] += row.size * row.trained
    root = weights.pop("")
    blocks = sorted(weights.values())
    stay = gathered if parallel.reshard_after_forward == "auto" else not parallel.reshard_after_forward
    if not stay:
        blocks = blocks[-2:]
    return root + sum(blocks) + 2 * max(trained.values())  # whole gradients of one unit, and the send buffer
