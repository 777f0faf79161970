"""URLs of object stores: what is one, and what is refused with which words."""

from pathlib import Path

import pytest

from ddp_kit import TrainerConfig
from ddp_kit.errors import ConfigError
from ddp_kit.storage import urls


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ("s3://bucket/run", "s3://bucket/run"),
        ("S3://bucket/run/", "s3://bucket/run"),
        ("gs://bucket/a/b c", "gs://bucket/a/b c"),
        ("az://container/run@2", "az://container/run@2"),
        ("runs/1", Path("runs/1")),
        (Path("runs/1"), Path("runs/1")),
        ("C:/run", Path("C:/run")),
        ("", Path()),
    ],
)
def test_location_is_a_path_or_a_url(place: str | Path, expected: str | Path) -> None:
    assert urls.location(place) == expected
    assert urls.is_url(place) == isinstance(expected, str)


@pytest.mark.parametrize(
    ("place", "words"),
    [
        ("s3://bucket", "a folder in it"),
        ("s3://bucket/", "a folder in it"),
        ("s3://", "has no bucket"),
        ("s3:///run", "has no bucket"),
        ("s3://bucket//run", "empty component"),
        ("s3://bucket/../run", "empty component"),
        ("s3://bucket/a\nb", "cannot be printed"),
        ("s3://bucket/run?endpoint=x", "query"),
        ("s3://bucket/run#x", "query or a fragment"),
        ("hf://datasets/x", "`ddpkit export`"),
        ("file:///runs/1", "without `file://`"),
        ("https://bucket.s3.amazonaws.com/run", "AWS_ENDPOINT_URL"),
        ("gcs://bucket/run", "write gs://"),
        ("s3n://bucket/run", "did you mean s3://"),
        ("wandb://x/y", "use one of these"),
        (Path("s3://bucket/run"), "lost a slash"),
    ],
)
def test_location_refuses_what_cannot_be_used(place: str | Path, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        urls.location(place)
    assert words in str(refused.value)
    with pytest.raises(ConfigError, match=r"checkpoint\.dir"):
        TrainerConfig(checkpoint={"dir": place})


@pytest.mark.parametrize("scheme", ["s3", "gs", "https", "hf"])
@pytest.mark.parametrize("user", ["key:pass-word@", "key:pass/word@", "pass-word@"])
def test_a_password_in_a_url_is_refused_and_not_shown(scheme: str, user: str) -> None:
    with pytest.raises(ConfigError) as refused:
        TrainerConfig(checkpoint={"dir": f"{scheme}://{user}bucket/run", "resume": f"{scheme}://{user}bucket/step-1"})
    assert "pass" not in str(refused.value).replace("a password", "")
    assert "word" not in str(refused.value).replace("a password", "")


@pytest.mark.parametrize(
    ("url", "run", "place"),
    [
        ("s3://b/run", "s3://b/run", ""),
        ("s3://b/run/step-00000012", "s3://b/run", "step-00000012"),
        ("s3://b/run/set-aside-20260102-1f0c/step-00000012", "s3://b/run", "set-aside-20260102-1f0c/step-00000012"),
        ("s3://b/step-12", "s3://b/step-12", ""),
    ],
)
def test_split_finds_the_run_of_a_checkpoint(url: str, run: str, place: str) -> None:
    assert urls.split(url) == (run, place)


def test_missing_client_is_said_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(urls, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"pip install 'ddpkit\[cloud\]'"):
        urls.check_client()


def test_setting_in_a_rehearsal_is_a_folder_on_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DDPKIT_REHEARSAL", str(tmp_path))
    assert TrainerConfig(checkpoint={"dir": "s3://bucket/run"}).checkpoint.dir == tmp_path / "checkpoints/s3/bucket/run"
