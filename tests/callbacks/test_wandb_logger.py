"""Runs of Weights & Biases, kept on this machine."""

import json
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ddp_kit import ConfigError, WandbLogger
from ddp_kit.callbacks.rows import require
from tests.support.launching import PROGRAMS, run


def records(file: Path) -> Iterator[Any]:
    """What a file of an offline run holds: records in the log format of LevelDB, after 7 bytes of its own."""
    record = pytest.importorskip("wandb.proto.wandb_internal_pb2").Record
    content, at, whole = file.read_bytes(), 7, b""
    while at + 7 <= len(content):
        left = 32768 - at % 32768  # a block; what is too short for a header at its end is padding
        if left < 7:
            at += left
            continue
        _, size, kind = struct.unpack("<IHB", content[at : at + 7])
        whole += content[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            yield record.FromString(whole)
            whole = b""


@pytest.mark.slow
def test_wandb_logger_records_rows_configuration_and_exit(start: Callable[..., Any], tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="needs wandb: pip install wandb")
    done = start("ddpkit", 2, PROGRAMS / "logged_to_wandb.py")
    assert done.returncode == 0, done.stderr
    files = sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"), key=lambda file: file.stat().st_mtime_ns)
    assert len({file.name for file in files}) == 1  # the id of the run: rank 0's alone, and the same after the end
    found = [record for file in files for record in records(file)]
    rows = [
        {".".join(item.nested_key) or item.key: json.loads(item.value_json) for item in record.history.item}
        for record in found
        if record.HasField("history")
    ]
    drawn = [(row["step"], "train/loss" in row, "eval/loss" in row) for row in rows]
    assert drawn == [(2, True, False), (4, True, False), (4, False, True), (4, False, True)]
    assert rows[0]["train/learning_rate"] == pytest.approx(0.01)
    config = {item.key: json.loads(item.value_json) for item in found_config(found)}
    assert (config["global_batch_size"], config["note"]) == (4, "by hand")
    assert any(record.HasField("exit") for record in found)


def found_config(found: list[Any]) -> Iterator[Any]:
    for record in found:
        yield from record.run.config.update
        yield from record.config.update


def test_wandb_logger_without_the_package_shows_the_pip_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ConfigError, match=r"not installed\n.*pip install wandb"):
        WandbLogger()


def test_require_does_not_take_a_folder_of_runs_for_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "no_such_logger").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"not installed\n.*pip install no_such_logger"):
        require("no_such_logger", "WandbLogger")


LOGGERS = {
    "wandb": "WandbLogger('ours')", "mlflow": "MLflowLogger()", "trackio": "TrackioLogger('ours')",
    "tensorboard": "TensorBoardLogger('ours')",
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("package", LOGGERS)
def test_script_without_the_package_of_a_logger_ends_without_a_traceback(package: str, tmp_path: Path) -> None:
    words = f"import sys; sys.modules[{package!r}] = None; from ddp_kit import *; {LOGGERS[package]}"
    done = run(sys.executable, "-c", words, cwd=tmp_path)
    assert done.returncode == 1
    assert f"the package {package}, which is not installed\n  hint: pip install {package}\n" in done.stderr
    assert "Traceback" not in done.stderr
