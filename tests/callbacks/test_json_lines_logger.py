"""Rows of JSON that every reader of JSON can read."""

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from ddp_kit import ConfigError, JSONLinesLogger, Trainer

Build = Callable[..., Trainer]


def read_json_lines(path: Path) -> list[dict[str, Any]]:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_json_lines_logger_writes_a_row_per_log_point_and_evaluation(
    build: Build, train_data: Any, eval_data: Any, tmp_path: Path
) -> None:
    path = tmp_path / "logs" / "run.jsonl"
    result = build(JSONLinesLogger(path)).fit(train_data, eval_data)
    written = read_json_lines(path)
    assert [(row["event"], row["step"]) for row in written] == [
        ("train", 2), ("train", 4), ("eval", 4), ("train", 6), ("train", 8), ("eval", 8),
    ]  # fmt: skip
    expected = asdict(result.history[0])
    # None logged; one group; one rank; not known.
    recorded = [name for name in expected if name.startswith("rank_")]
    for name in ("values", "learning_rates", *recorded, "mfu", "weights_checksum"):
        del expected[name]
    expected |= {f"times.{phase}": seconds for phase, seconds in expected.pop("times").items()}
    assert written[0] == {"event": "train"} | expected
    loss, absolute = result.metrics["loss"], result.metrics["absolute"]
    assert written[-1] == {"event": "eval", "step": 8, "eval_loss": loss, "eval_absolute": absolute}


def test_json_lines_logger_writes_nan_and_inf_as_null(build: Build, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    trainer = build()
    JSONLinesLogger(path).on_evaluate(trainer, {"loss": float("nan"), "high": float("inf"), "low": -float("inf")})
    assert read_json_lines(path) == [
        {"event": "eval", "step": 0, "eval_loss": None, "eval_high": None, "eval_low": None}
    ]


def test_json_lines_logger_of_a_resumed_run_appends_its_rows(build: Build, train_data: Any, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    path.write_text('{"event": "train", "step": 1, "loss": 0.5}\n{"event": "train", "st')
    build(JSONLinesLogger(path)).fit(train_data)
    assert [row["step"] for row in read_json_lines(path)] == [1, 2, 4, 6, 8]


def test_json_lines_logger_refuses_a_file_that_is_not_a_log(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("remember the milk\n")
    with pytest.raises(ConfigError, match="was not written by JSONLinesLogger"):
        JSONLinesLogger(path)
