"""Rows of comma-separated values, whatever happens to the run."""

import csv
from collections.abc import Callable
from dataclasses import make_dataclass
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

from ddp_kit import ConfigError, CSVLogger, LogRow, Trainer
from ddp_kit.records import StepTimes

Build = Callable[..., Trainer]

TIMES = [f"times.{name}" for name in StepTimes.__dataclass_fields__]
FIELDS = [
    column
    for name in LogRow.__dataclass_fields__
    if name not in ("step", "values", "learning_rates", "mfu", "weights_checksum") and not name.startswith("rank_")
    for column in (TIMES if name == "times" else [name])
]


def read_csv(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        read = list(csv.DictReader(file, restkey="too many", restval="too few"))
    assert not any("too many" in row or "too few" in row.values() for row in read)
    return read


def header(path: Path) -> str:
    return path.read_text().splitlines()[0]


def test_csv_logger_writes_a_row_per_log_point_and_evaluation(
    build: Build, train_data: Any, eval_data: Any, tmp_path: Path
) -> None:
    path = tmp_path / "logs" / "run.csv"
    result = build(CSVLogger(path)).fit(train_data, eval_data)
    written = read_csv(path)
    assert header(path) == ",".join(["event", "step", *FIELDS, "eval_loss", "eval_absolute"])
    assert [(row["event"], row["step"]) for row in written] == [
        ("train", "2"), ("train", "4"), ("eval", "4"), ("train", "6"), ("train", "8"), ("eval", "8"),
    ]  # fmt: skip
    for row, logged in zip((row for row in written if row["event"] == "train"), result.history, strict=True):
        assert [row[name] for name in FIELDS] == [str(attrgetter(name)(logged)) for name in FIELDS]
        assert row["eval_loss"] == ""
    assert float(written[-1]["eval_loss"]) == result.metrics["loss"]
    assert float(written[-1]["eval_absolute"]) == result.metrics["absolute"]
    assert written[-1]["loss"] == ""
    assert list(path.parent.iterdir()) == [path]


def test_csv_logger_of_a_resumed_run_appends_its_rows(
    build: Build, train_data: Any, eval_data: Any, tmp_path: Path
) -> None:
    path = tmp_path / "run.csv"
    build(CSVLogger(path)).fit(train_data, eval_data)
    before = path.read_text()
    build(CSVLogger(path)).fit(train_data, eval_data)
    assert path.read_text().startswith(before)
    assert len(read_csv(path)) == 12


def test_csv_logger_with_new_columns_keeps_the_positions_of_the_old(
    build: Build, train_data: Any, tmp_path: Path
) -> None:
    path = tmp_path / "run.csv"
    path.write_text("event,step,eval_accuracy,loss\neval,4,0.5,\ntrain,6,,0.25\n")
    build(CSVLogger(path)).fit(train_data)
    written = read_csv(path)
    assert header(path).startswith("event,step,eval_accuracy,loss,epoch,")
    assert written[0]["eval_accuracy"] == "0.5"
    assert (written[1]["loss"], written[1]["epoch"]) == ("0.25", "")
    assert float(written[2]["loss"]) > 0


def test_csv_logger_removes_the_unfinished_row_of_a_killed_run(build: Build, train_data: Any, tmp_path: Path) -> None:
    path = tmp_path / "run.csv"
    path.write_text("event,step,loss\ntrain,2,0.5\ntrain,4,0.1")
    build(CSVLogger(path), max_steps=2).fit(train_data)
    assert [(row["step"], row["loss"] == "0.1") for row in read_csv(path)] == [("2", False), ("2", False)]


def test_csv_logger_whose_file_is_deleted_starts_a_new_one(build: Build, train_data: Any, tmp_path: Path) -> None:
    path = tmp_path / "run.csv"
    trainer = build(CSVLogger(path))
    for step in trainer.steps(train_data):
        if step.number == 6:
            path.unlink()
    assert header(path) == ",".join(["event", "step", *FIELDS])
    assert [row["step"] for row in read_csv(path)] == ["8"]


def test_csv_logger_refuses_a_file_that_is_not_a_log(tmp_path: Path) -> None:
    path = tmp_path / "results.csv"
    path.write_text("name,price\napple,1\n")
    with pytest.raises(ConfigError, match="was not written by CSVLogger: its first columns are name, price"):
        CSVLogger(path)
    assert path.read_text() == "name,price\napple,1\n"


def test_csv_logger_flattens_nested_records_into_columns(build: Build, tmp_path: Path) -> None:
    inner = make_dataclass("Part", [("forward", float), ("note", str)])
    outer = make_dataclass("Grown", [("step", int), ("part", inner), ("memory", "int | None")])
    path = tmp_path / "run.csv"
    CSVLogger(path).on_log(build(), outer(3, inner(0.5, 'a "b", c'), None))
    assert read_csv(path) == [
        {"event": "train", "step": "3", "part.forward": "0.5", "part.note": 'a "b", c', "memory": ""}
    ]
