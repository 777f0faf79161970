"""`ddpkit export`: the files have the weights, whoever saved them in whatever pieces; what cannot be is said."""

import json
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from safetensors.torch import load_file

from ddp_kit.checkpoint import packing, weight_files
from ddp_kit.checkpoint.format import name_of
from ddp_kit.checkpoint.saver import Saver
from ddp_kit.cli.export import run
from ddp_kit.errors import CheckpointError, DdpKitError, UsageError
from ddp_kit.state_values import Piece
from ddp_kit.terminal import Terminal
from tests.support import launching

Command = Callable[..., "subprocess.CompletedProcess[str]"]

WEIGHTS = {
    "layer.weight": torch.randn(40, 60),
    "layer.bias": torch.randn(40).bfloat16(),
    "mask": torch.tensor([True, False]),
    "scale": torch.tensor(2.0, dtype=torch.float64),
    "none": torch.empty(0, 3),
    "head.weight": torch.randn(50, 30),
    "tail.weight": torch.randn(40, 30),
}


def save_models(folder: Path, models: list[dict[str, Any]], step: int = 1) -> Path:
    """By as many writers as there are models."""
    with ExitStack() as stack:
        savers = [
            stack.enter_context(Saver(folder, keep_last=5, background=False, writer=writer, writers=len(models)))
            for writer in range(len(models))
        ]
        token = savers[0].begin(step)
        for saver, model in reversed([*zip(savers, models, strict=True)]):
            state = {"model": model, "optimizer": {"state": {0: torch.ones(9)}}, "progress": {"epoch": 1}}
            saver.save(step, state, token=token, replicated=lambda part, _: part == "model")
    return folder / name_of(step)


def models(kind: str) -> list[dict[str, Any]]:
    weight, head = WEIGHTS["layer.weight"], WEIGHTS["head.weight"]
    if kind == "one writer":
        return [dict(WEIGHTS)]
    if kind == "four writers":
        return [dict(WEIGHTS)] * 4
    boxes = [(0, 17), (17, 17), (17, 60)]
    ranges = [(0, 33), (33, 1000), (1000, 1500)]
    return [
        WEIGHTS
        | {"layer.weight": Piece(weight[:, begin:end], (40, 60), (0, begin))}
        | {"head.weight": Piece(head.reshape(-1)[first:last], (50, 30), (first,), flat=True)}
        for (begin, end), (first, last) in zip(boxes, ranges, strict=True)
    ]


def equal_weights(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


def export(*words: object) -> str:
    lines: list[str] = []
    assert run([*map(str, words)], Terminal({}, lines.append)) == 0
    return "\n".join(lines)


@pytest.mark.parametrize("kind", ["one writer", "four writers", "pieces of three ranks"])
def test_export_writes_the_weights(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "BYTES_PER_WRITER", 1000)
    monkeypatch.setattr(weight_files, "_CHUNK", 1000)
    path = save_models(tmp_path / "runs", models(kind))
    target = tmp_path / "model.safetensors"
    assert str(target) in export(path, target)
    assert equal_weights(load_file(target), WEIGHTS)
    assert [file.name for file in sorted(tmp_path.iterdir())] == ["model.safetensors", "runs"]


def test_export_of_any_placement_writes_the_same_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing, "BYTES_PER_WRITER", 1000)
    contents = set()
    for kind in ("one writer", "four writers", "pieces of three ranks"):
        target = tmp_path / f"{kind}.safetensors"
        export(save_models(tmp_path / kind, models(kind)), target)
        contents.add(target.read_bytes())
    assert len(contents) == 1


def test_export_of_shards_has_an_index_and_the_requested_size(tmp_path: Path) -> None:
    path = save_models(tmp_path / "runs", models("pieces of three ranks"))
    export(path, tmp_path / "m.safetensors", "--max-shard-size", "5kb")
    index = json.loads((tmp_path / "m.safetensors.index.json").read_text())
    files = sorted({*index["weight_map"].values()})
    assert files == [f"m-0000{number}-of-00004.safetensors" for number in (1, 2, 3, 4)]
    assert index["metadata"]["total_size"] == sum(each.nbytes for each in WEIGHTS.values())
    read: dict[str, torch.Tensor] = {}
    for file in files:
        shard = load_file(tmp_path / file)
        assert all(index["weight_map"][name] == file for name in shard)
        assert len(shard) == 1 or sum(each.nbytes for each in shard.values()) <= 5000
        read |= shard
    assert equal_weights(read, WEIGHTS)


def test_export_writes_tied_weights_once_named_like_save_model(tmp_path: Path) -> None:
    model = torch.nn.Module()
    model.embedding, model.head = torch.nn.Embedding(5, 3), torch.nn.Linear(3, 5, bias=False)
    model.head.weight = model.embedding.weight
    target = tmp_path / "model.safetensors"
    export(save_models(tmp_path / "runs", [model.state_dict()]), target)
    with safetensors.safe_open(target, "pt") as opened:  # type: ignore[no-untyped-call]
        assert opened.metadata() == {"head.weight": "embedding.weight", "format": "pt"}
    weight = model.head.weight.detach().clone()
    torch.nn.init.zeros_(model.head.weight)
    safetensors.torch.load_model(model, target)
    assert torch.equal(model.head.weight, weight)


def test_export_of_a_run_uses_the_newest_whole_checkpoint(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        save_models(tmp_path / "runs", [{"weight": torch.full((3,), float(step))}], step)
    (tmp_path / "runs" / name_of(3) / "state.json").unlink()
    said = export(tmp_path / "runs", tmp_path / "model.safetensors")
    assert "skipped" in said
    assert "of step 2" in said
    assert load_file(tmp_path / "model.safetensors")["weight"].tolist() == [2.0, 2.0, 2.0]


def test_export_of_a_changed_byte_leaves_no_file(tmp_path: Path) -> None:
    path = save_models(tmp_path / "runs", [dict(WEIGHTS)])
    content = bytearray((path / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (path / "model.safetensors").write_bytes(content)
    with pytest.raises(CheckpointError, match="its hash differs") as raised:
        export(path, tmp_path / "model.safetensors", "--max-shard-size", "5kb")
    assert "--verify" in str(raised.value.hint)
    assert [file.name for file in tmp_path.iterdir()] == ["runs"]


def test_export_needs_memory_for_a_chunk_not_for_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_files, "_CHUNK", 1 << 18)
    weights = {str(number): torch.randn(8, 1 << 18) for number in range(4)}  # 32 MiB
    halves = [
        {name: Piece(each[:, begin : begin + (1 << 17)], (8, 1 << 18), (0, begin)) for name, each in weights.items()}
        for begin in (0, 1 << 17)
    ]
    path = save_models(tmp_path / "runs", halves)
    tracemalloc.start()
    export(path, tmp_path / "model.safetensors")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 5 << 20, "two buffers of 1 MiB, and a chunk or two for each file"
    assert equal_weights(load_file(tmp_path / "model.safetensors"), weights)


@pytest.mark.parametrize(
    ("words", "kind", "said"),
    [
        (["runs", "there.safetensors"], UsageError, "already exists"),
        (["runs", "model.bin"], UsageError, "does not end with .safetensors"),
        (["runs", "nowhere/model.safetensors"], UsageError, "there is no folder"),
        (["nowhere", "model.safetensors"], UsageError, "there is no complete checkpoint in nowhere"),
        (["runs", "model.safetensors", "--max-shard-size", "many"], UsageError, "is not a size"),
        (["complex", "model.safetensors"], CheckpointError, "c has the dtype complex64"),
        (["empty", "model.safetensors"], CheckpointError, "no model weights"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_export_with_invalid_arguments_writes_nothing(
    words: list[str], kind: type[DdpKitError], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_models(tmp_path / "runs", [dict(WEIGHTS)])
    save_models(tmp_path / "complex", [{"c": torch.ones(2) * 1j}])
    save_models(tmp_path / "empty", [{}])
    (tmp_path / "there.safetensors").touch()
    before = {*tmp_path.iterdir()}
    with pytest.raises(kind, match=said) as raised:
        export(*words)
    assert raised.value.hint
    assert {*tmp_path.iterdir()} == before


@pytest.mark.slow
def test_export_command_needs_no_torch(ddpkit: Command, tmp_path: Path) -> None:
    path = save_models(tmp_path / "runs", [dict(WEIGHTS)])
    done = ddpkit("export", path, "model.safetensors", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert equal_weights(load_file(tmp_path / "model.safetensors"), WEIGHTS)
    assert ddpkit("export", path, "model.safetensors", cwd=tmp_path).returncode == 2
    (path / "model.safetensors").write_bytes(b"")
    done = ddpkit("export", path, "other.safetensors", cwd=tmp_path)
    assert done.returncode == 1
    assert "has 0 bytes instead of" in done.stderr
    code = "import sys, ddp_kit.cli.export; sys.exit('torch' in sys.modules)"
    assert launching.run(sys.executable, "-c", code).returncode == 0
