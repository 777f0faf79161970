"""Memory estimates: bytes per device before anything is allocated, and the placements that `parallel="auto"` tries.

    weights, gradients, optimizer state    exact: computed from shapes, dtypes and the sizes of the placement; but
                                           estimates for `tensor` without a plan of the layers, and for `pipeline` if
                                           it is unknown which stages use which weights
    activations, temporaries               estimates, measured in a pass without data (trainer/planning.py)
    communication, fixed                   estimates

The total includes activations or the optimizer's temporary copies, whichever is larger, because they do not exist at
the same time. Estimates were not verified on a GPU. Activations are not divided by `tensor`.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

from ddp_kit.config.settings import MemoryConfig, ParallelConfig, StrategyName
from ddp_kit.errors import GIB, ConfigError, size_text
from ddp_kit.parallel.strategy import Sizes, sizes_of, whole_gradients_fit

MIB = 1024**2
CONTEXT_BYTES = GIB // 2
"""Approximate memory of the CUDA context; NCCL's buffers take the same amount again."""
_WORTH_IT = 0.98  # the maximum fraction of a cheaper setting's bytes


@dataclass(frozen=True)
class ParameterRow:
    """One parameter of the model; tied ones count once."""

    name: str
    shape: tuple[int, ...]
    itemsize: int
    """Bytes of one value."""
    trained: bool
    unit: str = ""
    """The block that contains it; "": none or several."""
    state_per_value: int = 0
    """Bytes of optimizer state per value."""
    state_besides: int = 0
    """Bytes of optimizer state of constant size, such as a step count."""
    split: int | None = None
    """The dimension that tensor parallelism splits; None: it stays whole."""

    @property
    def numel(self) -> int:
        """The number of values."""
        return math.prod(self.shape)

    @property
    def held(self) -> int:
        """Bytes of the parameter, its gradient and its optimizer state."""
        return self.numel * (self.itemsize * (1 + self.trained) + self.state_per_value) + self.state_besides


@dataclass(frozen=True)
class BlockMemory:
    """Bytes of one repeated block in one pass."""

    kept: int
    """Bytes saved for the backward pass."""
    input: int
    """Bytes of the block's input, which is about all that activation checkpointing keeps."""


@dataclass(frozen=True)
class PassMemory:
    """Bytes of one forward and backward pass of one micro-batch, without weights and gradients."""

    batch: int
    """The micro-batch and prefetched ones."""
    kept: int
    """Activations at the end of the forward pass."""
    peak: int
    """The maximum at any time, including activations."""
    blocks: tuple[BlockMemory, ...] = ()
    casts: int = 0
    """Copies of the blocks' weights in another dtype, which autocast keeps until the end of the forward pass."""

    def with_less(self, *, checkpointing: float, offload: bool) -> "PassMemory":
        """An estimate with a fraction of the blocks recomputed (`checkpointing`), or activations on the host."""
        kept, temporary = self.kept, self.peak - self.kept
        if not self.blocks or not (checkpointing or offload):
            return self
        largest = max(block.kept - block.input for block in self.blocks)
        recomputed = round(checkpointing * len(self.blocks))
        left = [block.input if n < recomputed else block.kept for n, block in enumerate(self.blocks)]
        kept += sum(left) - sum(block.kept for block in self.blocks)
        if offload:  # one block is computed while the next one is copied
            kept += 2 * max(left) - sum(left) if len(left) > 1 else 0
        if recomputed:  # one block exists again in its backward pass; casts exist at the end of the forward pass
            temporary = max(temporary + largest, self.casts)
        return replace(self, kept=kept, peak=kept + temporary, blocks=())


@dataclass(frozen=True)
class ModelMemory:
    """The input of a memory plan: a model, its optimizer, and one pass."""

    rows: tuple[ParameterRow, ...]
    buffers: int
    """Bytes of buffers."""
    passed: PassMemory
    copies_weights: bool
    """Whether `optimizer.step()` allocates a copy of the weights, as torch's foreach optimizers do."""
    accumulates: bool
    """Whether an optimizer step has several passes."""
    stages: tuple[frozenset[str], ...] = ()
    """The names of the parameters on each rank of the configured pipeline; empty if unknown."""
    problems: tuple[str, ...] = ()
    """What is unknown and counted as 0 bytes."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes on the device that needs the most, by purpose; see `ddp_kit.parallel.memory`."""

    weights: int
    """Weights and buffers."""
    gradients: int
    """Gradients of the trained parameters."""
    optimizer_state: int
    """The optimizer's state."""
    activations: int
    """Activations saved for the backward pass, and batches. An estimate."""
    temporaries: int
    """Other tensors of the forward and backward pass. An estimate."""
    optimizer_temporaries: int
    """Temporary copies in `optimizer.step()`, at which time there are no activations."""
    communication: int
    """Gathered weights, and buffers of reductions. An estimate."""
    fixed: int
    """The CUDA context and NCCL. An estimate."""
    problems: tuple[str, ...] = ()
    """What is unknown and counted as 0 bytes."""
    host: int = 0
    """Bytes of host memory per rank: optimizer state, weights and gradients that are offloaded."""
    certain: bool = True
    """Whether weights, gradients and optimizer state are exact."""

    @property
    def exact(self) -> int:
        """Bytes of weights, gradients and optimizer state; exact if `certain`."""
        return self.weights + self.gradients + self.optimizer_state

    @property
    def total(self) -> int:
        """Bytes at the peak: the largest sum at any time."""
        step = max(self.activations + self.temporaries, self.optimizer_temporaries)
        return self.exact + step + self.communication + self.fixed

    def __str__(self) -> str:
        """A table of the plan."""
        most = max(self.activations + self.temporaries, self.optimizer_temporaries)
        step = "" if most == self.optimizer_temporaries else "not counted: less than activations"
        passes = "" if most > self.optimizer_temporaries else "not counted: less than the optimizer's copies"
        known = "exact" if self.certain else "estimate"
        rows = [
            ("weights", self.weights, known),
            ("gradients", self.gradients, known),
            ("optimizer state", self.optimizer_state, known),
            ("activations", self.activations, passes or "estimate"),
            ("temporary tensors", self.temporaries, passes or "estimate"),
            ("optimizer's copies", self.optimizer_temporaries, step or "estimate; fused=True needs none"),
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
    offload: bool = False,
    offload_optimizer: bool = False,
    offload_parameters: bool = False,
) -> MemoryPlan:
    """Compute the bytes on the device that needs the most.

    `device_memory`: bytes of a device, which determine what FSDP keeps whole. `checkpointing`: the fraction of the
    blocks that are recomputed. `offload`: offload activations to host memory. `offload_optimizer`,
    `offload_parameters`: as in the configuration.
    Raises `ConfigError` if the sizes of `parallel` do not match the number of ranks.
    """
    sizes = sizes_of(parallel, ranks)
    staged, splits = _stage(model, sizes.pipeline), _known_splits(model.rows)
    rows = [_split(row, sizes.tensor, known=splits) for row in staged]
    # A pipeline shards only its blocks.
    local = [_shard(row, sizes.shard) if row.unit or sizes.pipeline == 1 else row for row in rows]
    weights = sum(row.numel * row.itemsize for row in local)
    gradients, whole = (sum(row.numel * row.itemsize for row in each if row.trained) for each in (local, rows))
    sharded = [row for row in staged if row.unit or sizes.pipeline == 1]
    state = sum(row.numel * row.state_per_value + row.state_besides for row in local)
    copies = gradients if model.copies_weights else 0
    if parallel.shard_optimizer and ranks > 1:
        state, padding = _flat_state(rows, sizes.data)
        weights, copies = weights + padding, -(-copies // sizes.data)
    keeps_whole = (
        sizes.shard > 1 and model.accumulates and _fit_whole([row for row in sharded if row.trained], device_memory)
    )
    gathered = sizes.pipeline > 1 and _fit_whole(sharded, device_memory)
    passed = model.passed.with_less(checkpointing=checkpointing, offload=offload)
    on_device = _OnDevice(weights, whole if keeps_whole else gradients, state, copies)
    host = 0
    if offload_parameters and sizes.data > 1:
        on_device, host = _OnDevice(0, whole if keeps_whole else 0, 0, 0), weights + gradients + state
    elif offload_optimizer or offload_parameters:
        updated = -(-gradients // sizes.data) if parallel.shard_optimizer else gradients
        on_device, host = replace(on_device, state=0, copies=0), 2 * updated + state
    return MemoryPlan(
        weights=on_device.weights + model.buffers,
        gradients=on_device.gradients,
        optimizer_state=on_device.state,
        activations=passed.batch + passed.kept,
        temporaries=passed.peak - passed.kept,
        optimizer_temporaries=on_device.copies,
        communication=_communication(rows, parallel, sizes, gradients, gathered=gathered),
        fixed=CONTEXT_BYTES * (2 if ranks > 1 else 1),
        problems=model.problems,
        host=host,
        certain=(sizes.tensor == 1 or splits) and (sizes.pipeline == 1 or len(model.stages) == sizes.pipeline),
    )


@dataclass(frozen=True)
class _OnDevice:
    """Bytes on the device."""

    weights: int
    gradients: int
    state: int
    copies: int


def _stage(model: ModelMemory, stages: int) -> list[ParameterRow]:
    """The parameters of the largest pipeline stage.

    If the stages are unknown: an equal number of blocks, and the largest parameter outside of the blocks.
    With 1F1B, the first stage keeps the activations of as many micro-batches as there are stages, each for its share of
    the layers: about as much as one device without a pipeline keeps for one micro-batch.
    """
    rows = model.rows
    if stages == 1:
        return list(rows)
    if len(model.stages) == stages:
        each_stage = ([row for row in rows if row.name in names] for names in model.stages)
        return max(each_stage, key=lambda own: sum(row.held for row in own))
    units = [unit for unit in dict.fromkeys(row.unit for row in rows) if unit]
    first = set(units[: -(-len(units) // stages)])
    outside = sorted((row for row in rows if not row.unit), key=lambda row: row.numel * row.itemsize)
    return [row for row in rows if row.unit in first] + outside[-1:]


def _known_splits(rows: Sequence[ParameterRow]) -> bool:
    return any(row.split is not None for row in rows)


def _split(row: ParameterRow, tensor: int, *, known: bool) -> ParameterRow:
    """A rank's part of a parameter with tensor parallelism.

    `known`: whether a plan says which parameters are split; otherwise matrices are.
    """
    dimension = row.split if known else 0 if len(row.shape) == 2 else None
    if tensor == 1 or dimension is None:
        return row
    shape = list(row.shape)
    shape[dimension] = -(-shape[dimension] // tensor)
    return replace(row, shape=tuple(shape))


def tensor_size(rows: Sequence[ParameterRow], most: int) -> int:
    """The number of ranks that the layers of the tensor plan can be split over; 1 without a plan.

    It is the largest divisor of `most` that divides the widths of all these layers.
    """
    widths = [row.shape[row.split] for row in rows if row.split is not None]
    return math.gcd(most, *widths) if widths else 1


def _shard(row: ParameterRow, shard: int) -> ParameterRow:
    """The first rank's shard, which is the largest: FSDP2 divides the first dimension as torch.chunk does."""
    if shard == 1 or not row.shape:
        return row
    return replace(row, shape=(-(-row.shape[0] // shard), *row.shape[1:]))


def _flat_state(rows: Sequence[ParameterRow], ranks: int) -> tuple[int, int]:
    """With ZeRO-1: bytes of optimizer state on the rank with the most, and of the padding that makes ranges equal."""
    state, padding = [0] * ranks, 0
    for itemsize in dict.fromkeys(row.itemsize for row in rows if row.trained):
        flat = [row for row in rows if row.trained and row.itemsize == itemsize]
        values = sum(row.numel for row in flat)
        share = -(-values // ranks)
        padding += (share * ranks - values) * itemsize
        at = 0
        for row in flat:
            for rank in range(at // share, min(ranks, -(-(at + row.numel) // share))):
                held = min(at + row.numel, (rank + 1) * share) - max(at, rank * share)
                state[rank] += held * row.state_per_value
            at += row.numel
    return max(state) + sum(row.state_besides for row in rows), padding


def _fit_whole(rows: Sequence[ParameterRow], device_memory: int | None) -> bool:
    return device_memory is None or whole_gradients_fit(sum(row.numel * row.itemsize for row in rows), device_memory)


def _communication(
    rows: Sequence[ParameterRow], parallel: ParallelConfig, sizes: Sizes, gradients: int, *, gathered: bool
) -> int:
    """Bytes for communication. DDP's buckets share memory with gradients; FSDP gathers a unit while it uses another.

    `gathered`: whether all units stay gathered with `reshard_after_forward="auto"`.
    """
    if sizes.shard == 1:
        half = int(parallel.bucket_mb * MIB) if parallel.compression in ("bf16", "fp16") else 0
        return gradients if parallel.compression == "powersgd" else half  # PowerSGD keeps its compression errors
    weights, trained = {"": 0}, {"": 0}
    for row in rows:
        size = row.numel * row.itemsize
        weights[row.unit] = weights.get(row.unit, 0) + size
        trained[row.unit] = trained.get(row.unit, 0) + size * row.trained
    root, blocks = weights.pop(""), sorted(weights.values())
    if sizes.pipeline > 1:  # weights outside of the blocks are not sharded
        root, trained[""] = 0, 0
    stay = gathered if parallel.reshard_after_forward == "auto" else not parallel.reshard_after_forward
    held = root + (sum(blocks) if stay else sum(blocks[-2:]))
    return held + 2 * max(trained.values())  # whole gradients of one unit, and the send buffer


# --- Advice -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """A change of the configuration, and the memory plan with it."""

    text: str
    """The configuration as written in a script."""
    plan: MemoryPlan
    fits: bool
    note: str = ""

    def __str__(self) -> str:
        return f"  {self.text}: {size_text(self.plan.total)}" + (f" ({self.note})" if self.note else "")


def settings(model: ModelMemory, ranks: int, device_memory: int, ranks_per_node: int = 8) -> Iterator[Setting]:
    """Yield placements, those that cost the least time first, each with its memory plan."""
    fused = replace(model, copies_weights=False)
    ddp, zero1, fsdp = (ParallelConfig(strategy=name) for name in ("ddp", "zero1", "fsdp"))
    in_node = math.gcd(ranks, ranks_per_node)

    def setting(
        text: str, used: ModelMemory, parallel: ParallelConfig, note: str = "", *, ckpt: bool = False, off: bool = False
    ) -> Setting:
        plan = plan_memory(used, parallel, ranks, device_memory=device_memory, checkpointing=float(ckpt), offload=off)
        return Setting(text, plan, plan.total <= device_memory, note)

    yield setting('parallel="ddp"', model, ddp)
    if model.copies_weights:
        yield setting('parallel="ddp", and fused=True for the optimizer', fused, ddp)
    if ranks > 1:
        yield setting('parallel="zero1"', model, zero1)
        yield setting('parallel="fsdp"', model, fsdp)
    # From here on the optimizer's copies are no longer the reason.
    blocks = 'memory={"activation_checkpointing": "blocks"}'
    placed, name = (fsdp, 'parallel="fsdp", ') if ranks > 1 else (ddp, "")
    if model.passed.blocks:
        recomputed = "blocks are computed twice: a third more time"
        yield setting(name + blocks, model, placed, recomputed, ckpt=True)
        both = 'memory={"activation_checkpointing": "blocks", "offload_activations": True}'
        yield setting(name + both, model, placed, "activations travel to host memory and back", ckpt=True, off=True)
    yield setting(
        f'{name}{blocks}, precision="bf16-true"' if model.passed.blocks else f'{name}precision="bf16-true"',
        in_half(model),
        placed,
        "weights are rounded to bfloat16 at each step: it trains differently",
        ckpt=bool(model.passed.blocks),
    )
    known = _known_splits(model.rows)
    tensor = tensor_size(model.rows, in_node) if known else in_node
    if tensor > 1:
        checkpointing = bool(model.passed.blocks)
        sizes = f'parallel={{"shard": {ranks // tensor}, "tensor": {tensor}}}'
        yield setting(
            f"{sizes}, {blocks}" if checkpointing else sizes,
            model,
            ParallelConfig(shard=ranks // tensor, tensor=tensor),
            "" if known else "needs a tensor_plan; estimate",
            ckpt=checkpointing,
        )
    recompute = '"activation_checkpointing": "blocks", ' if model.passed.blocks else ""
    for moved in ("offload_optimizer", "offload_parameters") if ranks > 1 else ("offload_optimizer",):
        plan = plan_memory(
            model,
            placed,
            ranks,
            device_memory=device_memory,
            checkpointing=float(bool(model.passed.blocks)),
            **{moved: True},
        )
        note = f"the optimizer steps on the CPU; {size_text(plan.host)} of host memory for each rank"
        yield Setting(f'{name}memory={{{recompute}"{moved}": True}}', plan, plan.total <= device_memory, note)


def in_half(model: ModelMemory) -> ModelMemory:
    """The same model with weights of two bytes. Activations stay as measured, which is an upper bound."""
    rows = tuple(
        replace(row, itemsize=2, state_per_value=row.state_per_value // 2) if row.itemsize == 4 else row
        for row in model.rows
    )
    return replace(model, rows=rows, passed=replace(model.passed, casts=0))


def advice(
    model: ModelMemory, current: MemoryPlan, ranks: int, device_memory: int, ranks_per_node: int = 8
) -> tuple[Setting, ...]:
    """The settings that fit and need less memory than the current plan, cheapest first."""
    found: list[Setting] = []
    least = float(current.total)
    for setting in settings(model, ranks, device_memory, ranks_per_node):
        if setting.fits and setting.plan.total < least * _WORTH_IT:
            least = setting.plan.total
            found.append(setting)
    return tuple(found)


def report(
    model: ModelMemory, plan: MemoryPlan, ranks: int, device_memory: int, ranks_per_node: int = 8, title: str = ""
) -> str:
    """A text with the table of the plan, whether it fits, and if not, what to change."""
    devices = "on 1 device:" if ranks == 1 else f"on each of {ranks} devices:"
    lines = [f"{title}; {devices}" if title else devices, str(plan)]
    lines += [f"  not known: {problem}" for problem in plan.problems]
    least = "at least " if plan.problems else ""
    needs, has = f"{least}{size_text(plan.total)}", size_text(device_memory)
    if plan.total <= device_memory:
        lines.append(f"fits: {needs} of {has}" + (", as far as is known" if plan.problems else ""))
        return "\n".join(lines)
    lines.append(f"does not fit: {needs}, and a device has {has}")
    found = advice(model, plan, ranks, device_memory, ranks_per_node)
    if found:
        lines += ["what fits, cheapest first:", *map(str, found)]
    else:
        least_of = min(settings(model, ranks, device_memory, ranks_per_node), key=lambda each: each.plan.total)
        least_needed = f"{size_text(least_of.plan.total)} with {least_of.text}"
        lines.append(f"no setting of ddpkit makes it fit; the least is {least_needed}")
        lines.append("use more devices, a smaller micro_batch_size, or a smaller model")
    return "\n".join(lines)


def refuse(plan: MemoryPlan, device_memory: int, more: str = "") -> None:
    """Raise `ConfigError` if weights, gradients and optimizer state alone do not fit; estimates are not used."""
    if plan.exact <= device_memory:
        return
    parts = {"weights": plan.weights, "gradients": plan.gradients, "optimizer state": plan.optimizer_state}
    shown = ", ".join(f"{name} {size_text(size)}" for name, size in parts.items())
    raise ConfigError(
        f"this cannot fit: {shown} per device, and it has {size_text(device_memory)}",
        more or '`ddpkit plan` says what fits; parallel="fsdp" divides all three by the number of ranks',
    )


# --- Automatic placement ----------------------------------------------------------------------------------------------
# `parallel="auto"` tries placements, those that cost the least time first.
#     counted       weights, gradients and optimizer state, and the weights and gradients that FSDP gathers
#     not counted   activations, which are unknown before the first batch: a part of the memory is reserved for them
#
# A candidate fits if the counted bytes fit in the rest of the memory. `ddpkit plan` and `Trainer.plan` have a batch,
# and count activations too.


STEPS: tuple[tuple[StrategyName, dict[str, Any]], ...] = (
    ("ddp", {}),
    ("zero1", {}),
    ("fsdp", {}),
    ("fsdp", {"activation_checkpointing": "blocks"}),
    ("fsdp", {"activation_checkpointing": "blocks", "offload_optimizer": True}),
    ("tensor", {"activation_checkpointing": "blocks"}),
)
"""(strategy, changes to `memory`); settings of the user are kept."""

COUNTED_SHARE = 0.7
"""The fraction of the memory for weights, gradients and optimizer state; the rest is for activations."""
COUNTED_SHARE_RECOMPUTED = 0.85
"""The same if all blocks are recomputed: they keep little more than their inputs."""


@dataclass(frozen=True)
class Candidate:
    """A placement, and the memory that it needs on the rank that needs the most."""

    text: str
    """The configuration as written in a script."""
    parallel: ParallelConfig
    memory: MemoryConfig
    needed: int
    """Bytes of weights, gradients, optimizer state and communication."""
    available: int
    """Bytes that these may take."""

    @property
    def fits(self) -> bool:
        """Whether the needed bytes are available."""
        return self.needed <= self.available

    def __str__(self) -> str:
        return f"{self.text} needs {size_text(self.needed, 2)} of {size_text(self.available, 2)}"


def candidates(
    model: ModelMemory,
    parallel: ParallelConfig,
    memory: MemoryConfig,
    ranks: int,
    device_memory: int,
    ranks_per_node: int,
) -> Iterator[Candidate]:
    """Yield the placements to try for these settings, in order, each once.

    `parallel`, `memory`: the other settings in them are kept. `device_memory`: bytes of the smallest device.
    """
    has_blocks = any(row.unit for row in model.rows)
    tensor = tensor_size(model.rows, math.gcd(ranks, ranks_per_node))
    seen: list[tuple[StrategyName, dict[str, Any]]] = []
    for strategy, wanted in STEPS:
        changes = {
            name: value
            for name, value in wanted.items()
            if name not in memory.model_fields_set and (name != "activation_checkpointing" or has_blocks)
        }
        placement: StrategyName = "ddp" if ranks == 1 else strategy
        step = placement, changes
        if step in seen or (strategy == "tensor" and tensor == 1):
            continue
        seen.append(step)
        placed = _placed(parallel, step[0], ranks, tensor)
        yield candidate_for(model, placed, memory.model_copy(update=changes), ranks, device_memory, changes)


def choose(tried: Iterable[Candidate]) -> tuple[Candidate | None, list[Candidate]]:
    """The first candidate that fits, and those before it; None and all candidates if none fits."""
    refused: list[Candidate] = []
    for each in tried:
        if each.fits:
            return each, refused
        refused.append(each)
    return None, refused


def candidate_for(
    model: ModelMemory,
    parallel: ParallelConfig,
    memory: MemoryConfig,
    ranks: int,
    device_memory: int,
    changes: Mapping[str, Any] = MappingProxyType({}),
) -> Candidate:
    """The candidate for a placement. `changes`: the settings of `memory` to show in its text."""
    plan = plan_memory(
        model,
        parallel,
        ranks,
        device_memory=device_memory,
        offload_optimizer=memory.offload_optimizer,
        offload_parameters=memory.offload_parameters,
    )
    share = COUNTED_SHARE_RECOMPUTED if memory.activation_checkpointing == "blocks" else COUNTED_SHARE
    text = f"parallel={_text(parallel)}" + (f", memory={_table(changes)}" if changes else "")
    return Candidate(text, parallel, memory, plan.exact + plan.communication, int(share * device_memory))


def _placed(parallel: ParallelConfig, strategy: StrategyName, ranks: int, tensor: int) -> ParallelConfig:
    """The configuration `parallel` with another strategy and its sizes."""
    if strategy == "tensor":
        sizes = ParallelConfig(shard=ranks // tensor, tensor=tensor)
    else:
        sizes = ParallelConfig(strategy=strategy)
    fields = ("strategy", "replicate", "shard", "tensor", "shard_optimizer")
    return parallel.model_copy(update={field: getattr(sizes, field) for field in fields})


def _text(parallel: ParallelConfig) -> str:
    named = {name: getattr(parallel, name) for name in ("replicate", "shard", "tensor", "pipeline")}
    given = {name: size for name, size in named.items() if size not in (1, -1)}
    return _table(given) if given else f'"{parallel.strategy}"'


def _table(values: Mapping[str, Any]) -> str:
    return str(dict(values)).replace("'", '"')
