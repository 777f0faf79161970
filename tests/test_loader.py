"""From a dataset, or the user's own DataLoader, to batches on the device."""

from collections import Counter, namedtuple
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from ddp_kit.config import DataConfig
from ddp_kit.errors import DataError
from ddp_kit.loader import Batching, batching, build_loader, check_batch_size, on_device, open_data
from ddp_kit.world import World

CPU = torch.device("cpu")
ALONE = World(rank=0, world_size=1, local_rank=0, local_world_size=1, node_rank=0, device=CPU)
DATA = TensorDataset(torch.arange(10.0))
BATCHES = [[0, 1, 2], [3, 4], [9]]


class Stream(IterableDataset[int]):
    def __iter__(self) -> object:
        return iter(range(3))


class WithoutLength(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


class WorkerNumber(Dataset[int]):
    """Says which loader process made each sample."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> int:
        info = torch.utils.data.get_worker_info()
        return -1 if info is None else info.id


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (Stream(), "is an IterableDataset"),
        (WithoutLength(), "without __getitem__ or without __len__"),
        (TensorDataset(torch.empty(0)), "is empty"),
        (42, "is a int"),
        (DataLoader(DATA, sampler=WeightedRandomSampler([1.0] * 10, 10)), "a sampler of its own .WeightedRandom"),
        (DataLoader(DATA, sampler=RandomSampler(DATA, replacement=True)), "a sampler of its own .RandomSampler"),
        (DataLoader(DATA, sampler=RandomSampler(DATA, num_samples=3)), "a sampler of its own .RandomSampler"),
        (DataLoader(DATA, batch_sampler=[[1, 2], [3]]), "batches of its own making .a list"),
        (DataLoader(DATA, batch_size=None), "batches of its own making .batch_size=None"),
    ],
)
def test_data_that_cannot_be_divided_is_refused(data: object, said: str) -> None:
    with pytest.raises(DataError, match=said):
        open_data(data, "train_data")


def test_a_list_is_a_dataset_too() -> None:
    assert open_data([1, 2, 3], "train_data") == ([1, 2, 3], None)


def test_the_batches_are_those_that_were_asked_for() -> None:
    loader = build_loader(DATA, BATCHES, DataConfig(), ALONE, seed=0)  # type: ignore[arg-type]
    assert [batch[0].tolist() for batch in loader] == [[0, 1, 2], [3, 4], [9]]


def test_the_user_s_own_loader_keeps_what_it_chose() -> None:
    generator = torch.Generator()
    own = DataLoader(
        WorkerNumber(), batch_size=5, shuffle=True, num_workers=2, collate_fn=tuple, generator=generator, timeout=30
    )
    made = build_loader(own.dataset, BATCHES, DataConfig(), ALONE, seed=0, template=own)  # type: ignore[arg-type]
    assert (made.num_workers, made.collate_fn, made.generator, made.timeout) == (2, tuple, generator, 30)
    assert list(made) == [(0, 0, 0), (1, 1), (0,)]


def test_what_the_user_s_own_loader_says_of_its_batches() -> None:
    assert batching(None) is None
    assert batching(DataLoader(DATA, batch_size=3)) == Batching(3, shuffle=False, drop_last=False)
    assert batching(DataLoader(DATA, shuffle=True, drop_last=True)) == Batching(1, shuffle=True, drop_last=True)
    sampler = BatchSampler(RandomSampler(DATA), 4, drop_last=True)
    assert batching(DataLoader(DATA, batch_sampler=sampler)) == Batching(4, shuffle=True, drop_last=True)


def test_a_batch_size_in_conflict_with_the_configuration_is_an_error_that_says_so() -> None:
    check_batch_size(Batching(4, shuffle=False, drop_last=False), 4)
    check_batch_size(None, 4)
    with pytest.raises(DataError, match="batch_size=4, but the configuration makes micro-batches of 8") as caught:
        check_batch_size(Batching(4, shuffle=False, drop_last=False), 8)
    assert "micro_batch_size=4" in caught.value.hint


Pair = namedtuple("Pair", "left right")


class Movable:
    def __init__(self) -> None:
        self.moved_to: object = None

    def to(self, device: object) -> "Movable":
        self.moved_to = device
        return self


def test_any_nesting_reaches_the_device_and_keeps_its_shape() -> None:
    batch = {"pair": Pair(torch.ones(2), [torch.zeros(1, dtype=torch.int64), "text", None]), "own": Movable()}
    (moved,) = on_device([batch], CPU, None, ahead=2)
    assert isinstance(moved["pair"], Pair)
    assert moved["pair"].right[1:] == ["text", None]
    assert moved["own"].moved_to == CPU


class Named(dict[str, Tensor]):
    """What some collate functions return."""


@dataclass
class Sample:
    image: Tensor
    name: str


def test_subclasses_of_containers_and_dataclasses_are_converted_too() -> None:
    batch = [Named(x=torch.ones(1)), Sample(torch.ones(1), "one"), pack_sequence([torch.ones(2), torch.ones(1)])]
    ((named, sample, packed),) = on_device([batch], CPU, torch.bfloat16, ahead=0)
    assert (type(named), named["x"].dtype) == (Named, torch.bfloat16)
    assert (sample.image.dtype, sample.name) == (torch.bfloat16, "one")
    assert isinstance(packed, PackedSequence)


@dataclass(frozen=True)
class Scaled:
    x: Tensor
    made: list[int] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "x", self.x / 255)


def test_a_container_s_constructor_is_not_run_again() -> None:
    scaled, counter = Scaled(torch.full((1,), 255.0)), Counter(a=1, b=2)
    scaled.made.append(7)
    ((moved, counted),) = on_device([(scaled, counter)], CPU, None, ahead=0)
    assert (moved.x.item(), moved.made, counted) == (1.0, [7], Counter(a=1, b=2))


def test_a_sampler_over_something_else_is_refused() -> None:
    with pytest.raises(DataError, match="a sampler of its own"):
        open_data(DataLoader(DATA, sampler=SequentialSampler(range(5))), "train_data")


def test_floating_point_is_converted_where_asked_and_whole_numbers_never() -> None:
    (moved,) = on_device([(torch.ones(2), torch.ones(2, dtype=torch.int64))], CPU, torch.bfloat16, ahead=0)
    assert [leaf.dtype for leaf in moved] == [torch.bfloat16, torch.int64]


class DrawsRandomNumbers(Dataset[Tensor]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        return torch.rand(1)


def test_loader_processes_draw_other_numbers_on_other_ranks_and_the_same_ones_in_the_next_run() -> None:
    def drawn(rank: int) -> list[float]:
        world = World(rank, 2, rank, 2, 0, CPU)
        config = DataConfig(num_workers=1)
        loader = build_loader(DrawsRandomNumbers(), [[0], [1]], config, world, seed=0)  # type: ignore[arg-type]
        return [batch.item() for batch in loader]

    assert drawn(0) == drawn(0)
    assert set(drawn(0)).isdisjoint(drawn(1))


def test_making_a_loader_leaves_the_global_random_state_alone() -> None:
    before = torch.get_rng_state()
    list(build_loader(DATA, BATCHES, DataConfig(), ALONE, seed=0))  # type: ignore[arg-type]
    assert torch.equal(torch.get_rng_state(), before)


def test_auto_workers_leave_a_core_for_the_rank(tmp_path: Path) -> None:
    loader = build_loader(DATA, BATCHES, DataConfig(num_workers="auto"), ALONE, seed=0)  # type: ignore[arg-type]
    assert 0 <= loader.num_workers <= 8
    shared = World(0, 64, 0, 64, 0, CPU)
    assert build_loader(DATA, BATCHES, DataConfig(num_workers="auto"), shared, seed=0).num_workers == 0  # type: ignore[arg-type]
