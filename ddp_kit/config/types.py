"""What may be given for each setting, for type checkers and completion: `TrainerConfig(data={"num_workers": 4})`.

Written by docs/tools/settings.py (`make docs`) from the fields of settings.py; not by hand.
"""
# fmt: off
# ruff: noqa: E501

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypedDict

from ddp_kit.config.settings import CheckpointConfig, DataConfig, MemoryConfig, ParallelConfig, ProfileConfig


class DataSettings(TypedDict, total=False):
    """The settings of `DataConfig`."""

    num_workers: int | Literal["auto"]
    """DataLoader workers per rank; "auto": this rank's share of the CPU cores, at most 8."""
    pin_memory: bool | Literal["auto"]
    """Put batches in pinned (page-locked) host memory, so that copies to the GPU overlap with computation; "auto": if there is a GPU."""
    prefetch_batches: int
    """Micro-batches copied to the device in advance (GPU only)."""
    timeout: float | None
    """Seconds to wait for a batch from a DataLoader worker before the run fails. None: no limit."""
    shuffle: bool
    """A new order each epoch, a pure function of (seed, epoch)."""
    drop_last: bool
    """Skip an incomplete last global batch; False trains on it, exactly weighted."""
    compare_items: int
    """Number of samples that the ranks compare when a dataset is first used, to detect different data; 0: none."""
    seed_samples: bool
    """Seed each sample's random augmentation by (seed, epoch, sample): the same for any number of ranks or workers, and after a resume."""
    collate_fn: Callable[[Any], Any] | None
    """Function that collates a list of samples into a batch; None: torch's default_collate. Cannot be set in a configuration file."""
    device_transform: Callable[[Any], Any] | None
    """Function that transforms a training batch on the device; on a GPU it runs concurrently with the previous step. Its random numbers depend on seed, epoch, step and rank. With seed_samples they depend on (seed, epoch, sample), and it is called for each sample, as a batch of size 1."""
    eval_device_transform: Callable[[Any], Any] | None
    """Like device_transform, for batches of evaluation and prediction."""


class CheckpointSettings(TypedDict, total=False):
    """The settings of `CheckpointConfig`."""

    dir: str | Path | None
    """Folder of the checkpoints; None: off."""
    every_steps: int | None
    """Optimizer steps between saves."""
    every_seconds: float | None
    """Seconds between saves, by the clock of rank 0."""
    keep_last: int
    """Number of complete checkpoints to keep."""
    best_metric: str | None
    """Name of a metric, or "loss": save after each evaluation that is the best so far, and keep the best checkpoint in addition to the last ones."""
    best_mode: Literal["min", "max"]
    """Whether lower or higher values of best_metric are better."""
    trainable_only: bool
    """Save only buffers and the parameters that require gradients. On resume, frozen parameters come from the script's model; it is an error if they differ from those at the start of the run."""
    background: bool
    """Write in a separate process while training continues."""
    overlap: bool
    """Copy weights and optimizer state during the next forward and backward pass, not before it. Only for runs in which nothing but `optimizer.step()` writes to them. Other writes are an error if torch detects them, which it cannot for `.data`, numpy views and custom kernels."""
    resume: Literal["auto"] | str | Path | None
    """Checkpoint to resume from: a path; "auto": the newest complete one in `dir`, if any; None: none."""


class ParallelSettings(TypedDict, total=False):
    """The settings of `ParallelConfig`."""

    strategy: Literal["ddp", "zero1", "fsdp", "tensor", "pipeline", "device_map", "auto"]
    """ddp: a whole replica on every rank; zero1: the same with the optimizer state sharded; fsdp: weights, gradients and optimizer state sharded; auto: the first of these that fits in memory, with activation checkpointing and tensor parallelism if needed. Alternatively, set the sizes below, whose product is the number of ranks."""
    replicate: int
    """Number of replicas of the whole model; -1: ranks divided by the other sizes."""
    shard: int
    """Ranks over which weights, gradients and optimizer state are sharded (FSDP2); in a pipeline, those of the blocks."""
    tensor: int
    """Ranks over which each layer of `tensor_plan` is split (tensor parallelism)."""
    pipeline: int
    """Ranks over which the model's blocks are split (pipeline stages)."""
    pipeline_stages: Literal["auto"] | tuple[str, ...] | list[str]
    """Names of the modules at which stages begin; "auto": the repeated blocks, balanced by bytes."""
    pipeline_schedule: Literal["gpipe", "1f1b", "interleaved", "zbv"]
    """The order of a step's passes: gpipe: all forward, then all backward; 1f1b: backward as soon as possible, which keeps fewer activations; interleaved: 1f1b with two stages per rank, with less idle time and more communication; zbv: zero bubble, with two stages per rank in V order and backward passes that send the gradient of the input before they compute those of the weights."""
    shard_optimizer: bool
    """Each rank holds and updates an equal share of the optimizer state (ZeRO-1)."""
    fsdp_units: Literal["auto"] | tuple[str, ...] | list[str]
    """FSDP: names of the modules whose weights are gathered together; "auto": the repeated blocks."""
    tensor_plan: Literal["auto"] | Mapping[str, str]
    """How layers are split for `tensor`: names or patterns such as {"blocks.*.up": "column", "blocks.*.down": "row"}; "auto": the plan that the model defines."""
    reshard_after_forward: Literal["auto"] | bool
    """FSDP: free gathered weights after the forward pass; "auto": yes, except those of the root module and, in a pipeline, those of blocks that take at most an eighth of the memory."""
    device_map: Literal["auto"] | Mapping[str, int] | None
    """Devices for the layers of one model: module names, or ranges such as `blocks.0-11`, each with the number of one of the rank's devices; "auto": repeated blocks, balanced by bytes; None: off."""
    find_unused_parameters: bool
    """For models that do not use every parameter in every step; costs a graph traversal per step."""
    static_graph: bool
    """Promise that every pass uses the same parameters: DDP does not search for unused ones."""
    bucket_mb: float
    """Size of a gradient bucket in MiB; the gradients in a bucket are reduced together."""
    compression: Literal["bf16", "fp16", "powersgd"] | None
    """Compression of gradients for communication: bf16, fp16 (half the bytes) or powersgd (low rank); None: off."""
    share_gpus: bool
    """Allow several ranks per GPU: collectives then go through host memory (gloo, not NCCL), which is slow. For testing several ranks on fewer GPUs."""


class MemorySettings(TypedDict, total=False):
    """The settings of `MemoryConfig`."""

    activation_checkpointing: Literal["blocks", "ops"] | float | None
    """Activation checkpointing; results are the same. blocks: the backward pass recomputes each repeated block from its input; a number from 0 to 1: that fraction of the blocks; ops: keep the outputs of attention and of every second matrix product of a block, and recompute the rest; None: off."""
    offload_activations: bool
    """Keep activations of 1 MiB or more in pinned host memory until the backward pass; results are the same. On the CPU they are only copied."""
    activation_bits: Literal[8] | None
    """8: keep floating-point activations of 64 KiB or more as 8-bit integers. The loss is the same; gradients are approximate. None: off."""
    offload_optimizer: bool
    """Keep the optimizer's state in host memory and run its step on the CPU, on pinned copies of the weights and gradients that this rank updates."""
    offload_parameters: bool
    """With FSDP: keep sharded weights and gradients in pinned host memory between uses; the optimizer's step then also runs on the CPU."""


class ProfileSettings(TypedDict, total=False):
    """The settings of `ProfileConfig`."""

    steps: tuple[int, int] | list[int] | None
    """The first and the last optimizer step to record, counted from 1; None: off."""
    ranks: tuple[int, ...] | list[int] | None
    """The ranks that record; None: all."""
    dir: str | Path
    """Folder of the traces, of the largest allocations on GPUs, and of memory snapshots when a GPU runs out of memory."""


class TrainerSettings(TypedDict, total=False):
    """The settings of `TrainerConfig`."""

    epochs: int | None
    """Passes over the data; 1 if max_steps is not set either."""
    max_steps: int | None
    """Optimizer steps; if epochs is set too, the run ends at the earlier of the two."""
    max_seconds: float | None
    """Seconds since the job's start after which the run saves and exits with code 75."""
    global_batch_size: int | None
    """Samples per optimizer step over all ranks."""
    micro_batch_size: int | Literal["auto"] | None
    """Samples per forward pass of one rank, at most; "auto": as many as fit in memory."""
    accumulation_steps: int | None
    """Forward and backward passes per optimizer step."""
    precision: Literal["fp32", "tf32", "bf16", "fp16", "bf16-true", "fp8"]
    """Numeric precision of the forward and backward passes."""
    fp8_layers: Literal["auto"] | tuple[str, ...] | list[str]
    """Linear layers that precision="fp8" computes in float8, by names or patterns such as "blocks.*.up"; "auto": those of the repeated blocks that are large enough to become faster."""
    bf16_buffers: tuple[str, ...] | list[str]
    """Buffers that precision="bf16-true" converts, by names or patterns such as "*.table". Others keep their dtype, except those of torch's own modules, which follow the weights."""
    bf16_inputs: bool
    """Whether precision="bf16-true" converts the floating-point tensors of a batch."""
    max_grad_norm: float | None
    """Clip the global gradient norm to this value; None: off."""
    max_grad_value: float | None
    """Clip each gradient value to this absolute value; None: off."""
    non_finite_gradients: Literal["stop", "skip"]
    """If a loss or gradient is NaN or infinite: stop the run with an error, or skip the step."""
    warmup_steps: int
    """Optimizer steps in which the learning rate rises linearly to the scheduler's initial rate."""
    learning_rate_scaling: Literal["linear", "sqrt"] | None
    """Multiply the learning rate by global_batch_size / reference_batch_size, or its square root."""
    reference_batch_size: int | None
    """The global batch size that the optimizer's learning rate was chosen for."""
    compile: Literal["model", "blocks"] | None
    """torch.compile: the whole model, or each of its repeated blocks; None: off."""
    seed: int
    """Seed of the data order and all random states."""
    deterministic: bool
    """Use only algorithms with bitwise reproducible results; may be slower."""
    log_every_steps: int
    """Optimizer steps between log points. On a GPU, the values of a log point are read at the next one, so that the host does not wait for the device."""
    mfu: bool
    """Log the model FLOPs utilisation, on GPUs whose peak rate is known. After the first step the loss function is called once more, with tensors that have shapes but no values."""
    eval_every_steps: int | None
    """Optimizer steps between evaluations; None: after each epoch."""
    eval_every_epochs: int | None
    """Epochs between evaluations, instead of eval_every_steps."""
    sanity_check: Literal["auto", "off"]
    """auto: evaluate one batch before the first step, if the dataset has a length, so that a mistake in the loss or the metrics is found at once."""
    verify_ranks: Literal["weights", "all", "off"]
    """Compare over the ranks at log points: weights; all: weights and optimizer state. Each comparison reads that memory once, without an additional collective. Learning rates are always compared."""
    data: DataConfig | DataSettings
    checkpoint: CheckpointConfig | CheckpointSettings
    parallel: ParallelConfig | ParallelSettings | Literal["ddp", "zero1", "fsdp", "tensor", "pipeline", "device_map", "auto"]
    memory: MemoryConfig | MemorySettings
    profile: ProfileConfig | ProfileSettings
