"""What may be given for each setting, for type checkers and completion: `TrainerConfig(data={"num_workers": 4})`.

Written by docs/tools/settings.py (`make docs`) from the fields of config.py; not by hand.
"""
# fmt: off
# ruff: noqa: E501

from collections.abc import Mapping
from pathlib import Path
from typing import Literal, TypedDict

from ddp_kit.config import CheckpointConfig, DataConfig, MemoryConfig, ParallelConfig, ProfileConfig


class DataSettings(TypedDict, total=False):
    """The settings of `DataConfig`."""

    num_workers: int | Literal["auto"]
    """DataLoader workers per rank; "auto": the CPU cores this rank has to itself, at most 8."""
    pin_memory: bool | Literal["auto"]
    """Page-locked host memory, for copies that overlap with computation; "auto": on a GPU."""
    prefetch_batches: int
    """Micro-batches copied to the device ahead of their use (GPU only)."""
    timeout: float | None
    """Seconds to wait for a DataLoader worker's batch; then the run ends and names it. None: no limit."""
    shuffle: bool
    """A new order each epoch, a pure function of (seed, epoch)."""
    drop_last: bool
    """Leave out the short last global batch; False trains on it, exactly weighted."""
    compare_items: int
    """Samples that each rank fetches of a dataset when it is first used, to compare them; 0: none."""
    seed_samples: bool
    """Random augmentation depends on (seed, epoch, sample) alone: not on ranks, workers, resume."""


class CheckpointSettings(TypedDict, total=False):
    """The settings of `CheckpointConfig`."""

    dir: str | Path | None
    """Folder of the checkpoints; None: off."""
    every_steps: int | None
    """Optimizer steps between saves."""
    every_seconds: float | None
    """Seconds between saves, by the clock of rank 0."""
    keep_last: int
    """How many whole checkpoints are kept."""
    keep_best: str | None
    """Save after the best evaluation so far, by "loss" or this metric, and keep that one too."""
    best_mode: Literal["min", "max"]
    """What is better for keep_best: less or more."""
    trainable_only: bool
    """Store only the parameters that require gradients, and buffers. A resume takes the frozen ones from the script's model, and refuses others than those the run began with."""
    background: bool
    """Write in a separate process while training continues."""
    overlap: bool
    """Copy weights and optimizer state during the next forward and backward pass, not before it. Only for runs in which nothing but `optimizer.step()` writes to them; an error says so where torch sees another write, but `.data`, numpy views and custom kernels it does not see."""
    resume: Literal["auto"] | str | Path | None
    """"auto": the newest whole checkpoint in `dir`, if any; a path; None: start afresh."""


class ParallelSettings(TypedDict, total=False):
    """The settings of `ParallelConfig`."""

    strategy: Literal["ddp", "zero1", "fsdp", "tensor", "pipeline", "device_map", "auto"]
    """ddp: a whole replica on every rank; zero1: the same with the optimizer state sharded; fsdp: weights, gradients and optimizer state sharded; auto: the first of these that fits, with activation checkpointing and tensor parallel where that is needed. The sizes below say the same in numbers; their product is the number of ranks."""
    replicate: int
    """Groups of ranks that each hold the whole model; -1: the ranks left over."""
    shard: int
    """Ranks over which weights, gradients and optimizer state are sharded (FSDP2)."""
    tensor: int
    """Ranks over which each layer of `tensor_plan` is split (tensor parallel)."""
    pipeline: int
    """Stages that the model is cut into, each on a rank of its own."""
    stages: Literal["auto"] | tuple[str, ...] | list[str]
    """Modules at which new stages begin, by name; "auto": the repeated blocks, divided by their bytes."""
    schedule: Literal["gpipe", "1f1b", "interleaved", "zbv"]
    """The order of a step's passes: gpipe: all forward, then all backward; 1f1b: backward as soon as possible, which keeps fewer activations; interleaved: 1f1b with two stages per rank, which idles less and sends more; zbv: two stages per rank in the order of a V, whose backward passes send gradients on before they compute those of weights (zero bubble)."""
    optimizer: Literal["whole", "sharded"]
    """sharded: each rank holds and updates an equal share of the optimizer state (ZeRO-1)."""
    units: Literal["auto"] | tuple[str, ...] | list[str]
    """Modules whose weights are gathered together, by name; "auto": the repeated blocks."""
    tensor_plan: Literal["auto"] | Mapping[str, str]
    """How layers are split for `tensor`: names or patterns such as {"blocks.*.up": "column", "blocks.*.down": "row"}; "auto": the plan that the model brings along."""
    reshard: Literal["auto"] | bool
    """Give up gathered weights after the forward pass; "auto": yes, except those of the root."""
    device_map: Literal["auto"] | Mapping[str, int] | None
    """Devices for the layers of one model: module names, or ranges as `blocks.0-11`, each with a number among the devices of its rank; "auto": repeated blocks, balanced by bytes; None: off."""
    find_unused_parameters: bool
    """For models that leave some parameters out of some steps; costs a graph walk per step."""
    static_graph: bool
    """The same parameters take part in every pass: DDP then needs no search for unused ones."""
    bucket_mb: float
    """Size of the gradient buckets that are reduced together, MiB."""
    compression: Literal["bf16", "fp16", "powersgd"] | None
    """What gradients travel as: bf16, fp16 (half the bytes) or powersgd (low rank); None: whole."""
    share_gpus: bool
    """Several ranks may use one GPU: reductions then go through host memory (gloo, not NCCL), which is slow. For trying several ranks where there are fewer GPUs."""


class MemorySettings(TypedDict, total=False):
    """The settings of `MemoryConfig`."""

    checkpointing: Literal["blocks", "ops"] | float | None
    """Activation checkpointing, with the same result: blocks: the backward pass recomputes each repeated block from its input; a number from 0 to 1: that fraction of the blocks; ops: every second matrix product of a block and attention are kept, all else is recomputed; None: off."""
    offload_activations: bool
    """Keep activations of 1 MiB or more in page-locked host memory until the backward pass; the same result. On the CPU they are only copied."""
    activation_bits: Literal[8] | None
    """8: keep floating-point activations of 64 KiB or more as 8-bit integers. The loss is the same; gradients are approximate. None: as they are."""
    offload_optimizer: bool
    """Keep the optimizer's state in host memory, and let it step on the CPU, with page-locked copies of the weights and gradients that this rank updates."""
    offload_parameters: bool
    """With FSDP: keep sharded weights and gradients in page-locked host memory between uses; the optimizer then steps on the CPU, too."""


class ProfileSettings(TypedDict, total=False):
    """The settings of `ProfileConfig`."""

    steps: tuple[int, int] | list[int] | None
    """The first and the last optimizer step to record, counted from 1; None: off."""
    ranks: tuple[int, ...] | list[int] | None
    """The ranks that record; None: all."""
    dir: str | Path
    """Folder of the traces, and of memory snapshots when a GPU runs out of memory."""


class TrainerSettings(TypedDict, total=False):
    """The settings of `TrainerConfig`."""

    epochs: int | None
    """Passes over the data; 1 where max_steps is not given either."""
    max_steps: int | None
    """Optimizer steps; with epochs too, what comes first ends the run."""
    max_seconds: float | None
    """Seconds since the job's start after which it saves and ends with exit code 75."""
    global_batch_size: int | None
    """Samples per optimizer step over all ranks."""
    micro_batch_size: int | Literal["auto"] | None
    """Samples per forward pass of one rank, at most; "auto": the most that the memory takes."""
    accumulation_steps: int | None
    """Forward and backward passes per optimizer step."""
    precision: Literal["fp32", "tf32", "bf16", "fp16", "bf16-true", "fp8"]
    """Arithmetic of the forward and backward passes."""
    fp8_layers: Literal["auto"] | tuple[str, ...] | list[str]
    """Linear layers that precision="fp8" computes in float8, by names or patterns such as "blocks.*.up"; "auto": those of the repeated blocks that are large enough to become faster."""
    max_grad_norm: float | None
    """Clip the global gradient norm to this; None: off."""
    max_grad_value: float | None
    """Clip each gradient value to at most this size; None: off."""
    non_finite: Literal["stop", "skip"]
    """On a loss or gradient that is NaN or infinite: end the run, or leave that step out."""
    warmup_steps: int
    """Optimizer steps in which the learning rate rises linearly to where the scheduler starts."""
    learning_rate_scaling: Literal["linear", "sqrt"] | None
    """Multiply the learning rate by global_batch_size / reference_batch_size, or its square root."""
    reference_batch_size: int | None
    """The global batch that the optimizer's learning rate was chosen for."""
    compile: Literal["model", "blocks"] | None
    """torch.compile: the whole model, or each of its repeated blocks; None: off."""
    seed: int
    """Data order and every random state."""
    deterministic: bool
    """Only algorithms whose results are bitwise reproducible; may be slower."""
    log_every: int
    """Optimizer steps between log points, where the host waits for the device."""
    eval_every: int | None
    """Optimizer steps between evaluations; None: after each epoch."""
    eval_every_epochs: int | None
    """Epochs between evaluations, instead of eval_every."""
    sanity: Literal["auto", "off"]
    """auto: before the first step, evaluate one batch of a dataset with a length, so that a mistake in the loss, the metrics or the name of a metric shows at once."""
    verify_ranks: Literal["weights", "all", "off"]
    """Compare over the ranks at log points: the weights, or all of weights and optimizer state; a pass over that memory each time, and no collective of its own. Learning rates are always compared."""
    data: DataConfig | DataSettings
    checkpoint: CheckpointConfig | CheckpointSettings
    parallel: ParallelConfig | ParallelSettings | Literal["ddp", "zero1", "fsdp", "tensor", "pipeline", "device_map", "auto"]
    memory: MemoryConfig | MemorySettings
    profile: ProfileConfig | ProfileSettings
