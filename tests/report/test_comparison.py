"""Where two recorded runs first differ."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from ddp_kit.config.settings import CheckpointConfig, DataConfig, ProfileConfig, TrainerConfig
from ddp_kit.report.command import run as report
from ddp_kit.report.comparison import WITHOUT_EFFECT, Course, course, first_differences
from ddp_kit.report.run_history import RunHistory, read_runs
from ddp_kit.terminal import Terminal
from tests.support.recorded_run import begin, row, write_record

EVERY = 10  # steps between rows


def recorded_row(step: int, samples: str = "s", weights: str = "w", steps: int = EVERY, **fields: Any) -> Any:
    """A row whose checksums depend on the step and on the texts given."""
    checksums = "".join(f"{ord(samples):02x}{number:06}" for number in range(step - steps + 1, step + 1))
    return row(step, samples_checksums=checksums, weights_checksum=f"{weights}{step}", **fields)


def history(folder: Path, rows: Sequence[Any], *attempts: Any) -> RunHistory:
    (run,) = read_runs([write_record(folder, attempts or [begin()], rows)])
    return run


def rows_to(last: int, **fields: Any) -> list[Any]:
    return [recorded_row(step, **fields) for step in range(EVERY, last + 1, EVERY)]


@pytest.mark.parametrize(
    ("old", "new", "found"),
    [
        ({}, {}, Course(0, None)),
        ({1: "a", 2: "b"}, {1: "a", 2: "b", 3: "c"}, Course(2, None)),
        ({1: "a", 3: "b"}, {1: "a", 2: "x", 3: "c"}, Course(1, 3)),
        ({2: "a"}, {2: "b"}, Course(0, 2)),
        ({1: "a"}, {2: "a"}, Course(0, None)),
    ],
)
def test_course_counts_only_steps_that_both_runs_have(old: dict[int, str], new: dict[int, str], found: Course) -> None:
    assert course(old, new) == found
    assert course(new, old) == found


def test_first_differences_of_equal_runs_end_at_the_last_common_row(tmp_path: Path) -> None:
    lines = first_differences(history(tmp_path / "a", rows_to(50)), history(tmp_path / "b", rows_to(30)))
    assert lines[0] == "a and b are equal up to step 30, the last that both have"
    assert lines[1:] == [f"{name}: equal up to step 30" for name in ("samples", "weights", "learning rate", "loss")]


def test_first_differences_name_the_step_of_the_samples(tmp_path: Path) -> None:
    old, new = [*rows_to(20), recorded_row(30)], [*rows_to(20), recorded_row(30, "t", "v", steps=4, loss=7.5)]
    new[-1]["samples_checksums"] = old[-1]["samples_checksums"][: 8 * 6] + new[-1]["samples_checksums"]
    lines = first_differences(history(tmp_path / "a", old), history(tmp_path / "b", new))
    assert lines[:3] == [
        "a and b first differ at step 27: samples",
        "samples: equal up to step 26, different at step 27",
        "weights: equal up to step 20, different at step 30",
    ]
    assert lines[4] == f"loss: equal up to step 20, different at step 30: {old[-1]['loss']} -> 7.5"


def test_first_differences_of_weights_lie_between_two_rows(tmp_path: Path) -> None:
    old, new = rows_to(30), [*rows_to(20), recorded_row(30, weights="v", learning_rate=0.002)]
    lines = first_differences(history(tmp_path / "a", old), history(tmp_path / "b", new))
    assert lines[0] == "a and b first differ in steps 21 to 30: weights, learning rate"
    assert "learning rate: equal up to step 20, different at step 30: 0.001 -> 0.002" in lines
    other = history(tmp_path / "c", rows_to(20, weights="v"))
    assert first_differences(history(tmp_path / "d", old), other)[0] == (
        "d and c differ at their first common log point, step 10: weights"
    )


def test_first_differences_of_several_parameter_groups_show_the_rate_that_differs(tmp_path: Path) -> None:
    old, new = ([recorded_row(10, **{"learning_rate.0": 1e-3, "learning_rate.1": rate})] for rate in (0.1, 0.2))
    lines = first_differences(history(tmp_path / "a", old), history(tmp_path / "b", new))
    assert "learning rate: different at step 10: 0.1 -> 0.2" in lines


def test_first_differences_ignore_the_loss_of_an_interval_that_a_resume_has_shortened(tmp_path: Path) -> None:
    resumed = [*rows_to(10), recorded_row(20, steps=5, loss=3.0, attempt="job.1"), recorded_row(30, attempt="job.1")]
    attempts = begin(), begin("job.1", step=15)
    lines = first_differences(history(tmp_path / "a", rows_to(30)), history(tmp_path / "b", resumed, *attempts))
    assert lines[0] == "a and b are equal up to step 30, the last that both have"
    undisturbed = [*rows_to(10), recorded_row(20, loss=3.0), recorded_row(30)]
    lines = first_differences(history(tmp_path / "c", rows_to(30)), history(tmp_path / "d", undisturbed))
    assert lines[0] == "c and d first differ in steps 11 to 20: loss"


def test_first_differences_use_the_later_of_repeated_rows(tmp_path: Path) -> None:
    repeated = [*rows_to(20, weights="v"), *rows_to(20)]
    lines = first_differences(history(tmp_path / "a", rows_to(20)), history(tmp_path / "b", repeated))
    assert lines[0] == "a and b are equal up to step 20, the last that both have"


def test_first_differences_after_a_resume_include_the_steps_whose_samples_are_unknown(tmp_path: Path) -> None:
    resumed = [*rows_to(10), recorded_row(20, samples="t", steps=5, attempt="job.1")]
    attempts = begin(), begin("job.1", step=15)
    lines = first_differences(history(tmp_path / "a", rows_to(20)), history(tmp_path / "b", resumed, *attempts))
    assert lines[0] == "a and b first differ in steps 11 to 16: samples"
    started_late = history(tmp_path / "c", resumed[1:], begin(step=15))
    lines = first_differences(history(tmp_path / "d", rows_to(20)), started_late)
    assert lines[0] == "d and c differ at the first step whose samples both have, step 16: samples"


def test_first_differences_at_a_log_point_with_other_samples_include_the_steps_since_the_previous_one(
    tmp_path: Path,
) -> None:
    other = [*rows_to(10), recorded_row(20, weights="v")]
    other[1]["samples_checksums"] = f"{other[1]['samples_checksums'][:-1]}f"
    lines = first_differences(history(tmp_path / "a", rows_to(20)), history(tmp_path / "b", other))
    assert lines[0] == "a and b first differ in steps 11 to 20: samples, weights"


def test_first_differences_of_weights_that_are_recorded_in_the_beginning_only_are_not_known(tmp_path: Path) -> None:
    old, new = rows_to(20), rows_to(20)
    del new[1]["weights_checksum"]
    lines = first_differences(history(tmp_path / "a", old), history(tmp_path / "b", new))
    assert lines[0] == "a and b are equal up to step 20, the last that both have, as far as is known"


def test_first_differences_of_records_without_checksums_say_so(tmp_path: Path) -> None:
    old = history(tmp_path / "a", [row(10), row(20)])
    lines = first_differences(old, history(tmp_path / "b", rows_to(20)))
    assert lines[0] == "a and b are equal up to step 20, the last that both have, as far as is known"
    assert lines[1:3] == ["samples: not recorded by a", "weights: not recorded by a"]


def test_first_differences_do_not_compare_weights_that_are_divided_in_other_ways(tmp_path: Path) -> None:
    def recorded(name: str, weights: str, parts: str, **parallel: Any) -> RunHistory:
        rows = rows_to(20)
        for line in rows:
            line["weights_checksum"] = f"{weights}{parts}"
        return history(tmp_path / name, rows, begin(config={"parallel": parallel}))

    whole, two, tensor = recorded("a", "1", ""), recorded("b", "2", "/2", shard=2), recorded("c", "3", "/2", tensor=2)
    line = "weights: not comparable, because the runs divide them in different ways among their ranks"
    for pair in ((whole, two), (two, whole), (two, tensor)):
        lines = first_differences(*pair)
        assert lines[0].endswith("are equal up to step 20, the last that both have, as far as is known")
        assert line in lines
    assert "weights: different at step 10" in first_differences(two, recorded("d", "4", "/2", shard=2))
    assert "weights: different at step 10" in first_differences(whole, recorded("e", "5", "", shard=1))


def test_first_differences_of_runs_without_rows_have_nothing_to_compare(tmp_path: Path) -> None:
    lines = first_differences(history(tmp_path / "a", []), history(tmp_path / "b", rows_to(20)))
    assert lines[0] == "a and b have no log point in common"
    assert lines[-1] == "loss: not recorded by a"


def test_first_differences_list_settings_without_those_that_have_no_effect(tmp_path: Path) -> None:
    def recorded(name: str, lr: float, ranks: int, **settings: Any) -> RunHistory:
        config = {"seed": 0, "log_every_steps": ranks, "checkpoint": {"dir": name, "keep_last": ranks}, **settings}
        facts = {"ranks": ranks, "versions": {"torch": f"2.1{ranks}"}, "host": name, "command": ["train.py", name]}
        optimizer = {"class": "SGD", "lr": lr}
        return history(tmp_path / name, rows_to(20), begin(config=config, optimizer=optimizer, **facts))

    lines = first_differences(recorded("a", 0.1, 1), recorded("b", 0.2, 2, max_grad_norm=1.0))
    assert lines[1:4] == [
        "settings: optimizer.lr: 0.1 -> 0.2",
        "settings: max_grad_norm: not set -> 1.0",
        "versions and machine: ranks: 1 -> 2; versions.torch: 2.11 -> 2.12",
    ]


def test_settings_without_effect_exist() -> None:
    groups = {"checkpoint": CheckpointConfig, "data": DataConfig, "profile": ProfileConfig}
    names = {f"config.{name}" for name in TrainerConfig.model_fields} | {
        f"config.{group}.{name}" for group, model in groups.items() for name in model.model_fields
    }
    assert {*WITHOUT_EFFECT} - names == {"host"}


def test_report_of_two_runs_prints_and_shows_where_they_first_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, weights in (("a", "w"), ("b", "v"), ("c", "w")):
        write_record(tmp_path / name, [begin()], rows_to(20, weights=weights))
    said: list[str] = []
    assert report(["a", "b"], Terminal({}, said.append)) == 0
    summary = "a and b differ at their first common log point, step 10: weights"
    assert said[-2].splitlines()[:2] == [summary, "  samples: equal up to step 20"]
    assert f"<li>{summary}</li>" in Path("report.html").read_text()
    for others in (["a"], ["a", "b", "c"]):
        said.clear()
        assert report(others, Terminal({}, said.append)) == 0
        assert "log point" not in "".join(said)
        assert "Where they first differ" not in Path("report.html").read_text()
