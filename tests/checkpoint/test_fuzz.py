"""Files that somebody has changed, with hashes that agree: an error in words, and nothing else.

Each round changes one file of a checkpoint at random and makes its hashes agree. Loading it must give a state, or raise
a `CheckpointError`: no crash, no other exception, no memory beyond a small multiple of the files' size.
"""

import contextlib
import hashlib
import json
import os
import random
import resource
import sys
import time
from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from ddp_kit import EMA, Trainer, load_model
from ddp_kit.checkpoint.format import MANIFEST, PIECES, STATE, TENSORS, Hasher, checkpoints, name_of
from ddp_kit.checkpoint.reader import load
from ddp_kit.checkpoint.saver import Saver
from ddp_kit.cli.export import run as export
from ddp_kit.errors import CheckpointError, DdpKitError
from ddp_kit.state_values import Piece
from ddp_kit.terminal import Terminal
from tests.support.toys import mean_square, small_network, trainer_for

SECONDS = 10.0
ROOM = 512 << 20
"""Bytes of address space that loading may take: the files have some 20 kB."""
NASTY: list[Any] = [
    None, True, False, -1, 0, 1, 2, 7, 2**31, 2**62, 2**63, 2**70, -(2**63), 0.5, 1e308, "", "x", "O", "|O", "O8",
    "<f8", "<M8[ns]", "|S1", "|V0", "(1000000,1000000)f8", "../x", "/dev/zero", "model", "float64", "qint8",
    "complex64", "meta", "\ud800", "keys", "list", "__class__", "F64", "BOOL", "cuda:7", [], {}, [0], [-1], [2**40,
    2**40], [[]], [["a", "O"]], [["a", "|O"]], {"$scalar": "AAAAAAAAAAA=", "dtype": "|O"}, {"$scalar":
    "QUFBQUFBQUE=", "dtype": [["a", "|O"]]}, {"$tensor": ["model", "weight"], "dtype": "quint8", "shape": [2**60]},
    {"$dict": [[[], 1]]}, {"$tuple": "abc"}, {"$tensor": ["model", "weight"], "dtype": "complex128", "shape": [-1]},
    {"$size": [-5]}, {"$nothing": 1}, {"$ordered": [], "attributes": {"keys": 1}}, {"$default": [], "factory":
    "eval"}, {"$device": "cuda"}, {"$array": ["arrays", "a"], "dtype": "|O", "shape": [3]}, {"$deque": [], "maxlen":
    2**70}, {"$int": "0x"}, {"$array": ["arrays", "a"], "dtype": "<f8", "shape": [2**40]},
]  # fmt: skip
NAMES = ["$tensor", "$scalar", "$ordered", "$array", "$dict", "x", "dtype", "shape"]


def a_state() -> dict[str, Any]:
    """Something of each kind that can be stored."""
    days = np.array(["2020-01-01"], dtype="M8[D]")
    array, bools, text = np.arange(6, dtype=np.int32).reshape(2, 3), np.ones(9, dtype=bool), np.array("ab")
    return {
        "model": OrderedDict(weight=torch.randn(3, 4), mask=torch.ones(5, dtype=torch.bool), c=torch.ones(2) * 1j),
        "arrays": {"a": array, "days": days, "bools": bools, "text": text},
        "kinds": [np.float32(1.5), np.datetime64("2020-01-01"), (1, 2), {3: 4}, Counter("ab")],
        "more": [b"xyz", 1j, float("nan"), 2**80],
        "spread": Piece(torch.ones(2, 3), (2, 3), (0, 0)),
    }


WHOLE = torch.arange(60.0).reshape(6, 10)
WANTED = {
    "box": Piece(WHOLE[1:5, 3:7], (6, 10), (1, 3)),
    "range": Piece(WHOLE.view(-1)[7:33], (6, 10), (7,), flat=True),
    "flags": Piece(WHOLE[0, :4], (10,), (2,)),
}


def pieces_of_writer(writer: int) -> dict[str, Any]:
    """What one of three ranks holds: columns, a range of values, and a part of something that only has 0 and 1."""
    begin, end = [(0, 4), (4, 5), (5, 10)][writer]
    first, last = [(0, 11), (11, 35), (35, 60)][writer]
    model = {
        "box": Piece(WHOLE[:, begin:end], (6, 10), (0, begin)),
        "range": Piece(WHOLE.view(-1)[first:last].bfloat16(), (6, 10), (first,), flat=True),
        "flags": Piece(torch.ones(end - begin, dtype=torch.bool), (10,), (begin,)),
        "same": torch.ones(3),
    }
    return {"model": model}


def saved_in_pieces(folder: Path) -> Path:
    with contextlib.ExitStack() as stack:
        savers = [
            stack.enter_context(Saver(folder, keep_last=1, background=False, writer=writer, writers=3))
            for writer in range(3)
        ]
        token = savers[0].begin(1)
        for writer in (2, 1, 0):
            savers[writer].save(1, pieces_of_writer(writer), token=token)
    return folder / name_of(1)


def digest(content: bytes) -> str:
    hasher = Hasher()
    hasher.update(content)
    return str(hasher)


def agree(folder: Path, manifest: dict[str, Any] | None = None) -> None:
    """Make all hashes and sizes those of what is there; of `manifest`, where it is given, its own alone."""
    path = folder / MANIFEST
    content = json.loads(path.read_text()) if manifest is None else manifest
    content.pop("sha256", None)
    if manifest is None:
        for file in content["files"]:
            there = (folder / file["name"]).read_bytes()
            file |= {"bytes": len(there), "hash": digest(there)}
    own = hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
    path.write_text(json.dumps(content | {"sha256": own}))


class Mutator:
    """Changes one place of nested JSON, or some bytes."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def nested(self, value: Any) -> Any:
        places = [*self._places(value)]
        chosen = self.random.choice(places)
        owner, key = chosen
        kind = self.random.randrange(5)
        if kind == 0 and isinstance(owner, dict):
            owner[self.random.choice(NAMES)] = owner.pop(key)
        elif kind == 1:
            del owner[key]
        elif kind == 2:
            other = self.random.choice(places)
            owner[key] = json.loads(json.dumps(other[0][other[1]]))
        elif kind == 3 and isinstance(owner[key], int | float):
            owner[key] = owner[key] * self.random.choice([-1, 2, 1000, 2**40]) + self.random.choice([-1, 0, 1])
        else:
            owner[key] = self.random.choice(NASTY)
        return value

    def _places(self, value: Any) -> Any:
        for key in [*value] if isinstance(value, dict) else range(len(value)):
            yield value, key
            if isinstance(value[key], dict | list):
                yield from self._places(value[key])

    def header(self, table: dict[str, Any]) -> dict[str, Any]:
        pieces = table["__metadata__"].get(PIECES)
        if pieces is None or self.random.random() < 0.5:
            return dict(self.nested(table))
        table["__metadata__"][PIECES] = json.dumps(self.nested(json.loads(pieces)))
        return table

    def bytes(self, content: bytes) -> bytes:
        changed = bytearray(content)
        for _ in range(self.random.randint(1, 4)):
            position = self.random.randrange(len(changed))
            changed[position : position + self.random.randrange(3)] = self.random.randbytes(self.random.randrange(3))
            changed = changed or bytearray(b"{")
        return bytes(changed)

    def checkpoint(self, folder: Path) -> None:
        path = self.random.choice(sorted(folder.iterdir()))
        content = path.read_bytes()
        if path.name == MANIFEST:
            agree(folder, self.nested(json.loads(content)))
            return
        if self.random.random() < 0.15:
            content = self.bytes(content)
        elif path.name == STATE:
            content = json.dumps(self.nested(json.loads(content))).encode()
        elif path.name.endswith(TENSORS):
            size = int.from_bytes(content[:8], "little")
            header = json.dumps(self.header(json.loads(content[8 : 8 + size]))).encode()
            content = len(header).to_bytes(8, "little") + header + content[8 + size :]
        path.write_bytes(content)
        agree(folder)


def touch(value: Any) -> None:
    """Use all of what was loaded: what is not sound fails here."""
    if isinstance(value, Piece):
        touch(value.tensor)
    elif isinstance(value, torch.Tensor):
        value.clone().reshape(-1)[:9].tolist()
        if value.dtype == torch.bool:
            value[value].tolist()
    elif isinstance(value, np.ndarray | np.generic):
        with contextlib.suppress(ValueError, OverflowError):  # a date or a letter that there is none of
            repr(value)
        if value.dtype == np.bool_ and value.shape:
            repr(value[value])
    elif isinstance(value, dict):
        for key, one in value.items():
            touch(key)
            touch(one)
    elif isinstance(value, list | tuple):
        for one in value:
            touch(one)


def restored(folder: Path, files: dict[str, bytes]) -> None:
    for path in folder.iterdir():
        if path.name not in files:
            path.unlink()
    for name, content in files.items():
        (folder / name).write_bytes(content)


def normalised_network() -> torch.nn.Sequential:
    return small_network(2, 3, torch.nn.BatchNorm1d(3))


def averaging_trainer(folder: Path, trainable_only: bool = False) -> Trainer:
    model = normalised_network()
    model[0].requires_grad_(not trainable_only)
    return trainer_for(
        folder,
        EMA(),
        model=model,
        loss_fn=mean_square,
        optimizer=lambda parameters: torch.optim.Adam([each for each in parameters if each.requires_grad], lr=0.1),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1),
        global_batch_size=4,
        max_steps=2,
        best_metric="loss",
        trainable_only=trainable_only,
        save="background",
    )


def fuzz(folder: Path, seconds: float, seed: int) -> Counter[str]:
    """What came of so many seconds; in a process whose memory is limited."""
    with Saver(folder / "plain", keep_last=1, background=False) as saver:
        saver.save(1, a_state())
    run = averaging_trainer(folder / "run")
    run.fit(TensorDataset(torch.randn(8, 2)))
    averaging_trainer(folder / "small", trainable_only=True).fit(TensorDataset(torch.randn(8, 2)))
    plain, pieces, trained, small = (
        folder / "plain" / name_of(1),
        saved_in_pieces(folder / "pieces"),
        folder / "run" / name_of(2),
        folder / "small" / name_of(2),
    )
    paths = plain, pieces, trained, small
    before = {path: {file.name: file.read_bytes() for file in path.iterdir()} for path in paths}
    size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (size + ROOM, size + ROOM))
    found, end = Counter[str](), time.monotonic() + seconds
    while time.monotonic() < end or not found["loaded"] or not found["refused"]:
        seed += 1
        path = paths[seed % len(paths)]
        Mutator(seed).checkpoint(path)
        print(seed, flush=True)  # where a crash was
        try:
            if path is trained:
                run.resume(path)
            else:
                touch(load(path))
                touch(load(path, wanted=lambda _, name: WANTED.get(name)))
            found["loaded"] += 1
        except CheckpointError as error:
            found["refused"] += 1
            assert error.message, error.hint
            str(error).encode()  # can be printed
        checkpoints(path.parent, hashes=True)
        with contextlib.suppress(DdpKitError):
            export(
                [str(path), str(folder / "model.safetensors"), *["--ema"] * (seed % 5 == 0)],
                Terminal({}, lambda _: None),
            )
        with contextlib.suppress(DdpKitError):
            load_model(path, normalised_network(), strict=seed % 3 == 0, ema=seed % 5 == 0)
        (folder / "model.safetensors").unlink(missing_ok=True)
        restored(path, before[path])
        if path is trained:
            run.resume(path)
    run.fit(TensorDataset(torch.randn(8, 2)))
    return found


def run_fuzzer(folder: Path, seconds: float, seed: int) -> None:
    """As a process of its own, which may crash."""
    from tests.support.launching import run  # this file is also a program, which does not find it

    done = run(sys.executable, __file__, folder, seconds, seed, timeout=seconds * 10 + 300)
    last = done.stdout.splitlines()[-1:]
    assert done.returncode == 0, f"after round {last} with {done.returncode}: {done.stderr[-3000:]}"
    assert "'refused'" in last[0], last
    assert "'loaded'" in last[0], last


@pytest.mark.slow
def test_changed_files_are_refused_with_a_message(tmp_path: Path) -> None:
    run_fuzzer(tmp_path, SECONDS, 0)


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_many_changed_files_are_refused_with_a_message(tmp_path: Path) -> None:
    run_fuzzer(tmp_path, float(os.environ.get("FUZZ_SECONDS", "3600")), random.SystemRandom().randrange(10**9))


# By name -------------------------------------------------------------------------------------------------------------


def saved_checkpoint(folder: Path) -> Path:
    with Saver(folder, keep_last=1, background=False) as saver:
        saver.save(1, a_state())
    return folder / name_of(1)


def with_value(path: Path, value: Any) -> Path:
    """The same checkpoint with another value in it, and hashes that agree."""
    text = json.loads((path / STATE).read_text())
    text["kinds"][0] = value
    (path / STATE).write_text(json.dumps(text))
    agree(path)
    return path


@pytest.mark.parametrize(
    "value",
    [
        {"$scalar": "QUFBQUFBQUE=", "dtype": "|O"},
        {"$scalar": "QUFBQUFBQUE=", "dtype": [["a", "|O"]]},
        {"$scalar": "QUFBQUFBQUE=", "dtype": [["a", [["b", "O"]]]]},
        {"$scalar": "QUFBQUFBQUE=", "dtype": "O,O"},
        {"$scalar": "AA==", "dtype": "<f8"},
        {"$scalar": "Ag==", "dtype": "|b1"},
        {"$array": ["arrays", "a"], "dtype": "|O", "shape": [3]},
        {"$array": ["arrays", "a"], "dtype": "<f8", "shape": [2**40]},
        {"$array": ["arrays", "a"], "dtype": "<f8", "shape": [-3]},
        {"$array": ["arrays", "a"], "dtype": "<i4", "shape": [6]},
        {"$tensor": ["model", "weight"], "dtype": "qint8", "shape": [48]},
        {"$tensor": ["model", "weight"], "dtype": "__builtins__", "shape": [48]},
        {"$tensor": ["model", "weight"], "dtype": "complex64", "shape": [-1]},
        {"$tensor": ["..", "weight"]},
        {"$default": [], "factory": "eval"},
        {"$deque": [], "maxlen": 2**70},
        {"$set": [1]},
        {"$scalar": "QUFBQUFBQUE=", "dtype": [["a", "<f8"]]},
        {"$ordered": [], "attributes": {"keys": 1}},
        json.loads("[" * 300 + "]" * 300),
    ],
    ids=lambda value: json.dumps(value)[:50],
)
def test_load_of_a_value_that_no_save_writes_is_refused(value: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read"):
        load(with_value(saved_checkpoint(tmp_path), value))


@pytest.mark.parametrize("name", ["../../x", "/etc/passwd", ".hidden", "a/b", "a\n", MANIFEST, "", 7])
def test_load_with_a_file_name_outside_the_folder_is_refused(name: Any, tmp_path: Path) -> None:
    path = saved_checkpoint(tmp_path)
    manifest = json.loads((path / MANIFEST).read_text())
    manifest["files"][0]["name"] = name
    agree(path, manifest)
    with pytest.raises(CheckpointError, match="damaged"):
        load(path)


def test_load_refuses_links_pipes_and_endless_files_unread(tmp_path: Path) -> None:
    path = saved_checkpoint(tmp_path / "runs")
    for name in (MANIFEST, STATE, "model.safetensors"):
        (path / name).rename(tmp_path / "kept")
        for made in (
            lambda file: file.symlink_to(tmp_path / "kept"),
            lambda file: file.symlink_to("/dev/zero"),
            os.mkfifo,
            lambda file: file.mkdir(),
        ):
            made(path / name)
            with pytest.raises(CheckpointError, match="cannot be (loaded|read)"):
                load(path)
            (path / name).unlink() if not (path / name).is_dir() else (path / name).rmdir()
        (tmp_path / "kept").rename(path / name)
    with (path / MANIFEST).open("r+b") as file:
        file.truncate(1 << 40)
    with pytest.raises(CheckpointError, match=r"manifest.json is too long"):
        load(path)


def test_load_of_a_header_with_overlaps_or_gaps_is_refused(tmp_path: Path) -> None:
    path = saved_checkpoint(tmp_path)
    file = path / "arrays.safetensors"
    content = file.read_bytes()
    size = int.from_bytes(content[:8], "little")
    for change in (
        lambda entry: entry.update(data_offsets=[0, 10**15]),
        lambda entry: entry.update(shape=[2**62, 4]),
        lambda entry: entry.update(shape=[-2, -3]),
        lambda entry: entry.update(dtype="O"),
        lambda entry: entry.update(data_offsets=[entry["data_offsets"][0] + 1, entry["data_offsets"][1] + 1]),
    ):
        header = json.loads(content[8 : 8 + size])
        change(header["a"])
        text = json.dumps(header).encode()
        file.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + size :])
        agree(path)
        with pytest.raises(CheckpointError, match="cannot be loaded"):
            load(path)


if __name__ == "__main__":
    print(fuzz(Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])))
