"""Curves as TensorBoard itself reads them."""

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ddp_kit import ConfigError, TensorBoardLogger, Trainer

Build = Callable[..., Trainer]


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """All event files of a folder, by the name of the curve."""
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="needs tensorboard: pip install tensorboard"
    )
    read = accumulator.EventAccumulator(str(folder)).Reload()
    return {name: [(event.step, event.value) for event in read.Scalars(name)] for name in read.Tags()["scalars"]}


@pytest.fixture(autouse=True)
def _tensorboard() -> None:
    pytest.importorskip("tensorboard", reason="needs tensorboard: pip install tensorboard")


def test_tensorboard_logger_writes_a_point_per_log_point_and_evaluation(
    build: Build, train_data: Any, eval_data: Any, tmp_path: Path
) -> None:
    logger = TensorBoardLogger(tmp_path)
    result = build(logger).fit(train_data, eval_data)
    drawn = curves(tmp_path)
    assert {"train/loss", "train/learning_rate", "train/epoch", "eval/loss", "eval/absolute"} <= set(drawn)
    assert drawn["train/loss"] == [(row.step, pytest.approx(row.loss, rel=1e-6)) for row in result.history]
    assert [step for step, _ in drawn["eval/loss"]] == [4, 8]
    assert drawn["eval/absolute"][-1][1] == pytest.approx(result.metrics["absolute"], rel=1e-6)
    assert logger._writer is None
    assert not logger._close.alive


def test_tensorboard_logger_in_a_loop_over_steps_flushes_and_is_closed(
    build: Build, train_data: Any, tmp_path: Path
) -> None:
    logger = TensorBoardLogger(tmp_path)
    for step in build(logger).steps(train_data):
        if step.number == 4:
            assert [step for step, _ in curves(tmp_path)["train/loss"]] == [2, 4]
    assert logger._writer is not None
    close = logger._close
    del logger
    gc.collect()
    assert not close.alive


def test_tensorboard_logger_without_the_package_shows_the_pip_command(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    with pytest.raises(ConfigError, match=r"not installed\n.*pip install tensorboard"):
        TensorBoardLogger(tmp_path)
