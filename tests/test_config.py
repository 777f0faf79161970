"""A configuration is complete, frozen, and names every mistake at once."""

import json
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import ValidationError

from ddp_kit import ConfigError, DataConfig, ParallelConfig, TrainerConfig


def problems_of(**values: object) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        TrainerConfig(**values)
    return caught.value.problems


def test_five_mistakes_give_one_error_that_lists_five_with_what_would_work() -> None:
    problems = problems_of(
        global_batch_sz=64, precision="bf15", log_every=0, data={"num_worker": 2}, checkpoint={"keep_last": "many"}
    )
    assert sorted(problems) == [
        "checkpoint.keep_last = 'many': allowed is a whole number; nearest: 2",
        "data.num_worker = 2: there is no such setting; nearest: data.num_workers",
        "global_batch_sz = 64: there is no such setting; nearest: global_batch_size",
        "log_every = 0: allowed is at least 1; nearest: 1",
        'precision = \'bf15\': allowed is "fp32", "tf32", "bf16", "fp16" or "bf16-true"; nearest: \'bf16\'',
    ]


def test_a_setting_in_the_wrong_part_is_found() -> None:
    assert problems_of(num_workers=4) == ("num_workers = 4: there is no such setting; nearest: data.num_workers",)


def test_what_belongs_to_the_optimizer_is_said_to() -> None:
    assert problems_of(lr=3e-4) == (
        "lr = 0.0003: there is no such setting; it belongs to the optimizer that you give the Trainer",
    )


@pytest.mark.parametrize(("called", "ours"), [("float16", "fp16"), ("16-mixed", "fp16"), ("bf16-mixed", "bf16")])
def test_other_names_of_a_precision_are_understood_as_such(called: str, ours: str) -> None:
    (problem,) = problems_of(precision=called)
    assert problem.endswith(f"nearest: '{ours}'")


def test_true_is_no_number() -> None:
    assert problems_of(epochs=True) == ("epochs = True: allowed is a whole number; nearest: None (off)",)


def test_a_part_left_empty_is_the_default(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text("epochs: 3\ndata:\n")
    assert TrainerConfig.load(tmp_path / "run.yaml") == TrainerConfig(epochs=3)


def test_a_strange_name_gets_the_list_of_settings() -> None:
    (problem,) = problems_of(zzz=1)
    assert "the settings are: epochs, max_steps" in problem


def test_a_limit_of_time_needs_a_place_to_save_in() -> None:
    (problem,) = problems_of(max_seconds=60)
    assert "needs checkpoints" in problem


def test_a_part_alone_speaks_the_same_language() -> None:
    with pytest.raises(ConfigError, match="DataConfig has 1 problem"):
        DataConfig(num_workers=-1)


def test_a_config_error_is_a_value_error() -> None:
    with pytest.raises(ValueError, match="seed"):
        TrainerConfig(seed=-1)


def test_it_is_frozen() -> None:
    with pytest.raises(ValidationError):
        TrainerConfig().epochs = 3  # type: ignore[misc]


def test_the_strategy_may_be_given_by_name_alone() -> None:
    assert TrainerConfig(parallel="ddp").parallel == ParallelConfig()


def test_an_unknown_strategy_is_told_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match=r"parallel.strategy = 'dpp': allowed is \"ddp\" or .*; nearest: 'ddp'"):
        TrainerConfig(parallel="dpp")
    with pytest.raises(ConfigError, match=r"parallel.strategy = \[1\]: allowed is"):
        TrainerConfig(parallel={"strategy": [1]})


def test_without_any_end_one_epoch_is_trained() -> None:
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
def test_it_loads_from_a_file_with_overrides(tmp_path: Path, name: str, text: str) -> None:
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
        ("run.json", "[1]", "found list"),
        ("run.ini", "", "the ending '.ini'"),
        ("missing.yaml", None, "No such file"),
    ],
)
def test_a_file_that_cannot_be_used_is_one_clear_error(tmp_path: Path, name: str, text: str | None, found: str) -> None:
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=found):
        TrainerConfig.load(tmp_path / name)


def test_it_survives_a_round_trip_through_json() -> None:
    config = TrainerConfig(max_steps=7, precision="bf16", data=DataConfig(num_workers="auto"))
    assert TrainerConfig(**config.model_dump(mode="json")) == config


anything = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.lists(st.integers(), max_size=2)
)
names = st.sampled_from([*TrainerConfig.model_fields, "epoch", "batch_size"]) | st.text("abcdxyz_", max_size=8)


@given(values=st.dictionaries(names, anything | st.dictionaries(st.text(max_size=8), anything, max_size=3), max_size=6))
@example({"max_seconds": 1})
def test_whatever_is_given_it_is_accepted_or_every_problem_is_said(values: dict[str, object]) -> None:
    try:
        TrainerConfig(**values)
    except ConfigError as error:
        assert error.problems
        for problem in error.problems:
            name = problem.split(" = ")[0].split(".")[0]
            if any(
                said in problem
                for said in ("need each other", "give one of the two", "leave it out", "needs checkpoints")
            ):
                continue
            assert name in values
            assert any(
                said in problem for said in ("nearest", "the settings are", "not available", "belongs to the opt")
            )


def test_overlap_without_a_writer_in_the_background_is_refused() -> None:
    with pytest.raises(ConfigError, match="overlap = True needs background = True"):
        TrainerConfig(checkpoint={"dir": "run", "overlap": True, "background": False})
