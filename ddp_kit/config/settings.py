"""Settings of a training run: `TrainerConfig` and its parts, frozen and validated on creation.

A single `ConfigError` lists every mistake, each with the field, the value found and the nearest valid value.
"""

import functools
import inspect
import json
import sys
import textwrap
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, ParamSpec, Self, TypeVar, Unpack

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    InstanceOf,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic.fields import FieldInfo
from pydantic.json_schema import SkipJsonSchema
from pydantic_core import ErrorDetails, PydanticCustomError

from ddp_kit import __version__
from ddp_kit.config import combinations
from ddp_kit.env import rank_for_messages, rehearsal_folder
from ddp_kit.errors import ConfigError, nearest
from ddp_kit.masking import masked
from ddp_kit.storage.urls import Location, local_path, location
from ddp_kit.texts import kind_of, plural
from ddp_kit.uncaught import show_without_traceback

if TYPE_CHECKING:
    from ddp_kit.config.types import (
        CheckpointSettings,
        DataSettings,
        MemorySettings,
        ParallelSettings,
        ProfileSettings,
        TrainerSettings,
    )


P = ParamSpec("P")
R = TypeVar("R")
Precision = Literal["fp32", "tf32", "bf16", "fp16", "bf16-true", "fp8"]
STRATEGIES = {
    "ddp": "ddp_kit.parallel.ddp:DdpStrategy",
    "zero1": "ddp_kit.parallel.zero1:Zero1Strategy",
    "fsdp": "ddp_kit.parallel.fsdp:FsdpStrategy",
    "tensor": "ddp_kit.parallel.fsdp:FsdpStrategy",
    "pipeline": "ddp_kit.parallel.pipeline.strategy:PipelineStrategy",
    "device_map": "ddp_kit.parallel.device_map:DeviceMapStrategy",
}
"""Maps the name of each strategy to "module:class". The class is imported when a run uses the strategy."""
AUTO = "auto"
"""Name that the Trainer replaces with the first strategy that fits in memory; see `ddp_kit.memory.choose`."""
StrategyName = Literal["ddp", "zero1", "fsdp", "tensor", "pipeline", "device_map", "auto"]
"""The names of strategies for type checkers and JSON schemas; a test compares them with STRATEGIES and AUTO."""
Compression = Literal["bf16", "fp16"]


def _not_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise PydanticCustomError("int_type", "expected a whole number, not true or false")
    return value


def _not_bool_as_fraction(value: Any) -> Any:
    if isinstance(value, bool):
        raise PydanticCustomError("float_type", "expected a number, not true or false")
    return value


MAY_DIFFER = "may differ between ranks"
"""Mark of a setting that need not be equal on all ranks, because it does not change what a rank computes."""
Count = Annotated[int, BeforeValidator(_not_bool), Field(ge=1)]
Size = Annotated[int, BeforeValidator(_not_bool), Field(ge=-1)]
Function = SkipJsonSchema[Callable[[Any], Any]]
"""Type of a setting that can only be set in Python; its value is not saved, and not compared between ranks."""
Samples = SkipJsonSchema[InstanceOf[Iterable[Any]]]
"""Type of a sampler, which can only be set in Python; its class is compared between ranks with the data."""
PositiveFloat = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Fraction = Annotated[float, BeforeValidator(_not_bool_as_fraction), Field(ge=0, le=1)]


_SETTINGS = "\n\nSettings, with their defaults:\n"


def _group(field: FieldInfo | None) -> type[BaseModel] | None:
    """The class of a group of settings, such as `data`; None for a single setting."""
    kind = getattr(field, "annotation", None)
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _help_lines(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    """Yield help text with the name, default and description of each setting. Nested settings have dotted names."""
    for name, field in model.model_fields.items():
        if group := _group(field):
            yield from _help_lines(group, f"{prefix}{name}.")
        else:
            yield f"  {prefix}{name} = {field.default!r}"
            yield textwrap.fill(field.description or "", 100, initial_indent=" " * 6, subsequent_indent=" " * 6)


def _describe(schema: dict[str, Any], model: type[BaseModel]) -> None:
    """Drop the list of settings from a class's description: each setting has its own description in the JSON schema."""
    schema["description"] = (model.__doc__ or "").partition(_SETTINGS)[0]


class _Settings(BaseModel):
    """The base class of configurations. Instances are frozen, and one `ConfigError` reports all invalid settings."""

    model_config = ConfigDict(frozen=True, extra="forbid", json_schema_extra=_describe)

    @classmethod
    def __pydantic_init_subclass__(cls, **options: Any) -> None:
        """Set the class's docstring and signature for `help()`. pydantic's signature lists the validators too."""
        super().__pydantic_init_subclass__(**options)
        defaults = {name: {} if _group(field) else field.default for name, field in cls.model_fields.items()}
        cls.__signature__ = inspect.Signature(
            [
                inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default)
                for name, default in defaults.items()
            ]
        )
        lines = "\n".join(_help_lines(cls))
        cls.__doc__ = f"{inspect.cleandoc(cls.__doc__ or '')}{_SETTINGS}{lines}\n"

    # Type checkers see the `__init__` of each subclass instead, which has the accepted types of each setting.
    if not TYPE_CHECKING:

        def __init__(self, *unnamed: Any, **values: Any) -> None:
            name = type(self).__name__
            if unnamed:
                show_without_traceback()
                raise ConfigError(
                    f"{name} got {kind_of(unnamed[0])} as a positional argument",
                    f"pass each setting by name, as in {name}({_EXAMPLES[name]}), or a dict as {name}(**settings)",
                )
            try:
                super().__init__(**values)
            except ValidationError as error:
                problems = tuple(_problems(type(self), error.errors()))
                show_without_traceback()
                raise _config_error(name, problems) from None

        def __setattr__(self, name: str, value: Any) -> None:
            show_without_traceback()
            raise ConfigError(
                f"{name} was set on an existing {type(self).__name__}, but a configuration is immutable",
                f"set it when you create the configuration: {type(self).__name__}({name}={value!r}, ...)",
            )


class DataConfig(_Settings):
    """Settings for loading samples, batching them and moving batches to the device."""

    if TYPE_CHECKING:

        def __init__(self, **settings: Unpack[DataSettings]) -> None: ...

    num_workers: Annotated[Annotated[int, Field(ge=0)] | Literal["auto"], MAY_DIFFER] = Field(
        default=0, description='DataLoader workers per rank; "auto": this rank\'s share of the CPU cores, at most 8.'
    )
    pin_memory: Annotated[bool | Literal["auto"], MAY_DIFFER] = Field(
        default="auto",
        description="Put batches in pinned (page-locked) host memory, so that copies to the GPU overlap with "
        'computation; "auto": yes when training on a GPU.',
    )
    prefetch_batches: Annotated[int, Field(ge=0), MAY_DIFFER] = Field(
        default=2, description="Number of micro-batches to copy to the GPU in advance."
    )
    timeout: PositiveFloat | None = Field(
        default=None,
        description="Seconds to wait for a batch from a DataLoader worker before the run fails. None: no limit.",
    )
    shuffle: bool = Field(
        default=True, description="Shuffle the samples in each epoch. The order depends only on (seed, epoch)."
    )
    sampler: Samples | None = Field(
        default=None,
        exclude=True,
        description="Sampler of the training data: an iterable with a length that yields the indices of an epoch over "
        "the whole dataset, as in one process. Each global batch takes the next indices, and is divided among the "
        "ranks. Replaces shuffle. Cannot be set in a configuration file.",
    )
    batch_sampler: Samples | None = Field(
        default=None,
        exclude=True,
        description="Batch sampler of the training data: each of its lists of indices is one global batch, which is "
        "divided among the ranks. Excludes global_batch_size. Cannot be set in a configuration file.",
    )
    drop_last: bool = Field(
        default=False,
        description="Skip the last global batch of an epoch if it is incomplete. False: train on it, and average over "
        "the samples that it has.",
    )
    compare_items: Annotated[int, Field(ge=0)] = Field(
        default=8,
        description="Number of samples that the ranks compare when a dataset is first used, to detect different data; "
        "0: none.",
    )
    seed_samples: bool = Field(
        default=False,
        description="Seed each sample's random augmentation from (seed, epoch, sample), so that it does not depend on "
        "the number of ranks or workers, and is the same after a resume.",
    )
    collate_fn: Function | None = Field(
        default=None,
        exclude=True,
        description="Function that collates a list of samples into a batch; None: torch's default_collate. Cannot be "
        "set in a configuration file.",
    )
    device_transform: Function | None = Field(
        default=None,
        exclude=True,
        description="Function that transforms a training batch on the device; on a GPU it runs concurrently with the "
        "previous step. Its random numbers depend on seed, epoch, step and rank. With seed_samples, the function is "
        "called separately for each sample, as a batch of size 1, and its random numbers depend on (seed, epoch, "
        "sample).",
    )
    eval_device_transform: Function | None = Field(
        default=None,
        exclude=True,
        description="Like device_transform, but for evaluation and prediction batches.",
    )


def _checked_place(place: Any) -> Any:
    """A path, or a URL as text. Raises `ValueError` for anything else, and for a URL that cannot be used."""
    if not isinstance(place, (str, Path)):
        raise ValueError('pass a path or a URL, such as "runs/1" or "s3://bucket/run"')
    try:
        return location(place)
    except ConfigError as error:
        raise ValueError(f"{error.message}; {error.hint}") from None


Place = Annotated[Path | str, BeforeValidator(_checked_place)]
"""A folder: a path, or a URL in object storage."""


class CheckpointConfig(_Settings):
    """Settings for checkpoints of a run: when and where they are saved, and how a run resumes."""

    if TYPE_CHECKING:

        def __init__(self, **settings: Unpack[CheckpointSettings]) -> None: ...

    dir: Place | None = Field(
        default=None,
        description="Folder for checkpoints: a path, or a URL in object storage such as s3://bucket/run; None: no "
        "checkpoints are saved.",
    )
    every_steps: Count | None = Field(default=None, description="Optimizer steps between saves.")
    every_seconds: PositiveFloat | None = Field(default=None, description="Seconds between saves, measured on rank 0.")
    memory_seconds: PositiveFloat | None = Field(
        default=1.0,
        description="Least number of seconds between copies of the state in memory (/dev/shm), from which a restart by "
        "`ddpkit launch` resumes. Copies take at most 0.5 % of the time. None: no copies. Only with `dir`.",
    )
    keep_last: Count = Field(default=2, description="Number of complete checkpoints to keep.")
    best_metric: str | None = Field(
        default=None,
        description='Name of a metric, or "loss": save a checkpoint after each evaluation with the best value so far, '
        "and keep the best checkpoint in addition to the newest ones.",
    )
    best_mode: Literal["min", "max"] = Field(
        default="min", description="Whether lower or higher values of best_metric are better."
    )
    trainable_only: bool = Field(
        default=False,
        description="Save only buffers and the parameters that require gradients. On resume, frozen parameters are "
        "taken from the script's model, and must be the same as at the start of the run.",
    )
    save: Literal["blocking", "background", "overlapped"] = Field(
        default="background",
        description="How training continues during a save. blocking: after the checkpoint is on disk; background: "
        "after the state is copied to host memory, while a separate process writes it; overlapped: at once, while a "
        "thread copies weights and optimizer state until the next `optimizer.step()`. Use overlapped only if nothing "
        "but `optimizer.step()` modifies weights and optimizer state. Other modifications raise an error if torch "
        "detects them; torch cannot detect writes through `.data`, NumPy views or custom kernels.",
    )
    resume: Literal["auto"] | Place | None = Field(
        default="auto",
        description='Checkpoint to resume from: a path or URL; "auto": the newest complete one in `dir`, if any; '
        "None: do not resume.",
    )

    @field_validator("dir")
    @classmethod
    def _in_folder_of_rehearsal(cls, folder: Location | None) -> Location | None:
        """In a rehearsal (`ddpkit rehearse`), checkpoints are saved in a folder of this run alone."""
        rehearsal = rehearsal_folder()
        if rehearsal is None or folder is None:
            return folder
        if isinstance(folder, str):
            return rehearsal.joinpath("checkpoints", folder.replace("://", "/"))
        if folder.is_relative_to(rehearsal):
            return folder
        return rehearsal.joinpath("checkpoints", *folder.absolute().parts[1:])


_IMPLIED: Mapping[str, Callable[[Mapping[str, Any]], bool]] = {
    "pipeline": lambda values: values.get("pipeline", 1) != 1,
    "tensor": lambda values: values.get("tensor", 1) != 1,
    "fsdp": lambda values: values.get("shard", 1) != 1,
    "device_map": lambda values: values.get("device_map") is not None,
}
"""For each strategy, a function that returns whether the settings imply the strategy. The first match counts."""


class ParallelConfig(_Settings):
    """Settings for distributing the model over the ranks."""

    if TYPE_CHECKING:

        def __init__(self, **settings: Unpack[ParallelSettings]) -> None: ...

    strategy: str = Field(
        default="ddp",
        description="ddp: a whole replica on every rank; zero1: the same with the optimizer state sharded; fsdp: "
        "weights, gradients and optimizer state sharded; auto: the first of these that fits in memory, with activation "
        "checkpointing and tensor parallelism if needed. Alternatively, set the sizes below, whose product is the "
        "number of ranks.",
    )
    replicate: Size = Field(
        default=-1,
        description="Number of replicas of the whole model; -1: the number of ranks divided by the product of the "
        "other sizes.",
    )
    shard: Size = Field(
        default=1,
        description="Number of ranks over which weights, gradients and optimizer state are sharded (FSDP2); in a "
        "pipeline, only the blocks are sharded.",
    )
    tensor: Count = Field(
        default=1, description="Number of ranks over which each layer of `tensor_plan` is split (tensor parallelism)."
    )
    pipeline: Count = Field(
        default=1, description="Number of ranks over which the model's blocks are split (pipeline stages)."
    )
    pipeline_stages: Literal["auto"] | tuple[str, ...] = Field(
        default="auto",
        description='Names of the modules at which stages begin; "auto": divide the repeated blocks into stages with '
        "similar numbers of weights.",
    )
    pipeline_schedule: Literal["1f1b", "gpipe"] = Field(
        default="1f1b",
        description="Order of the forward and backward passes in a step. 1f1b: each backward pass as soon as possible, "
        "which keeps fewer activations; gpipe: all forward passes, then all backward passes.",
    )
    fsdp_units: Literal["auto"] | tuple[str, ...] = Field(
        default="auto",
        description='FSDP: names of the modules whose weights are gathered together; "auto": the repeated blocks.',
    )
    tensor_plan: Literal["auto"] | dict[str, Literal["column", "row", "sequence"]] = Field(
        default="auto",
        description='How tensor parallelism splits layers: names or patterns such as {"blocks.*.up": "column", '
        '"blocks.*.down": "row"}; "auto": the plan that the model defines.',
    )
    reshard_after_forward: Literal["auto"] | bool = Field(
        default="auto",
        description='FSDP: free gathered weights after the forward pass; "auto": yes, except for the root module and, '
        "in a pipeline, for stages whose blocks take at most an eighth of the rank's memory.",
    )
    device_map: Literal["auto"] | dict[str, int] | None = Field(
        default=None,
        description="Placement of one model's layers on several devices: a dict from module names, or ranges such as "
        '`blocks.0-11`, to the numbers of the rank\'s devices; "auto": divide the repeated blocks into parts with '
        "similar numbers of weights; None: off.",
    )
    find_unused_parameters: bool = Field(
        default=False,
        description="Needed for models that do not use every parameter in every step; costs a graph traversal per "
        "step.",
    )
    bucket_mb: PositiveFloat = Field(
        default=25.0, description="Size of a gradient bucket in MiB; the gradients in a bucket are reduced together."
    )
    compression: Compression | None = Field(
        default=None,
        description="Compression of gradients for communication: bf16 or fp16, half the bytes; None: off.",
    )
    share_gpus: bool = Field(
        default=False,
        description="Allow several ranks per GPU, to test with more ranks than GPUs. Collectives then go through host "
        "memory (gloo, not NCCL), which is slow.",
    )

    @model_validator(mode="before")
    @classmethod
    def _sizes_name_the_strategy(cls, values: Any) -> Any:
        """Fill in the sizes that a strategy implies, or the strategy that the sizes imply."""
        if not isinstance(values, Mapping):
            return values
        values = dict(values)
        named = values.get("strategy")
        implied = next((name for name, has in _IMPLIED.items() if has(values)), None)
        if named is None and implied is not None:
            values["strategy"] = implied
        if values.get("strategy") == "fsdp":
            values.setdefault("shard", -1 if values.get("replicate", 1) != -1 else 1)
            values.setdefault("replicate", 1 if values["shard"] == -1 else -1)
        if values.get("strategy") == "device_map" and values.get("device_map") is None:
            values["device_map"] = "auto"
        return values

    @model_validator(mode="after")
    def _sizes_fit_together(self) -> Self:
        if 0 in (self.replicate, self.shard):
            raise ValueError("replicate and shard are numbers of ranks: 1 or more, or -1 for the remaining ranks")
        if self.replicate == self.shard == -1:
            raise ValueError(
                "replicate = -1 and shard = -1: only one of the two can be -1, which means all remaining ranks"
            )
        needed = next((name for name, has in _IMPLIED.items() if has(dict(self))), None)
        if needed is not None and self.strategy != needed and not (needed == "tensor" and self.strategy == "fsdp"):
            raise ValueError(f"strategy = {self.strategy!r} contradicts the other settings, which need {needed!r}")
        if self.device_map is not None and self.strategy != "device_map":
            raise ValueError(
                f"device_map contradicts the other settings, which need strategy = {self.strategy!r}: remove either "
                "device_map or those settings"
            )
        return self

    @field_validator("device_map", mode="before")
    @classmethod
    def _devices_of_modules(cls, value: Any) -> Any:
        if not isinstance(value, Mapping):
            return value
        devices = dict(_flattened(value))
        if not devices or any(type(index) is not int or index < 0 for index in devices.values()):
            raise ValueError('map module names to device numbers, counted from 0: {"embed": 0, "blocks.0-11": 1}')
        return devices

    @field_validator("tensor_plan", mode="before")
    @classmethod
    def _plan_of_modules(cls, value: Any) -> Any:
        return dict(_flattened(value)) if isinstance(value, Mapping) else value

    @field_validator("strategy", mode="before", json_schema_input_type=StrategyName)
    @classmethod
    def _known_strategy(cls, strategy: Any) -> Any:
        """Reject an unknown strategy with the same error as a `Literal` field has, which lists the allowed values."""
        known = (*STRATEGIES, AUTO)
        if not isinstance(strategy, str) or strategy not in known:
            raise PydanticCustomError("literal_error", "unknown", {"expected": " or ".join(map(repr, known))})
        return strategy


class MemoryConfig(_Settings):
    """Settings that save device memory: activation checkpointing and compression, and offloading to host memory."""

    if TYPE_CHECKING:

        def __init__(self, **settings: Unpack[MemorySettings]) -> None: ...

    activation_checkpointing: Literal["blocks", "ops"] | Fraction | None = Field(
        default=None,
        description="Activation checkpointing, which does not change results. blocks: the backward pass recomputes "
        "each repeated block from its input; a number from 0 to 1: only this fraction of the blocks is recomputed; "
        "ops: keep the outputs of attention and of every second matrix product of a block, and recompute the rest; "
        "None: off.",
    )
    offload_activations: bool = Field(
        default=False,
        description="Keep activations of 1 MiB or more in pinned host memory until the backward pass. This does not "
        "change results. When training on the CPU, activations are copied without saving memory.",
    )
    activation_bits: Literal[8] | None = Field(
        default=None,
        description="8: keep floating-point activations of 64 KiB or more as 8-bit integers. The loss is the same; "
        "gradients are approximate. None: off.",
    )
    offload: Literal["optimizer", "all"] | None = Field(
        default=None,
        description="What to keep in host memory; the optimizer step then runs on the CPU. optimizer: the optimizer "
        "state; the step uses pinned copies of the weights that this rank updates, and of their gradients; all, with "
        "FSDP: also the sharded weights and gradients, pinned, between uses; None: off.",
    )


class ProfileConfig(_Settings):
    """Settings for profiling: which optimizer steps torch.profiler records, and on which ranks."""

    if TYPE_CHECKING:

        def __init__(self, **settings: Unpack[ProfileSettings]) -> None: ...

    steps: tuple[Count, Count] | None = Field(
        default=None, description="The first and the last optimizer step to record, counted from 1; None: off."
    )
    ranks: tuple[Annotated[int, Field(ge=0)], ...] | None = Field(
        default=(0,), description="The ranks that record; None: all."
    )
    dir: Path = Field(
        default=Path("profile"),
        description="Folder for traces, and memory snapshots that are taken when a GPU runs out of memory.",
    )

    @field_validator("steps")
    @classmethod
    def _in_order(cls, steps: tuple[int, int] | None) -> tuple[int, int] | None:
        if steps is not None and steps[0] > steps[1]:
            raise ValueError("the first step is greater than the last step")
        return steps


class TrainerConfig(_Settings):
    """Settings of a training run. Batch sizes are numbers of samples.

    Two of `global_batch_size`, `micro_batch_size` and `accumulation_steps` determine the third. If none is set, the
    global batch is 32; if all three are set, they must be consistent with each other and with the number of ranks.
    """

    if TYPE_CHECKING:

        def __init__(self, **settings: Unpack[TrainerSettings]) -> None: ...

    epochs: Count | None = Field(
        default=None, description="Number of passes over the training data; 1 if neither epochs nor max_steps is set."
    )
    max_steps: Count | None = Field(
        default=None,
        description="Maximum number of optimizer steps; if epochs is set too, the run ends at whichever "
        "limit it reaches first.",
    )
    max_seconds: PositiveFloat | None = Field(
        default=None,
        description="Seconds since the job's start after which the run saves a checkpoint and exits with code 75.",
    )
    global_batch_size: Count | None = Field(default=None, description="Samples per optimizer step over all ranks.")
    micro_batch_size: Count | Literal["auto"] | None = Field(
        default=None,
        description='Maximum number of samples in a forward pass of one rank; "auto": as many as fit in memory.',
    )
    accumulation_steps: Count | None = Field(
        default=None, description="Forward and backward passes per optimizer step."
    )
    precision: Precision = Field(default="fp32", description="Numeric precision of the forward and backward passes.")
    fp8_layers: Literal["auto"] | tuple[str, ...] = Field(
        default="auto",
        description='Linear layers that precision="fp8" computes in float8, as names or patterns such as '
        '"blocks.*.up"; "auto": layers in the repeated blocks that are large enough to become faster.',
    )
    bf16_buffers: tuple[str, ...] = Field(
        default=(),
        description='Buffers that precision="bf16-true" converts, as names or patterns such as "*.table". Other '
        "buffers keep their dtype, except buffers of torch's own modules, which are converted like the weights.",
    )
    bf16_inputs: bool = Field(
        default=True,
        description='Whether precision="bf16-true" converts the floating-point tensors of a batch to bfloat16.',
    )
    max_grad_norm: PositiveFloat | None = Field(
        default=None, description="Clip the global gradient norm to this value; None: off."
    )
    max_grad_value: PositiveFloat | None = Field(
        default=None, description="Clip each gradient value to this absolute value; None: off."
    )
    non_finite_gradients: Literal["stop", "skip"] = Field(
        default="stop",
        description="If a loss or gradient is NaN or infinite: stop the run with an error, or skip the step.",
    )
    warmup_steps: Annotated[int, BeforeValidator(_not_bool), Field(ge=0)] = Field(
        default=0,
        description="Optimizer steps in which the learning rate rises linearly to the scheduler's initial rate.",
    )
    learning_rate_scaling: Literal["linear", "sqrt"] | None = Field(
        default=None,
        description="Multiply the learning rate by global_batch_size / reference_batch_size, or by the square root of "
        "this ratio.",
    )
    reference_batch_size: Count | None = Field(
        default=None, description="The global batch size that the optimizer's learning rate was chosen for."
    )
    compile: Literal["model", "blocks"] | None = Field(
        default=None,
        description="Apply torch.compile to the whole model, or to each of its repeated blocks; None: off.",
    )
    seed: Annotated[int, Field(ge=0, lt=2**31)] = Field(
        default=0, description="Seed of the data order and all random states."
    )
    deterministic: bool = Field(
        default=False, description="Use only algorithms with bitwise reproducible results; may be slower."
    )
    log_every_steps: Count = Field(
        default=10,
        description="Optimizer steps between log points. On a GPU, the values of a log point are read at the next log "
        "point, so that the host does not wait for the device; with 1, it waits for the loss of each pass, and the "
        "error for a loss that is not finite names its cause.",
    )
    mfu: bool = Field(
        default=False,
        description="Log the model FLOPs utilisation, on GPUs whose peak rate is known. The FLOPs are "
        "counted in the first step.",
    )
    eval_every_steps: Count | None = Field(
        default=None, description="Optimizer steps between evaluations; None: see eval_every_epochs."
    )
    eval_every_epochs: Count = Field(
        default=1, description="Epochs between evaluations; not used if eval_every_steps is set."
    )
    sanity_check: Literal["auto", "off"] = Field(
        default="auto",
        description="auto: if the dataset has a length, evaluate one batch before the first step, so that a mistake "
        "in the loss or the metrics is found at once.",
    )
    verify_ranks: Literal["weights", "all", "replay", "off"] = Field(
        default="weights",
        description="What the ranks compare at each log point. weights: the model's weights; all: weights and "
        "optimizer state. A comparison reads these tensors once, and needs no additional collective. replay: the "
        "weights, and at most every 500 steps also gradients, to find a device that computes wrong numbers: each rank "
        "repeats a micro-batch of another rank. Learning rates are always compared. The record of the run has the "
        "checksum of the weights, unless this is off.",
    )
    data: DataConfig = DataConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    parallel: ParallelConfig = ParallelConfig()
    memory: MemoryConfig = MemoryConfig()
    profile: ProfileConfig = ProfileConfig()

    @model_validator(mode="after")
    def _check_combinations(self) -> Self:
        """Raise `ConfigError` for settings that cannot be combined."""
        problems = tuple(f"{message}: {instead}" for message, instead in combinations.problems(self))
        if problems:
            raise _config_error("TrainerConfig", problems)
        return self

    @field_validator("data", "checkpoint", "parallel", "memory", "profile", mode="before")
    @classmethod
    def _empty_group(cls, value: Any) -> Any:
        return {} if value is None else value  # a YAML file may have `data:` with nothing below it

    @field_validator("verify_ranks", "sanity_check", mode="before")
    @classmethod
    def _off_in_yaml(cls, value: Any) -> Any:
        return "off" if value is False else value  # YAML reads `off` as false

    @field_validator("parallel", mode="before", json_schema_input_type=ParallelConfig | StrategyName)
    @classmethod
    def _strategy_by_name(cls, value: Any) -> Any:
        return {"strategy": value} if isinstance(value, str) else value

    @property
    def last_epoch(self) -> int | None:
        """The number of epochs after which a run ends; None if only max_steps limits it."""
        return 1 if self.epochs is None and self.max_steps is None else self.epochs

    @classmethod
    def load(cls, path: str | Path, overrides: Mapping[str, Any] | None = None) -> Self:
        """Create a configuration from a YAML, TOML or JSON file.

        Args:
            path: The file. Its extension (.yaml, .yml, .toml or .json) determines the format.
            overrides: Settings that take precedence over the file. Nested settings have dotted names, as in
                `{"data.shuffle": False}`.

        Raises:
            ConfigError: If the file cannot be read or a setting is invalid.
        """
        values: dict[str, Any] = {}
        _read_into(values, path)
        for name, value in (overrides or {}).items():
            _set_nested(values, name, value)
        return cls(**values)

    @classmethod
    def from_command_line(cls, words: Sequence[str] | None = None, **defaults: "Unpack[TrainerSettings]") -> Self:
        """Create a configuration from command-line arguments such as `--config FILE` and `data.num_workers=4`.

        Values are parsed as YAML. Settings on the command line take precedence over the file, and the file takes
        precedence over `defaults`.

        Args:
            words: The command-line arguments; None: `sys.argv[1:]`. A script that has its own options should pass the
                remaining arguments, which `argparse.ArgumentParser.parse_known_args` returns.
            **defaults: Settings by name, as for the class itself.

        Raises:
            ConfigError: If an argument is neither `--config FILE` nor `name=value`, if a file cannot be read, or if a
                setting is invalid.
        """
        files, settings, problems = _parse_words(sys.argv[1:] if words is None else words)
        if problems:
            show_without_traceback()
            raise _config_error("the command line", tuple(problems))
        values: dict[str, Any] = dict(defaults)
        for file in files:
            _read_into(values, file)
        for name, value in settings:
            _set_nested(values, name, value)
        return cls(**values)

    def save(self, path: str | Path) -> None:
        """Write the settings to a YAML file, which `load` can read. Functions such as `data.collate_fn` are left out.

        Args:
            path: The file, which is overwritten.

        Raises:
            OSError: If the file cannot be written.
        """
        absolute(path, "the file with the settings").write_text(as_yaml(self), encoding="utf-8")


def as_yaml(config: TrainerConfig) -> str:
    """The content of the file that `TrainerConfig.save` writes."""
    settings = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False, allow_unicode=True)
    return f"# TrainerConfig of ddpkit {__version__}\n{settings}"


def settings_equal_on_all_ranks(config: TrainerConfig) -> dict[str, Any]:
    """The settings that must be equal on all ranks, by dotted name: those without the mark `MAY_DIFFER`."""

    def unmarked(model: type[BaseModel], values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
        for name, field in model.model_fields.items():
            if group := _group(field):
                yield from unmarked(group, values[name], f"{prefix}{name}.")
            elif MAY_DIFFER not in field.metadata and not field.exclude:
                yield f"{prefix}{name}", values[name]

    return dict(unmarked(TrainerConfig, config.model_dump(mode="json")))


def absolute_location(place: str | Path) -> Location:
    """A folder as an absolute path, or its checked URL. Raises `ConfigError`."""
    found = location(place)
    return found if isinstance(found, str) else absolute(found)


def absolute(path: str | Path, what: str = "the file or folder") -> Path:
    """The absolute path, with `~` expanded. `what`: the file or folder, for the message.

    Raises `ConfigError` for a URL, or if the home folder is unknown.
    """
    try:
        return local_path(path, what).expanduser().absolute()
    except RuntimeError as error:
        raise ConfigError(f"cannot expand '~' in the path {str(path)!r}: {error}", "pass an absolute path") from None


def _read(path: Path) -> dict[str, Any]:
    parsers: dict[str, Callable[[str], Any]] = {
        ".yaml": yaml.safe_load,
        ".yml": yaml.safe_load,
        ".toml": tomllib.loads,
        ".json": json.loads,
    }
    try:
        parse = parsers[path.suffix.lower()]
        values = parse(path.read_text(encoding="utf-8"))
    except KeyError:
        problem = f"the file extension {path.suffix!r} is not one of {', '.join(parsers)}"
    except OSError as error:
        problem = error.strerror or str(error)
    except (yaml.YAMLError, ValueError) as error:
        problem = f"not valid {path.suffix.lstrip('.').upper()}: {error}"
    else:
        if values is None:
            return {}
        if isinstance(values, dict) and all(isinstance(name, str) for name in values):
            return values
        problem = f"expected a mapping of settings at the top level, but found {kind_of(values)}"
    show_without_traceback()
    raise ConfigError(f"cannot read the configuration {path}: {problem}", "check the path and the file") from None


def _set_nested(values: dict[str, Any], name: str, value: Any) -> None:
    """Set the value of a dotted name such as `a.b` in nested dicts; a value that is itself a mapping is merged."""
    if isinstance(value, Mapping):
        for inner, inner_value in value.items():
            _set_nested(values, f"{name}.{inner}", inner_value)
        return
    *groups, last = name.split(".")
    for group in groups:
        values[group] = _as_table(group, values.get(group))
        values = values[group]
    values[last] = value


def _as_table(name: str, value: Any) -> dict[str, Any]:
    """Convert the value of a group of settings, such as `parallel`, to a dict; an invalid value becomes {}."""
    if name == "parallel" and isinstance(value, str):
        return {"strategy": value}
    if isinstance(value, BaseModel):
        return value.model_dump(exclude_unset=True)
    return dict(value) if isinstance(value, Mapping) else {}


def _read_into(values: dict[str, Any], path: str | Path) -> None:
    for name, value in _read(absolute(path, "the file with the settings")).items():
        _set_nested(values, name, value)


def _parse_words(words: Sequence[str]) -> tuple[list[str], list[tuple[str, Any]], list[str]]:
    """The configuration files, the settings and the problems found in a command line."""
    files: list[str] = []
    settings: list[tuple[str, Any]] = []
    problems: list[str] = []
    rest = iter(words)
    for word in rest:
        name, given, text = word.partition("=")
        if name == "--config":
            file = text if given else next(rest, "")
            files.append(file)
            if not file:
                problems.append("--config needs a file, such as --config run.yaml")
        elif not given or not name or name.startswith("-"):
            right = f"{name.lstrip('-')}={text}" if given and name.lstrip("-") else "data.num_workers=4"
            problems.append(f"{word}: write a setting as name=value, such as {right}")
        else:
            settings.append((name, _parsed(text)))
    return files, settings, problems


def _parsed(text: str) -> Any:
    """Parse a value as YAML, except that dates remain text, and the text `None` means null."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    if isinstance(value, date):
        return text
    return None if value == "None" else value


def _flattened(table: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted name, value) for each setting in nested dicts: the inverse of `_set_nested`."""
    for name, value in table.items():
        if isinstance(value, Mapping):
            yield from _flattened(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


# --- Error messages ---------------------------------------------------------------------------------------------------


def _config_error(owner: str, problems: tuple[str, ...]) -> ConfigError:
    them = "it" if len(problems) == 1 else "them"
    return ConfigError(
        f"{owner} has {plural(len(problems), 'problem')}:",
        f"correct {them} and start again; training has not started",
        problems,
    )


def _problems(owner: type[BaseModel], errors: list[ErrorDetails]) -> Iterator[str]:
    """Yield one sentence for each mistake: the field, its value, what is allowed, and the nearest valid value."""
    seen = set()
    for error in errors:
        inner = error.get("ctx", {}).get("error")
        if isinstance(inner, ConfigError):  # raised by a group of settings, or by the check of combinations
            group = [*map(str, error["loc"][:1])]
            yield from (".".join([*group, problem]) for problem in inner.problems)
            continue
        # Members of a union report one error each, under the same field: one sentence covers them.
        path = _field_path(owner, error["loc"])
        if path not in seen:
            seen.add(path)
            same = [other for other in errors if _field_path(owner, other["loc"]) == path]
            yield _sentence(owner, path, same)


def _field_path(owner: type[BaseModel], location: tuple[int | str, ...]) -> tuple[str, ...]:
    """The field names in the location of a pydantic error, without the union members that pydantic adds."""
    path: list[str] = []
    model: type[BaseModel] | None = owner
    for step in map(str, location):
        if model is None:
            break
        path.append(step)
        model = _group(model.model_fields.get(step))
    return tuple(path)


def _sentence(owner: type[BaseModel], path: tuple[str, ...], errors: list[ErrorDetails]) -> str:
    name = ".".join(path)
    value = errors[0]["input"]
    raised = [error for error in errors if error["type"] == "value_error"]  # by our own validators
    if not path:  # by a validator of several settings together
        return str(raised[0]["ctx"]["error"])
    if errors[0]["type"] == "extra_forbidden":
        return f"{name} = {value!r}: there is no such setting; {_nearest_setting(path)}"
    if raised:
        return f"{name} = {masked(repr(value))}: {raised[0]['ctx']['error']}"
    if _group(_field(owner, path)):
        return f"{name} = {_short_repr(value)}: this is a group of settings; use {name}={_group_with(name, value)}"
    allowed = list(dict.fromkeys(text for error in errors for text in _allowed(error)))
    return f"{name} = {value!r}: must be {' or '.join(allowed)}; nearest: {_nearest_value(owner, path, errors)}"


def _allowed(error: ErrorDetails) -> Iterator[str]:
    context = error.get("ctx", {})
    limits = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
    if error["type"] == "literal_error":
        yield context["expected"].replace("'", '"')
    elif error["type"].startswith(("int_", "float_", "bool_", "finite_")):
        yield {"int": "a whole number", "bool": "true or false"}.get(error["type"].split("_")[0], "a number")
    elif bounds := [f"{word} {context[key]}" for key, word in limits.items() if key in context]:
        yield " and ".join(bounds)
    elif error["type"] == "path_type":
        yield "a path"
    else:
        yield error["msg"].removeprefix("Input should be ")


# Other libraries' names for the precisions.
_SYNONYMS = {
    **dict.fromkeys(("float32", "32", "32-true", "no", "float", "full"), "fp32"),
    **dict.fromkeys(("bfloat16", "bf16-mixed"), "bf16"),
    **dict.fromkeys(("float16", "half", "16", "16-mixed", "fp16-mixed"), "fp16"),
    "bfloat16-true": "bf16-true",
    **dict.fromkeys(("float8", "transformer-engine"), "fp8"),
}
# A valid example of a setting of each class, for messages.
_EXAMPLES = {
    "TrainerConfig": "epochs=3",
    "DataConfig": "num_workers=4",
    "CheckpointConfig": 'dir="run"',
    "ParallelConfig": 'strategy="fsdp"',
    "MemoryConfig": 'activation_checkpointing="blocks"',
    "ProfileConfig": "steps=(10, 12)",
}
_LONGEST_VALUE = 80


def named_arguments(function: Callable[P, R]) -> Callable[P, R]:
    """A decorator for methods: an unknown keyword argument raises a `ConfigError` that names what to use instead."""
    known = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def checked(*values: P.args, **named: P.kwargs) -> R:
        if unknown := [name for name in named if name not in known]:
            owner = function.__qualname__.removesuffix(".__init__")
            show_without_traceback(rank_for_messages())
            raise ConfigError(
                f"{owner}(...) has {plural(len(unknown), 'problem')}:",
                f"the arguments are {', '.join(known[1:])}; pass settings to the Trainer as config=TrainerConfig(...)",
                tuple(
                    f"{name} = {_short_repr(named[name])}: there is no such argument; "
                    f"{_nearest_argument(name, named[name], known[1:])}"
                    for name in unknown
                ),
            )
        return function(*values, **named)

    return checked


def _nearest_argument(name: str, value: object, known: list[str]) -> str:
    """The replacement for an unknown keyword argument, as text. `known`: the arguments that exist."""
    from ddp_kit.config.other_frameworks import equivalent  # imported only if a name is unknown

    if name in TrainerConfig.model_fields:
        return f"it is a setting: TrainerConfig({name}={_short_repr(value)})"
    if equivalent(name) is None and (close := nearest(name, known)):
        return f"did you mean {close}?"
    return _nearest_setting((name,))


def _nearest_setting(path: tuple[str, ...]) -> str:
    """The replacement for an unknown setting, as text: the setting whose full name or last part is most similar."""
    from ddp_kit.config.other_frameworks import equivalent  # imported only if a name is unknown

    typed = ".".join(path)
    if (known := equivalent(path[-1])) is not None:
        return known
    names = list(_setting_names(TrainerConfig))
    close = nearest(typed, names)
    if close is None:
        by_last = {name.rsplit(".", 1)[-1]: name for name in reversed(names)}
        close = by_last.get(nearest(path[-1], list(by_last)) or "")
    return f"did you mean {close}?" if close else "help(ddp_kit.TrainerConfig) lists the settings"


def _setting_names(model: type[BaseModel], prefix: str = "") -> Iterator[str]:
    for name, field in model.model_fields.items():
        if group := _group(field):
            yield from _setting_names(group, f"{prefix}{name}.")
        else:
            yield prefix + name


def _short_repr(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST_VALUE else kind_of(value)


def _group_with(name: str, value: object) -> str:
    """A correct example for a group of settings that got a single value. If possible, the example uses that value."""
    if name == "parallel":
        return '"fsdp"'
    setting, _, example = _EXAMPLES[f"{name.capitalize()}Config"].partition("=")
    match name, value:
        case "checkpoint", str() | Path():
            example = f'"{value}"'
        case ("data", int()) | ("profile", [_, _]) if value is not True and value is not False:
            example = repr(value)
    return f'{{"{setting}": {example}}}'


def _nearest_value(owner: type[BaseModel], path: tuple[str, ...], errors: list[ErrorDetails]) -> str:
    """A valid value, as close as possible to the invalid value."""
    value = errors[0]["input"]
    for error in errors:
        context = error.get("ctx", {})
        if error["type"] == "literal_error":
            choices = [text.strip("'") for text in context["expected"].replace(" or ", ", ").split(", ")]
            text = str(value).removeprefix("torch.")
            if value is True:
                return repr(choices[0])
            close = _SYNONYMS.get(text.lower()) or nearest(text, choices)
            if close in choices:
                return repr(close)
        if "ge" in context:
            return str(context["ge"])
        if "lt" in context:
            return str(context["lt"] - 1)
        if error["type"] == "int_from_float":
            return str(max(1, round(value)))
    default = _field(owner, path).get_default()
    return "None (off)" if default is None else repr(default)


def _field(owner: type[BaseModel], path: tuple[str, ...]) -> Any:
    *groups, last = path
    for name in groups:
        group = _group(owner.model_fields[name])
        assert group is not None, "only the last name can be a single setting"
        owner = group
    return owner.model_fields[last]
