"""A checkpoint that is not whole is not taken for whole, and what is wrong with it is said."""

import json
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from ddp_kit.checkpoint import format as format_module
from ddp_kit.checkpoint.format import (
    FileRecord,
    Hasher,
    Manifest,
    checkpoints,
    examine,
    leftovers,
    manifest_content,
    name_of,
    newest_whole,
    verified,
)
from ddp_kit.errors import CheckpointError


def written_checkpoint(folder: Path, step: int, content: bytes = b"0123456789") -> Path:
    path = folder / name_of(step)
    path.mkdir(parents=True)
    (path / "model.safetensors").write_bytes(content)
    hasher = Hasher()
    hasher.update(content)
    record = FileRecord("model.safetensors", len(content), str(hasher))
    manifest = Manifest(step, "2030-01-02T03:04:05+00:00", False, {"torch": "2.13.0"}, (record,))
    (path / "manifest.json").write_text(manifest.text())
    return path


def flip(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 1
    path.write_bytes(content)


def rewrite(path: Path, **changes: object) -> None:
    content = json.loads((path / "manifest.json").read_text()) | changes
    (path / "manifest.json").write_text(json.dumps(content))


def test_checkpoints_are_listed_newest_first_without_other_names(tmp_path: Path) -> None:
    for step in (9, 123456789, 10):
        written_checkpoint(tmp_path, step)
    for name in ("step-1", "notes", ".writing-step-00000011-aa", "step-00000012.old"):
        (tmp_path / name).mkdir()
    found = checkpoints(tmp_path, hashes=True)
    assert [(one.step, one.problem) for one in found] == [(123456789, None), (10, None), (9, None)]
    assert [path.name for path in leftovers(tmp_path)] == [".writing-step-00000011-aa"]


DAMAGE: dict[str, tuple[Callable[[Path], object], str]] = {
    "no manifest": (lambda path: (path / "manifest.json").unlink(), "incomplete: manifest.json is missing"),
    "half a manifest": (lambda path: os.truncate(path / "manifest.json", 100), "manifest.json is damaged"),
    "empty manifest": (lambda path: os.truncate(path / "manifest.json", 0), "manifest.json is damaged"),
    "another step's": (lambda path: rewrite(path, step=3), "manifest.json is damaged"),
    "a longer list": (lambda path: rewrite(path, files=[]), "manifest.json is damaged"),
    "missing file": (lambda path: (path / "model.safetensors").unlink(), "model.safetensors is missing"),
    "short file": (
        lambda path: os.truncate(path / "model.safetensors", 4),
        "model.safetensors has 4 bytes instead of 10",
    ),
    "a folder": (
        lambda path: ((path / "model.safetensors").unlink(), (path / "model.safetensors").mkdir()),
        "model.safetensors is not a regular file",
    ),
    "newer": (lambda path: rewrite(path, format=3), "in format 3: this version of ddpkit reads format 2"),
    "older": (lambda path: rewrite(path, format=1), "in format 1: this version of ddpkit reads format 2"),
    "not ours": (lambda path: (path / "manifest.json").write_text("{}"), "not a ddpkit checkpoint"),
    "no object": (lambda path: (path / "manifest.json").write_text("[1]"), "not a ddpkit checkpoint"),
    "renamed": (
        lambda path: written_checkpoint(path.parent, 1).replace(path / "x") and _swap(path),
        "manifest.json belongs to",
    ),
}


def _swap(path: Path) -> None:
    (path / "x" / "manifest.json").replace(path / "manifest.json")


@pytest.mark.parametrize("kind", DAMAGE)
def test_newest_whole_skips_a_damaged_checkpoint_and_names_the_problem(kind: str, tmp_path: Path) -> None:
    written_checkpoint(tmp_path, 5)
    damage, said = DAMAGE[kind]
    damage(written_checkpoint(tmp_path, 6))
    choice = newest_whole(tmp_path)
    assert choice.checkpoint is not None
    assert choice.checkpoint.step == 5
    (skipped,) = choice.skipped
    assert said in str(skipped.problem)
    assert skipped.step == (1 if kind == "renamed" else 6)


def test_newest_whole_with_hashes_skips_a_flipped_bit(tmp_path: Path) -> None:
    written_checkpoint(tmp_path, 5)
    flip(written_checkpoint(tmp_path, 6) / "model.safetensors", 3)
    assert newest_whole(tmp_path).checkpoint == replace(examine(tmp_path / name_of(6)))
    choice = newest_whole(tmp_path, hashes=True)
    assert choice.checkpoint == examine(tmp_path / name_of(5))
    assert "its hash differs" in str(choice.skipped[0])
    assert verified(choice.skipped[0]) == choice.skipped[0]


def test_examine_after_any_flipped_bit_of_the_manifest_reports_damage(tmp_path: Path) -> None:
    path = written_checkpoint(tmp_path, 6) / "manifest.json"
    content = path.read_bytes()
    meaning = json.loads(content)
    for position in range(len(content)):
        flip(path, position)
        try:
            harmless = json.loads(path.read_bytes()) == meaning  # of white space
        except ValueError:
            harmless = False
        assert examine(path.parent).whole is harmless, position
        path.write_bytes(content)


def test_examine_refuses_file_names_outside_the_folder(tmp_path: Path) -> None:
    path = written_checkpoint(tmp_path, 6)
    outside = FileRecord("../step-00000006/model.safetensors", 10, "")
    (path / "manifest.json").write_text(Manifest(6, "", False, {}, (outside,)).text())
    assert examine(path).problem == "manifest.json is damaged"


def test_manifest_that_could_not_be_read_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    records = tuple(FileRecord(f"model-{number:05d}.safetensors", 0, str(Hasher())) for number in range(1000))
    manifest = Manifest(6, "", False, {}, records)
    assert manifest_content(manifest) == manifest.text().encode()
    monkeypatch.setattr(format_module, "_LONGEST_MANIFEST", 100_000)
    with pytest.raises(CheckpointError, match=r"step 6 was not saved, .* manifest.json is too long"):
        manifest_content(manifest)


def test_checkpoints_of_a_missing_folder_are_none(tmp_path: Path) -> None:
    assert checkpoints(tmp_path / "runs") == ()
    assert newest_whole(tmp_path / "runs").checkpoint is None


def test_checkpoints_of_a_file_raise_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="is a file, not a folder"):
        checkpoints(tmp_path / "file")
    with pytest.raises(CheckpointError, match="there is no checkpoint at"):
        examine(tmp_path / "nothing")
    with pytest.raises(CheckpointError, match="Not a directory|is a file"):
        checkpoints(tmp_path / "file" / "below")


def test_examine_of_a_file_reports_no_checkpoint(tmp_path: Path) -> None:
    (tmp_path / name_of(7)).touch()
    written_checkpoint(tmp_path, 5)
    assert [str(one.problem) for one in checkpoints(tmp_path)] == ["not a ddpkit checkpoint: it is a file", "None"]
