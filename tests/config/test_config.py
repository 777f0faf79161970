"""A configuration is complete, frozen, and names every mistake at once."""

import json
from pathlib import Path
from pydoc import plain, render_doc
from typing import get_args

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ddp_kit import ConfigError, DataConfig, ParallelConfig, TrainerConfig
from ddp_kit.config.settings import AUTO, STRATEGIES, StrategyName, settings_equal_on_all_ranks


def problems_of(**values: object) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        TrainerConfig(**values)
    return caught.value.problems


def test_config_with_five_mistakes_raises_one_error_that_lists_all() -> None:
    problems = problems_of(
        global_batch_sz=64,
        precision="bf15",
        log_every_steps=0,
        data={"num_worker": 2},
        checkpoint={"keep_last": "many"},
    )
    assert sorted(problems) == [
        "checkpoint.keep_last = 'many': must be a whole number; nearest: 2",
        "data.num_worker = 2: there is no such setting; did you mean data.num_workers?",
        "global_batch_sz = 64: there is no such setting; did you mean global_batch_size?",
        "log_every_steps = 0: must be at least 1; nearest: 1",
        'precision = \'bf15\': must be "fp32", "tf32", "bf16", "fp16", "bf16-true" or "fp8"; nearest: \'bf16\'',
    ]


@pytest.mark.parametrize(("called", "ours"), [("float16", "fp16"), ("16-mixed", "fp16"), ("bf16-mixed", "bf16")])
def test_precision_by_another_name_is_refused_with_the_nearest_value(called: str, ours: str) -> None:
    (problem,) = problems_of(precision=called)
    assert problem.endswith(f"nearest: '{ours}'")


def test_true_for_a_number_is_refused() -> None:
    assert problems_of(epochs=True) == ("epochs = True: must be a whole number; nearest: None (off)",)


def test_empty_group_in_a_file_has_the_defaults(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("epochs: 3\ndata:\n")
    assert TrainerConfig.load(tmp_path / "run.yaml") == TrainerConfig(epochs=3)


def test_group_created_alone_raises_config_error() -> None:
    with pytest.raises(ConfigError, match="DataConfig has 1 problem"):
        DataConfig(num_workers=-1)


def test_config_error_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="seed"):
        TrainerConfig(seed=-1)


def test_parallel_as_text_is_the_strategy() -> None:
    assert TrainerConfig(parallel="ddp").parallel == ParallelConfig()


def test_unknown_strategy_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match=r"parallel.strategy = 'dpp': must be \"ddp\" or .*; nearest: 'ddp'"):
        TrainerConfig(parallel="dpp")
    with pytest.raises(ConfigError, match=r"parallel.strategy = \[1\]: must be"):
        TrainerConfig(parallel={"strategy": [1]})


def test_last_epoch_without_limits_is_1() -> None:
    assert TrainerConfig().last_epoch == 1
    assert TrainerConfig(max_steps=5).last_epoch is None
    assert TrainerConfig(epochs=3).last_epoch == 3


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run.yaml", "epochs: 3\ndata:\n  num_workers: 2\n"),
        ("run.toml", "epochs = 3\n[data]\nnum_workers = 2\n"),
        ("run.json", json.dumps({"epochs": 3, "data": {"num_workers": 2}})),
    ],
)
def test_load_from_a_file_applies_overrides(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / name).write_text(text)
    loaded = TrainerConfig.load(
        tmp_path / name, overrides={"data.shuffle": False, "epochs": 5, "data": {"drop_last": True}}
    )
    assert loaded == TrainerConfig(epochs=5, data=DataConfig(num_workers=2, shuffle=False, drop_last=True))


@pytest.mark.parametrize(
    ("name", "text", "found"),
    [
        ("run.yaml", "epochs: [", "not valid YAML"),
        ("run.toml", "epochs = ", "not valid TOML"),
        ("run.json", "[1]", "found a list"),
        ("run.ini", "", "the file extension '.ini'"),
        ("missing.yaml", None, "No such file"),
    ],
)
def test_load_of_an_invalid_file_raises_config_error(tmp_path: Path, name: str, text: str | None, found: str) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=found):
        TrainerConfig.load(tmp_path / name)


def test_config_from_its_own_json_is_equal() -> None:
    config = TrainerConfig(max_steps=7, precision="bf16", data=DataConfig(num_workers="auto"))
    assert TrainerConfig(**config.model_dump(mode="json")) == config


anything = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.lists(st.integers(), max_size=2)
)
names = st.sampled_from([*TrainerConfig.model_fields, "epoch", "batch_size"]) | st.text("abcdxyz_", max_size=8)


@given(values=st.dictionaries(names, anything | st.dictionaries(st.text(max_size=8), anything, max_size=3), max_size=6))
@example({"max_seconds": 1})
@example({"fp8_layers": []})
def test_config_from_random_values_is_accepted_or_lists_problems(values: dict[str, object]) -> None:
    try:
        TrainerConfig(**values)
    except ConfigError as error:
        assert error.problems
        for problem in error.problems:
            name = problem.split(" = ")[0].split(".")[0]
            if any(
                said in problem
                for said in (
                    "set both or neither",
                    "set only one of them",
                    "remove",
                    "needs checkpoint.dir",
                )
            ):
                continue
            assert name in values
            assert any(
                said in problem
                for said in (
                    "nearest",
                    "did you mean",
                    "; use ",
                    "lists the settings",
                    "belongs to the opt",
                    "the launcher",
                    "argument of",
                )
            )


def test_command_line_overrides_file_and_file_overrides_script(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("epochs: 3\nlog_every_steps: 7\ndata:\n  num_workers: 2\n")
    words = ["data.num_workers=4", "--config", str(file), "epochs=5", "max_grad_norm=1e-4"]
    config = TrainerConfig.from_command_line(
        words, data=DataConfig(num_workers=1, shuffle=False), epochs=1, log_every_steps=1, seed=8
    )
    assert config == TrainerConfig(
        epochs=5, log_every_steps=7, seed=8, max_grad_norm=1e-4, data=DataConfig(num_workers=4, shuffle=False)
    )


def test_from_command_line_without_arguments_reads_sys_argv(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["train.py", "epochs=5"])
    assert TrainerConfig.from_command_line(seed=3) == TrainerConfig(epochs=5, seed=3)


@pytest.mark.parametrize(
    ("word", "name", "value"),
    [
        ("checkpoint.dir=2026-01-02", "checkpoint", Path("2026-01-02")),
        ("checkpoint.dir=None", "checkpoint", None),
        ("verify_ranks=off", "verify_ranks", "off"),
        ("parallel.fsdp_units=[encoder, decoder]", "parallel", ("encoder", "decoder")),
        ("parallel.tensor_plan={blocks.*.up: column}", "parallel", {"blocks.*.up": "column"}),
    ],
)
def test_value_on_the_command_line_is_parsed_as_yaml(word: str, name: str, value: object) -> None:
    found = getattr(TrainerConfig.from_command_line([word]), name)
    inner = word.partition("=")[0].partition(".")[2]
    assert (getattr(found, inner) if inner else found) == value


def test_command_line_adds_sizes_to_a_strategy_named_in_the_script() -> None:
    config = TrainerConfig.from_command_line(["parallel.bucket_mb=10"], parallel="zero1")
    assert config == TrainerConfig(parallel={"strategy": "zero1", "bucket_mb": 10})


def test_mistakes_on_the_command_line_are_listed_with_corrections() -> None:
    with pytest.raises(ConfigError) as caught:
        TrainerConfig.from_command_line(["--epochs=3", "fast", "epochs=2", "--config"])
    assert caught.value.problems == (
        "--epochs=3: write a setting as name=value, such as epochs=3",
        "fast: write a setting as name=value, such as data.num_workers=4",
        "--config needs a file, such as --config run.yaml",
    )
    with pytest.raises(ConfigError, match=r"data.num_worker = 3: .*did you mean data.num_workers"):
        TrainerConfig.from_command_line(["data.num_worker=3"])


@given(
    config=st.builds(
        TrainerConfig,
        max_steps=st.none() | st.integers(1, 1 << 60),
        max_grad_norm=st.none() | st.floats(1e-300, 1e300),
        parallel=st.sampled_from(
            ["ddp", "zero1", "fsdp", "auto", {"tensor": 2, "tensor_plan": {"a.*": "row"}}, {"device_map": {"a.0-1": 0}}]
        ),
        checkpoint=st.fixed_dictionaries({"dir": st.none() | st.text("ab\N{SNOWMAN}:# '-", min_size=1).map(Path)}),
    )
)
def test_saved_config_loads_equal(config: TrainerConfig, tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path_factory.getbasetemp() / "saved.yaml"
    config.save(file)
    assert TrainerConfig.load(file) == config


def test_settings_equal_on_all_ranks_omit_those_that_may_differ() -> None:
    here = TrainerConfig(data={"num_workers": 4, "pin_memory": False, "prefetch_batches": 1, "timeout": 9})
    elsewhere = TrainerConfig(data={"timeout": 9})
    assert settings_equal_on_all_ranks(here) == settings_equal_on_all_ranks(elsewhere)
    assert settings_equal_on_all_ranks(here) != settings_equal_on_all_ranks(TrainerConfig())
    names = settings_equal_on_all_ranks(here).keys()
    assert {name.partition(".")[0] for name in names} == TrainerConfig.model_fields.keys()
    assert {"checkpoint.dir", "parallel.strategy", "seed"} < names
    assert "data.num_workers" not in names


def test_help_lists_every_setting_with_its_description() -> None:
    text = " ".join(plain(render_doc(TrainerConfig)).replace("|", " ").split())
    for name, field in TrainerConfig.model_fields.items():
        parts = field.annotation.model_fields.items() if hasattr(field.annotation, "model_fields") else [(name, field)]
        for inner, setting in parts:
            full = name if inner == name else f"{name}.{inner}"
            described = " ".join((setting.description or "").replace("|", " ").split())
            assert described
            assert f"{full} = {setting.default!r} {described}" in text


def test_json_schema_accepts_short_forms() -> None:
    schema = TrainerConfig.model_json_schema()
    assert schema["additionalProperties"] is False
    assert "Settings, with" not in json.dumps(schema)
    named = next(kind for kind in schema["properties"]["parallel"]["anyOf"] if "enum" in kind)
    assert named["enum"] == [*STRATEGIES, AUTO] == list(get_args(StrategyName))
