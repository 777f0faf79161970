"""What a save exchanges between ranks, and what a load decodes of it, by count: the same for any number of ranks."""

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from ddp_kit.checkpoint import state as state_module
from ddp_kit.checkpoint.format import name_of
from ddp_kit.checkpoint.packing import pack
from ddp_kit.checkpoint.reader import load_once
from ddp_kit.checkpoint.saver import Saver
from ddp_kit.checkpoint.state import RandomPart
from ddp_kit.distributed import world as world_module
from ddp_kit.distributed.world import World, encoded, equal_on_all_ranks, random_states, random_states_kept, sent_bytes

SIZES = [64, 1024, 8192]


def world_of(ranks: int, rank: int = 0) -> World:
    return World(rank, ranks, 0, 8, 0, torch.device("cpu"))


def random_part(ranks: int, rank: int = 0, *, pieces: bool) -> RandomPart:
    return RandomPart(world_of(ranks, rank), 0, 0, SimpleNamespace(step=5), pieces=pieces)


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Bytes that this rank receives, of each collective; the other ranks have the values of this one."""
    counts: list[int] = []

    def all_reduce(row: torch.Tensor, *_: Any, **__: Any) -> None:
        counts.append(row.nbytes)

    def gather(row: torch.Tensor, rows: list[torch.Tensor] | None, dst: int) -> None:
        assert (rows is None) == (dst != 0)
        counts.append(sum(each.copy_(row).nbytes for each in rows or ()))

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    monkeypatch.setattr(dist, "gather", gather)
    return counts


@pytest.mark.parametrize("ranks", SIZES)
def test_rank_states_go_to_one_rank_and_equal_ones_to_none(ranks: int, received: list[int]) -> None:
    own = random_part(ranks, pieces=False).rank_state().encode()
    assert equal_on_all_ranks(b"the same", world_of(ranks))
    assert sent_bytes(own, world_of(ranks), receiver=1) == []
    assert sum(received) < 100
    assert sent_bytes(own, world_of(ranks), receiver=0) == [own] * ranks
    assert sent_bytes(b"", world_of(ranks), receiver=0) == [b""] * ranks


@pytest.mark.parametrize("ranks", SIZES)
@pytest.mark.parametrize("pieces", [False, True], ids=["one writer", "each rank a writer"])
def test_load_decodes_the_random_states_of_one_rank(ranks: int, pieces: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    part = random_part(ranks, 7, pieces=pieces)
    with random_states_kept():
        random.seed(7)
        saved = part.state_dict([] if pieces else ["another rank's"] * 7 + [part.rank_state()] * (ranks - 7))
        drawn = random.random()
        if pieces:
            assert part.rank_state() is None, "nothing is sent to another rank"
            (stored,) = pack({"random": saved}).tensors
            assert stored.tensor.nbytes < 20_000
        decoded: list[str] = []
        real = state_module.decoded
        monkeypatch.setattr(state_module, "decoded", lambda text: decoded.append(text) or real(text))
        part.load_state_dict(saved, Path())
        assert len(decoded) == 1
        assert part.restore()
        assert random.random() == drawn


def test_random_states_of_another_number_of_ranks_are_not_read() -> None:
    saved = random_part(4, 3, pieces=True)
    (name,) = saved.state_dict([])
    other = random_part(2, 1, pieces=True)
    piece = other.piece_of(name)
    assert piece is not None
    assert piece.tensor.numel() == 0
    assert piece.shape == saved.state_dict([])[name].shape
    other.load_state_dict({name: piece}, Path())
    assert other.restore()
    other.load_state_dict([encoded(random_states())] * 4, Path())
    assert other.restore()


def test_row_of_random_states_that_is_damaged_is_refused() -> None:
    part = random_part(1, pieces=True)
    saved = part.state_dict([])
    assert part.check(saved) is None
    saved["1"].tensor[0, 0] = ord("!")
    with pytest.raises(ValueError, match="Expecting value"):
        part.check(saved)


class Tape:
    """Collectives of ranks that run one after another: rank 0 records what the others then receive."""

    def __init__(self) -> None:
        self._recorded: list[torch.Tensor] = []
        self._at: int | None = None

    def replay(self) -> None:
        self._at = 0

    def exchange(self, row: torch.Tensor, *_: Any, **__: Any) -> None:
        if self._at is None:
            self._recorded.append(row.clone())
        else:
            row.copy_(self._recorded[self._at])
            self._at += 1


@pytest.fixture
def tape(monkeypatch: pytest.MonkeyPatch) -> Tape:
    tape = Tape()
    monkeypatch.setattr(dist, "all_reduce", tape.exchange)
    monkeypatch.setattr(dist, "broadcast", tape.exchange)
    return tape


def test_ranks_of_other_nodes_get_a_checkpoint_without_opening_a_file(
    tape: Tape, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world_module, "_AT_ONCE", 64)  # several broadcasts, also for one tensor
    state = {
        "model": {"weight": torch.arange(60.0).reshape(6, 10), "flags": torch.tensor([True, False, True])},
        "optimizer": {
            "step": torch.tensor(7.0),
            "none": torch.empty(0, 3),
            "half": torch.ones(5, dtype=torch.bfloat16),
        },
    }
    state["model"]["tied"] = state["model"]["weight"]
    with Saver(tmp_path, keep_last=1, background=False) as saver:
        saver.save(1, state)
    path = tmp_path / name_of(1)
    cpu = torch.device("cpu")
    first = load_once(path, world_of(16), lambda _part, _name: cpu)
    tape.replay()
    (path / "manifest.json").unlink()  # nothing can be read any more
    second = load_once(path, world_of(16, 9), lambda _part, _name: cpu)
    for loaded in (first, second):
        assert loaded["model"]["tied"] is loaded["model"]["weight"]
        for part, tensors in state.items():
            assert loaded[part].keys() == tensors.keys()
            for name, tensor in tensors.items():
                assert loaded[part][name].dtype == tensor.dtype
                assert torch.equal(loaded[part][name], tensor)
