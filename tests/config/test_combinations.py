"""Every rule about settings that cannot be combined refuses its combination, and only that."""

from typing import Any

import numpy as np
import pytest

from ddp_kit import ConfigError, TrainerConfig
from ddp_kit.config import combinations
from ddp_kit.config.combinations import CLOSURE, EXCLUDES, NEEDS, UPDATES, Rule

VALUES: dict[str, Any] = {
    "accumulation_steps": 2,
    "bf16_buffers": ("table",),
    "bf16_inputs": False,
    "checkpoint.best_metric": "loss",
    "checkpoint.best_mode": "max",
    "checkpoint.dir": "run",
    "data.batch_sampler": [[0, 1]],
    "data.sampler": [0, 1],
    "fp8_layers": ("up",),
    "global_batch_size": 8,
    "learning_rate_scaling": "sqrt",
    "max_seconds": 60,
    "memory.offload": "optimizer",
    "parallel.compression": "bf16",
    "parallel.find_unused_parameters": True,
    "parallel.fsdp_units": ("blocks.*",),
    "parallel.pipeline": 2,
    "parallel.shard": 2,
    "parallel.strategy": "zero1",
    "parallel.tensor": 2,
    "reference_batch_size": 8,
}
"""A value for each setting that a rule names without one."""
BETWEEN_SETTINGS = [rule for rule in EXCLUDES if rule.other not in (UPDATES, CLOSURE)]
WITH_EXTRAS = [rule for rule in EXCLUDES if rule.other in (UPDATES, CLOSURE)]


def problems(*conditions: str) -> tuple[str, ...]:
    """The problems of a configuration in which these conditions hold."""
    words: dict[str, Any] = {}
    for condition in conditions:
        name, _, values = condition.partition(" = ")
        value = values.split(" or ")[0] if values else VALUES[name]
        *group, last = name.split(".")
        (words.setdefault(group[0], {}) if group else words)[last] = value
    try:
        TrainerConfig(**words)
    except ConfigError as error:
        return error.problems
    return ()


def rule_cases(rules: Any) -> Any:
    return pytest.mark.parametrize("rule", [pytest.param(each, id=f"{each.setting}, {each.other}") for each in rules])


@rule_cases(BETWEEN_SETTINGS)
def test_excluding_rule_refuses_both_settings_and_accepts_each_alone(rule: Rule) -> None:
    words = (rule.setting.partition(" = ")[0], f"not supported with {rule.other.partition(' = ')[0]}", rule.instead)

    def refused(*conditions: str) -> bool:
        return any(all(word in problem for word in words) for problem in problems(*conditions))

    assert refused(rule.setting, rule.other)
    assert not refused(rule.setting)
    assert not refused(rule.other)


@rule_cases(NEEDS)
def test_needing_rule_refuses_the_setting_without_the_other(rule: Rule) -> None:
    words = (rule.setting.partition(" = ")[0], f"needs {rule.other.partition(' = ')[0]}", rule.instead)

    def refused(*conditions: str) -> bool:
        return any(all(word in problem for word in words) for problem in problems(*conditions))

    assert refused(rule.setting)
    assert not refused(rule.setting, rule.other)
    assert not refused(rule.other)


@rule_cases(WITH_EXTRAS)
def test_rule_about_updates_or_closures_refuses_the_setting(rule: Rule) -> None:
    name, _, value = rule.setting.partition(" = ")
    *group, last = name.split(".")
    setting = {last: value or VALUES[name]}
    config = TrainerConfig(**({group[0]: setting} if group else setting))
    combinations.check_with(TrainerConfig(), rule.other, "it")
    with pytest.raises(ConfigError, match=f"{name} = .* is not supported with it") as caught:
        combinations.check_with(config, rule.other, "it")
    assert caught.value.hint == rule.instead


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        (
            {"parallel": {"strategy": "fsdp", "find_unused_parameters": True}},
            "parallel.find_unused_parameters = True is not supported with parallel.strategy = 'fsdp', which needs each "
            "trained parameter in each step: remove find_unused_parameters, or use parallel='ddp'",
        ),
        (
            {"parallel": {"pipeline": 2, "compression": "bf16"}},
            "parallel.compression = 'bf16' is not supported with parallel.strategy = 'pipeline': remove "
            "compression, or use parallel='ddp'",
        ),
        (
            {"parallel": {"pipeline": 2, "shard": 2, "fsdp_units": ["blocks.*"]}},
            "parallel.fsdp_units = ('blocks.*',) is not supported with parallel.pipeline = 2, in which each block is a "
            "unit: remove parallel.fsdp_units",
        ),
        (
            {"parallel": {"strategy": "pipeline"}},
            "parallel.strategy = 'pipeline' needs parallel.pipeline, the number of stages: set parallel.pipeline",
        ),
        (
            {"parallel": "fsdp", "micro_batch_size": "auto"},
            "micro_batch_size = 'auto' is not supported with parallel.strategy = 'fsdp', because it tries sizes until "
            "one does not fit, and if one rank runs out of memory, the other ranks hang in the collectives of the "
            "pass: set micro_batch_size to a number; `ddpkit plan train.py` estimates what fits",
        ),
        (
            {"micro_batch_size": "auto", "accumulation_steps": 2},
            "accumulation_steps = 2 is not supported with micro_batch_size = 'auto', which also chooses the "
            "accumulation steps: remove accumulation_steps",
        ),
        (
            {"learning_rate_scaling": "sqrt"},
            "learning_rate_scaling = 'sqrt' needs reference_batch_size: set both or neither",
        ),
    ],
)
def test_config_with_settings_that_cannot_be_combined_says_what_to_do(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TrainerConfig(**settings)
    assert caught.value.problems == (problem,)


def test_config_with_an_array_as_sampler_is_accepted() -> None:
    assert len(TrainerConfig(data={"sampler": np.arange(4)}).data.sampler) == 4


def test_config_with_several_combinations_lists_all_of_them() -> None:
    assert problems("max_seconds", "fp8_layers", "compile = model", "parallel.pipeline") == (
        "compile = 'model' is not supported with parallel.pipeline = 2, which runs only a part of the model on each "
        "rank: use compile='blocks'",
        'max_seconds = 60.0 needs checkpoint.dir, where the run saves at the time limit: set checkpoint={"dir": "run"}',
        "fp8_layers = ('up',) needs precision = 'fp8', but precision = 'fp32': remove fp8_layers",
    )
