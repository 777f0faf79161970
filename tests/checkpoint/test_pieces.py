"""Tensors in pieces: saved by some ranks, read by others in other pieces; never more in memory than is wanted."""

import json
import math
import os
import tracemalloc
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ddp_kit.checkpoint import packing, weight_files
from ddp_kit.checkpoint.format import name_of
from ddp_kit.checkpoint.packing import Division, pack
from ddp_kit.checkpoint.reader import load
from ddp_kit.checkpoint.saver import Saver, SharedBuffer, begin_copy
from ddp_kit.checkpoint.writer import Region, System, WriteTask, unfinished_folder, write
from ddp_kit.errors import CheckpointError
from ddp_kit.state_values import Piece

Value = torch.Tensor | Piece
DTYPES = [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.uint8]
WHOLE = torch.arange(35.0).reshape(5, 7)


def save_states(folder: Path, states: list[dict[str, Any]]) -> Path:
    """One state of each writer; what is no piece is that of the first one."""
    with ExitStack() as opened:
        savers = [
            opened.enter_context(Saver(folder, keep_last=1, background=False, writer=writer, writers=len(states)))
            for writer in range(len(states))
        ]
        token = savers[0].begin(1)
        for saver, state in reversed([*zip(savers, states, strict=True)]):
            saver.save(1, {"model": state}, token=token)
    return folder / name_of(1)


def box(tensor: torch.Tensor, *ends: tuple[int, int]) -> Piece:
    place = tuple(slice(*each) for each in ends)
    return Piece(tensor[place], tuple(tensor.shape), tuple(begin for begin, _ in ends))


def flat(tensor: torch.Tensor, begin: int, end: int) -> Piece:
    return Piece(tensor.reshape(-1)[begin:end], tuple(tensor.shape), (begin,), flat=True)


def spread_tensor(tensor: torch.Tensor, ranks: int, random: Random) -> list[Value]:
    """A tensor as each of some ranks may hold it: whole on all, a range, or boxes cut in any dimensions."""
    kind = random.choice(["replicated", "ranges", "boxes"])
    if kind == "replicated":
        return [tensor] * ranks
    if kind == "ranges":
        cuts = sorted(random.choices(range(tensor.numel() + 1), k=ranks - 1))
        return [flat(tensor, *ends) for ends in zip([0, *cuts], [*cuts, tensor.numel()], strict=True)]
    boxes = [[(0, size) for size in tensor.shape]]
    while len(boxes) < ranks:
        old = boxes.pop(random.randrange(len(boxes)))
        new = [*old]
        if old:
            along = random.randrange(len(old))
            cut = random.randint(*old[along])
            old[along], new[along] = (old[along][0], cut), (cut, old[along][1])
            boxes += [old, new]
        else:  # one value, which only a range leaves out
            return [flat(tensor, 0, int(rank == 0)) for rank in range(ranks)]
    return [box(tensor, *each) for each in boxes]


@settings(max_examples=50, deadline=None)
@given(
    kinds=st.lists(st.tuples(st.lists(st.integers(0, 6), max_size=3), st.sampled_from(DTYPES)), min_size=1, max_size=4),
    writers=st.integers(1, 4),
    readers=st.integers(1, 4),
    random=st.randoms(use_true_random=False),
)
def test_load_of_pieces_under_another_division_is_exact(
    kinds: list[tuple[list[int], torch.dtype]],
    writers: int,
    readers: int,
    random: Random,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    tensors = {
        str(number): torch.tensor([random.randrange(2) for _ in range(math.prod(shape))]).reshape(shape).to(dtype)
        for number, (shape, dtype) in enumerate(kinds)
    }
    saved = {name: spread_tensor(tensor, writers, random) for name, tensor in tensors.items()}
    path = save_states(
        tmp_path_factory.mktemp("saved"),
        [{name: each[rank] for name, each in saved.items()} for rank in range(writers)],
    )
    held = {name: spread_tensor(tensor, readers, random) for name, tensor in tensors.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(weight_files, "_CHUNK", random.choice([8, 24, 1 << 20]))
        assert load(path)["model"].keys() == tensors.keys()
        for name, tensor in load(path)["model"].items():
            assert tensor.dtype == tensors[name].dtype
            assert torch.equal(tensor, tensors[name])
        for rank in range(readers):
            own = {name: each[rank] for name, each in held.items()}
            for position in (None, (rank, readers), (random.randrange(9), 9)):
                for name, read in load(path, wanted=only_pieces(own), position=position)["model"].items():
                    check_value(read, own[name])


def only_pieces(own: dict[str, Value]) -> Any:
    def wanted(part: str, name: str) -> Piece | None:
        value = own[name]
        return value if part == "model" and isinstance(value, Piece) else None

    return wanted


def check_value(read: Value, own: Value) -> None:
    if isinstance(own, Piece):
        assert isinstance(read, Piece)
        assert (read.shape, read.offsets, read.flat) == (own.shape, own.offsets, own.flat)
        read, own = read.tensor, own.tensor
    assert isinstance(read, torch.Tensor)
    assert read.dtype == own.dtype
    assert torch.equal(read, own)


@pytest.mark.parametrize(
    ("pieces", "problem"),
    [
        ([box(WHOLE, (0, 2), (0, 7)), box(WHOLE, (2, 4), (0, 7))], "is incomplete"),
        ([box(WHOLE, (0, 2), (0, 7)), box(WHOLE, (1, 4), (0, 7))], "is stored more than once"),
        ([box(WHOLE, (0, 5), (0, 4)), box(WHOLE, (0, 5), (3, 6))], "is stored more than once"),
        ([flat(WHOLE, 0, 18), flat(WHOLE, 17, 34)], "is stored more than once"),
        ([flat(WHOLE, 0, 18), flat(WHOLE, 19, 35)], "is incomplete"),
        ([flat(WHOLE, 0, 14), box(WHOLE, (1, 4), (0, 7))], "is stored more than once"),
        ([flat(WHOLE, 0, 35), flat(WHOLE, 0, 1)], "is stored more than once"),
    ],
)
def test_load_of_pieces_with_gaps_or_overlaps_is_refused(pieces: list[Value], problem: str, tmp_path: Path) -> None:
    """Also those that have as many values as the whole: two in common, two missing."""
    with pytest.raises(CheckpointError, match=problem):
        load(save_states(tmp_path, [{"weight": each} for each in pieces]))


def test_rank_refuses_gaps_and_overlaps_in_the_values_that_it_needs(tmp_path: Path) -> None:
    pieces = [box(WHOLE, (0, 2), (0, 7)), box(WHOLE, (1, 3), (0, 7)), box(WHOLE, (4, 5), (0, 7))]
    path = save_states(tmp_path, [{"weight": each} for each in pieces])
    for rank, rows, problem in ((2, (2, 5), "is incomplete"), (0, (0, 3), "is stored more than once")):
        with pytest.raises(CheckpointError, match=problem):
            load(path, wanted=only_pieces({"weight": box(WHOLE, rows, (0, 7))}), position=(rank, 3))
    load(path, wanted=only_pieces({"weight": box(WHOLE, (4, 5), (0, 7))}), position=(2, 3))


def test_load_of_a_piece_verifies_every_byte_of_its_files(tmp_path: Path) -> None:
    path = save_states(tmp_path, [{"weight": box(WHOLE, (0, 3), (0, 7))}, {"weight": box(WHOLE, (3, 5), (0, 7))}])
    wanted = only_pieces({"weight": box(WHOLE, (0, 1), (0, 2))})
    check_value(load(path, wanted=wanted)["model"]["weight"], box(WHOLE, (0, 1), (0, 2)))
    first, second = sorted(path.glob("model-*.safetensors"))
    content = first.read_bytes()
    for position in range(len(content)):
        first.write_bytes(content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :])
        with pytest.raises(CheckpointError, match="cannot be loaded"):
            load(path, wanted=wanted)
    first.write_bytes(content)
    content = second.read_bytes()
    second.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    load(path, wanted=wanted)  # has nothing that is wanted
    with pytest.raises(CheckpointError, match="hash differs"):
        load(path)


@pytest.fixture
def torch_bytes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of the memory that loading gets from torch."""
    sizes: list[int] = []
    empty = torch.empty

    def counting(*shape: Any, **options: Any) -> torch.Tensor:
        tensor = empty(*shape, **options)
        sizes.append(tensor.nbytes)
        return tensor

    monkeypatch.setattr(torch, "empty", counting)
    return sizes


@pytest.fixture
def traced() -> Iterator[None]:
    tracemalloc.start()
    yield
    tracemalloc.stop()


@pytest.mark.usefixtures("traced")
@pytest.mark.parametrize("ends", [((7, 9), (0, 1 << 20)), ((0, 16), (5, 1 << 17))], ids=["rows", "columns"])
def test_load_of_a_piece_needs_memory_for_the_piece_and_a_chunk(
    ends: tuple[tuple[int, int], ...], torch_bytes: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In all 80 MB of files, of which 8 MB are wanted."""
    monkeypatch.setattr(weight_files, "_CHUNK", 1 << 18)
    large, other = torch.randn(16, 1 << 20), torch.ones(1 << 22)
    path = save_states(tmp_path, [{"large": large, "other": other}])
    own = {"large": box(large, *ends), "other": flat(other, 0, 10)}
    torch_bytes.clear()
    tracemalloc.reset_peak()
    before, _ = tracemalloc.get_traced_memory()
    state = load(path, wanted=only_pieces(own))["model"]
    _, peak = tracemalloc.get_traced_memory()
    assert sum(torch_bytes) == sum(each.tensor.nbytes for each in own.values())
    assert peak - before < 4 << 20, "a buffer of 1 MiB, a chunk or two"
    for name, read in state.items():
        check_value(read, own[name])


# --- Which files a rank opens -----------------------------------------------------------------------------------------


class NoFsync(System):
    def fsync(self, file: int) -> None:
        """Nothing: no power fails here."""


def save_sharded(folder: Path, rows: dict[str, int], writers: int, of: Any = None) -> Path:
    """A checkpoint that ranks of FSDP write: each tensor is divided by rows, in equal parts but for the last ones."""
    of = of or sharded
    states = (
        {
            "model": {name: of(size, writer, writers) for name, size in rows.items()},
            "optimizer": {name: of(size, writer, writers) for name, size in rows.items()} | {"step": torch.tensor(3.0)},
        }
        for writer in range(writers)
    )
    unfinished_folder(folder, 1, "token").mkdir(parents=True)
    buffer = SharedBuffer()
    for writer, state in reversed([*enumerate(states)]):
        packed = pack(state)
        division = Division(packed, lambda _part, _name: False, writer, writers)
        tensors = [packed.tensors[number].tensor for number in division.numbers]
        files = division.layout.files
        text = b""
        if writer == 0:
            text = json.dumps(packed.text).encode()
            files = (*files, Region("state.json", division.layout.bytes, len(text)))
        buffer.prepare(division.layout, tensors, text)
        begin_copy(zip(buffer.targets, tensors, strict=True))()
        write(WriteTask(str(folder), 1, False, 1, {}, files, "token", writer, writers), buffer.view, NoFsync())
    buffer.close()
    return folder / name_of(1)


def values_of(rows: int) -> torch.Tensor:
    return torch.arange(rows * 3.0).reshape(rows, 3)


def sharded(rows: int, rank: int, ranks: int) -> Piece:
    size = -(-rows // ranks)
    return box(values_of(rows), (min(rank * size, rows), min((rank + 1) * size, rows)), (0, 3))


def replicated_twice(rows: int, rank: int, ranks: int) -> Piece:
    """HSDP: two groups of ranks, of which the first one writes."""
    piece = sharded(rows, rank % (ranks // 2), ranks // 2)
    return replace(piece, owned=rank < ranks // 2)


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the files that are opened."""
    names: list[str] = []

    def counting(path: Any, *arguments: Any, **options: Any) -> int:
        names.append(Path(path).name)
        return real(path, *arguments, **options)

    real = os.open
    monkeypatch.setattr(os, "open", counting)
    return names


ROWS = {"wide": 1000, "narrow": 129, "few": 5}


@pytest.mark.parametrize("of", [sharded, replicated_twice])
@pytest.mark.parametrize("writers", [2, 16, 64])
def test_rank_opens_its_own_files_however_many_there_are(
    writers: int, of: Any, opened: list[str], tmp_path: Path
) -> None:
    path = save_sharded(tmp_path, ROWS, writers, of)
    for rank in {0, 1, writers // 2, writers - 1}:
        opened.clear()
        check_load(path, rank, writers, of)
        assert len(opened) <= 12


@pytest.mark.parametrize(
    ("writers", "readers", "most"), [(64, 63, 26), (64, 32, 34), (64, 128, 26), (63, 64, 26), (8, 1, 36)]
)
def test_another_number_of_ranks_opens_few_files_and_reads_the_same(
    writers: int, readers: int, most: int, opened: list[str], tmp_path: Path
) -> None:
    path = save_sharded(tmp_path, ROWS, writers)
    for rank in {0, 1, readers // 3, readers // 2, readers - 1} & {*range(readers)}:
        opened.clear()
        check_load(path, rank, readers, sharded)
        assert len(opened) <= most


def check_load(path: Path, rank: int, ranks: int, of: Any) -> None:
    own = {name: of(rows, rank, ranks) for name, rows in ROWS.items()}
    state = load(path, wanted=lambda _part, name: own.get(name), position=(rank, ranks))
    assert state["optimizer"].pop("step") == 3
    for part in ("model", "optimizer"):
        assert state[part].keys() == own.keys()
        for name, read in state[part].items():
            check_value(read, own[name])


def test_load_of_a_checkpoint_without_shapes_in_state_json(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As earlier versions wrote it."""
    monkeypatch.setattr(packing, "WHOLE", "dtypes")
    path = save_sharded(tmp_path, ROWS, 8)
    for rank in range(3):
        check_load(path, rank, 3, sharded)


@pytest.mark.parametrize("damage", ["missing", "short", "changed"])
def test_rank_refuses_damage_in_the_files_that_it_needs(damage: str, tmp_path: Path) -> None:
    path = save_sharded(tmp_path, ROWS, 4)
    file = path / "optimizer-00003-of-00004.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-4] + (b"" if damage == "short" else b"abcd"))
    if damage == "missing":
        file.unlink()
    check_load(path, 1, 4, sharded)
    problem = {"missing": "is missing", "short": "bytes instead of", "changed": "hash differs"}[damage]
    with pytest.raises(CheckpointError, match=problem):
        check_load(path, 2, 4, sharded)
