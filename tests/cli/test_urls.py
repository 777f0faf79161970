"""A URL where a path on disk is needed is refused in words, and no folder with its name is made."""

from collections.abc import Callable
from pathlib import Path

import pytest

from ddp_kit import ConfigError, CSVLogger, JSONLinesLogger, TensorBoardLogger, TrainerConfig
from ddp_kit.cli.main import main
from ddp_kit.trainer.profile import Recorder

URL = "s3://name:password@bucket/run"


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["report", URL], "the record of a run must be on a disk, but s3://bucket/run is a URL"),
        (["report", ".", "--out", URL], "argument --out: it must be on a disk, but s3://bucket/run is a URL"),
        (["report", ".", "--images", URL], "argument --images: it must be on a disk"),
        (["export", ".", URL], "argument FILE: it must be on a disk"),
        (["launch", "--log-dir", URL, "train.py"], "--log-dir must be on a disk, but s3://bucket/run is a URL"),
        (["launch", "--log-dir", URL, "--dry-run", "train.py"], "--log-dir must be on a disk"),
        (["submit", "--on", "ssh", "--hosts", "one", "--log-dir", URL, "train.py"], "--log-dir must be on a disk"),
        (["checkpoints", URL], "a s3:// URL has a user or a password"),
        (["checkpoints", "hf://bucket/run"], "checkpoints cannot be saved in hf://"),
        (["export", "s3://bucket", "new.safetensors"], "'s3://bucket' is a whole bucket"),
        (["doctor", "--dir", "http://bucket/run"], "checkpoints cannot be saved in http://"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_command(
    words: list[str],
    problem: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()
    assert main(words) == 2
    told = capsys.readouterr().err
    assert problem in told
    assert "password@" not in told
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


@pytest.mark.parametrize(
    ("made", "what"),
    [
        (lambda: TrainerConfig.load(URL), "the file with the settings"),
        (lambda: TrainerConfig.from_command_line(["--config", URL]), "the file with the settings"),
        (lambda: TrainerConfig(global_batch_size=1).save(URL), "the file with the settings"),
        (lambda: Recorder(TrainerConfig(global_batch_size=1, profile={"dir": Path(URL)}).profile, 0), "profile.dir"),
        (lambda: CSVLogger(URL), "the file of CSVLogger"),
        (lambda: JSONLinesLogger(Path(URL)), "the file of JSONLinesLogger"),
        (lambda: TensorBoardLogger(URL), "the folder of TensorBoardLogger"),
    ],
)
def test_path_of_the_trainer(made: Callable[[], object], what: str) -> None:
    with pytest.raises(ConfigError, match=f"^{what} must be on a disk, but s3://bucket/run is a URL") as caught:
        made()
    assert "password" not in str(caught.value)
