"""Settings that cannot be combined: each rule is one row of a table, which `TrainerConfig` reads when it is created.

A condition in a row is `name = value`, with several values as `name = one or other`; or only `name`, which means that
the setting does not have its default value. Some rows end with what a Trainer got in addition to its settings, such as
several updates; the Trainer reads these.

What depends on the model, the device or the number of ranks is checked where that is known: `Strategy.check` in
ddp_kit/parallel, `memory/checks.py`, `precision.py`.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from pydantic import BaseModel

from ddp_kit.errors import ConfigError

UPDATES = "several updates"
CLOSURE = "a closure"


class Rule(NamedTuple):
    """A rule about two settings."""

    setting: str
    other: str
    why: str
    """The end of a sentence such as "A is not supported with B, which ..."; may be empty."""
    instead: str


_SAMPLES = "which determines the samples of each step"
_SHARDED = "parallel.strategy = fsdp or tensor or pipeline"
_EVALUATIONS = "which evaluates the loss several times per step"
_OTHERWISE = "use the default of this setting, or another optimizer"

EXCLUDES = (
    # Batches
    Rule("global_batch_size", "data.batch_sampler", _SAMPLES, "set only one of them"),
    Rule("reference_batch_size", "data.batch_sampler", _SAMPLES, "set only one of them"),
    Rule("micro_batch_size = auto", "data.batch_sampler", _SAMPLES, "set micro_batch_size to a number"),
    Rule("data.sampler", "data.batch_sampler", _SAMPLES, "set only one of them"),
    Rule(
        "accumulation_steps",
        "micro_batch_size = auto",
        "which also chooses the accumulation steps",
        "remove accumulation_steps",
    ),
    # Placement
    Rule(
        "compile = model",
        "parallel.pipeline",
        "which runs only a part of the model on each rank",
        "use compile='blocks'",
    ),
    Rule(
        "precision = fp8",
        "parallel.tensor",
        "which splits the layers that fp8 converts",
        "use precision='bf16', or use parallel.shard instead of parallel.tensor",
    ),
    Rule("memory.offload", "parallel.pipeline", "", "remove memory.offload"),
    Rule("parallel.fsdp_units", "parallel.pipeline", "in which each block is a unit", "remove parallel.fsdp_units"),
    Rule(
        "parallel.find_unused_parameters",
        _SHARDED,
        "which needs each trained parameter in each step",
        "remove find_unused_parameters, or use parallel='ddp'",
    ),
    Rule("parallel.compression", _SHARDED, "", "remove compression, or use parallel='ddp'"),
    Rule(
        "verify_ranks = replay",
        f"{_SHARDED} or device_map or auto",
        "because a rank can repeat a pass of another rank only if both hold all weights",
        "use verify_ranks='all', or parallel='ddp' or 'zero1'",
    ),
    Rule(
        "micro_batch_size = auto",
        _SHARDED,
        "because it tries sizes until one does not fit, and if one rank runs out of memory, the other ranks hang in "
        "the collectives of the pass",
        "set micro_batch_size to a number; `ddpkit plan train.py` estimates what fits",
    ),
    # Several updates
    Rule("precision = fp16", UPDATES, "which would share one loss scale", "use precision='bf16'"),
    Rule("micro_batch_size = auto", UPDATES, "", "set micro_batch_size to a number"),
    Rule("memory.offload", UPDATES, "", "remove memory.offload"),
    # A closure
    Rule("precision = fp16", CLOSURE, _EVALUATIONS, _OTHERWISE),
    Rule("non_finite_gradients = skip", CLOSURE, _EVALUATIONS, _OTHERWISE),
    Rule("memory.offload", CLOSURE, _EVALUATIONS, _OTHERWISE),
    Rule("micro_batch_size = auto", CLOSURE, _EVALUATIONS, _OTHERWISE),
    Rule("parallel.strategy", CLOSURE, _EVALUATIONS, _OTHERWISE),
)
"""The setting is not supported with the other one."""

NEEDS = (
    Rule("max_seconds", "checkpoint.dir", "where the run saves at the time limit", 'set checkpoint={"dir": "run"}'),
    Rule("checkpoint.best_mode", "checkpoint.best_metric", "", "set both or neither"),
    Rule("learning_rate_scaling", "reference_batch_size", "", "set both or neither"),
    Rule("reference_batch_size", "learning_rate_scaling", "", "set both or neither"),
    Rule("fp8_layers", "precision = fp8", "", "remove fp8_layers"),
    Rule("bf16_buffers", "precision = bf16-true", "", "remove bf16_buffers"),
    Rule("bf16_inputs", "precision = bf16-true", "", "remove bf16_inputs"),
    Rule(
        "memory.offload = all",
        "parallel.shard",
        "because it offloads only sharded weights",
        "set parallel='fsdp', or use memory.offload='optimizer'",
    ),
    Rule("parallel.strategy = pipeline", "parallel.pipeline", "the number of stages", "set parallel.pipeline"),
)
"""The setting needs the other one."""


def problems(config: BaseModel) -> Iterator[tuple[str, str]]:
    """Yield a message, and what to do instead, for each rule that the settings violate."""
    for rule in EXCLUDES:
        if rule.other not in (UPDATES, CLOSURE) and _holds(config, rule.setting) and _holds(config, rule.other):
            yield _not_supported(config, rule, _setting_with_value(config, rule.other)), rule.instead
    for rule in NEEDS:
        if _holds(config, rule.setting) and not _holds(config, rule.other):
            needed, _, value = rule.other.partition(" = ")
            if value:
                needed += f" = {value!r}, but {_setting_with_value(config, needed)}"
            yield f"{_setting_with_value(config, rule.setting)} needs {needed}{_clause(rule)}", rule.instead


def check_with(config: BaseModel, extra: str, shown: str) -> None:
    """Raise `ConfigError` for a setting that is not supported with something else that the Trainer got.

    `extra`: `UPDATES` or `CLOSURE`. `shown`: its name in the message.
    """
    for rule in EXCLUDES:
        if rule.other == extra and _holds(config, rule.setting):
            raise ConfigError(_not_supported(config, rule, shown), rule.instead)


def _not_supported(config: BaseModel, rule: Rule, other: str) -> str:
    return f"{_setting_with_value(config, rule.setting)} is not supported with {other}{_clause(rule)}"


def _clause(rule: Rule) -> str:
    return rule.why and f", {rule.why}"


def _holds(config: BaseModel, condition: str) -> bool:
    """Whether a condition of a row holds."""
    name, _, values = condition.partition(" = ")
    value, default = _value_and_default(config, name)
    if values:
        return value in values.split(" or ")
    return value is not None if default is None else bool(value != default)


def _setting_with_value(config: BaseModel, condition: str) -> str:
    """The setting of a condition with its value; without it if the value is an object, such as a sampler."""
    name = condition.partition(" = ")[0]
    value, _ = _value_and_default(config, name)
    return f"{name} = {value!r}" if isinstance(value, str | int | float | tuple) else name


def _value_and_default(config: BaseModel, name: str) -> tuple[Any, Any]:
    *groups, last = name.split(".")
    for group in groups:
        config = getattr(config, group)
    return getattr(config, last), type(config).model_fields[last].default
