"""What may be given as data, and what a DataLoader of the user's own says of its batches."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    SequentialSampler,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)
from torch.utils.data.distributed import DistributedSampler

from ddp_kit import DataConfig, TrainerConfig
from ddp_kit.data import Batching, batching, check_batch_size, open_data, train_batching
from ddp_kit.errors import ConfigError, DataError
from tests.support.toys import SampleStream

DATA = TensorDataset(torch.arange(10.0))


class WithoutLength(Dataset[int]):
    def __getitem__(self, index: int) -> int:
        return index


class OwnDistributedSampler(DistributedSampler[int]):
    """Other shares than torch's."""


def divided(**options: object) -> DistributedSampler[int]:
    return DistributedSampler(DATA, num_replicas=2, rank=0, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (WithoutLength(), "which has no __getitem__ or no __len__"),
        ((n for n in range(3)), "is a generator, which can be read only once"),
        (TensorDataset(torch.empty(0)), "is empty"),
        (42, "is an int, which has no __getitem__"),
        (DataLoader(DATA, batch_size=None), "batch_size=None over TensorDataset"),
        (
            DataLoader(DATA, sampler=OwnDistributedSampler(DATA, 2, 0)),
            "a OwnDistributedSampler, which yields only this rank",
        ),
        (DataLoader(DATA, batch_sampler=BatchSampler(OwnDistributedSampler(DATA, 2, 0), 2, False)), "this rank's"),
        (DataLoader(DATA, sampler=DistributedSampler(range(5), 2, 0)), "a DistributedSampler, which"),  # type: ignore[arg-type]
    ],
)
def test_open_data_of_data_that_cannot_be_divided_is_refused(data: object, said: str) -> None:
    with pytest.raises(DataError, match=said):
        open_data(data, "train_data")


def test_open_data_of_divisible_data_opens_it() -> None:
    assert open_data([1, 2, 3], "train_data") == ([1, 2, 3], None)
    stream = SampleStream(range(3))
    assert open_data(stream, "train_data") == (stream, None)
    for loader in (DataLoader(stream), DataLoader(DATA, sampler=[1, 2]), DataLoader(DATA, sampler=divided())):
        assert open_data(loader, "train_data") == (loader.dataset, loader)


@pytest.mark.parametrize("data", [DATA, SampleStream(range(3))], ids=["dataset", "stream"])
def test_open_data_of_a_loader_with_unordered_batches_is_refused(data: object) -> None:
    def loader(workers: int) -> "DataLoader[Any]":
        return DataLoader(data, batch_size=2, num_workers=workers, in_order=False)  # type: ignore[arg-type]

    with pytest.raises(DataError, match="eval_data is a DataLoader with in_order=False, whose 2 workers"):
        open_data(loader(2), "eval_data")
    for one_reader in (loader(0), loader(1)):
        assert open_data(one_reader, "train_data") == (data, one_reader)


@pytest.mark.filterwarnings("ignore")  # torch's own about DataPipes
def test_open_data_of_a_datapipe_is_refused() -> None:
    pipes = pytest.importorskip("torch.utils.data.datapipes.iter")
    with pytest.raises(DataError, match="is a DataPipe"):
        open_data(pipes.IterableWrapper([1, 2]), "train_data")


def test_batching_reads_sizes_and_order_from_the_users_loader() -> None:
    assert batching(None) == Batching()
    assert batching(DataLoader(DATA, batch_size=3)) == Batching(3, shuffle=False, drop_last=False)
    assert batching(DataLoader(DATA, shuffle=True, drop_last=True)) == Batching(1, shuffle=True, drop_last=True)
    sampler = BatchSampler(RandomSampler(DATA), 4, drop_last=True)
    assert batching(DataLoader(DATA, batch_sampler=sampler)) == Batching(4, shuffle=True, drop_last=True)
    assert batching(DataLoader(SampleStream(range(3)), batch_size=3, drop_last=True)) == Batching(3, False, True)
    assert batching(DataLoader(SampleStream(range(3)), batch_size=None)) == Batching(None, False, False)


@pytest.mark.parametrize(
    "sampler",
    [
        WeightedRandomSampler([1.0] * 10, 10),
        RandomSampler(DATA, replacement=True),
        RandomSampler(DATA, num_samples=3),
        SequentialSampler(range(5)),
        SubsetRandomSampler([1, 2]),
        [3, 1],
    ],
    ids=lambda sampler: type(sampler).__name__,
)
def test_batching_keeps_the_users_sampler(sampler: object) -> None:
    found = batching(DataLoader(DATA, sampler=sampler, batch_size=2, drop_last=True))  # type: ignore[arg-type]
    assert found == Batching(2, shuffle=False, drop_last=True, sampler=sampler)  # type: ignore[arg-type]


@pytest.mark.parametrize("shuffle", [False, True])
def test_batching_of_a_distributed_sampler_keeps_only_its_settings(shuffle: bool) -> None:
    assert batching(DataLoader(DATA, sampler=divided(shuffle=shuffle))) == Batching(1, shuffle, drop_last=False)
    assert batching(DataLoader(DATA, sampler=divided(shuffle=shuffle, drop_last=True))) == Batching(1, shuffle, True)


def test_batching_of_a_batch_sampler_excludes_batch_sizes_in_the_configuration() -> None:
    own = batching(DataLoader(DATA, batch_sampler=[[1, 2], [3]]))
    assert own == Batching(None, shuffle=False, drop_last=False, batches=[[1, 2], [3]])
    check_batch_size(own, 32)
    with pytest.raises(
        DataError, match="batch sampler decides the batch size, but the configuration sets one"
    ) as caught:
        check_batch_size(own, 4, asked=True)
    assert "leave out global_batch_size and micro_batch_size" in caught.value.hint
    assert "accumulation_steps" in caught.value.hint
    ready = batching(DataLoader(SampleStream(range(3)), batch_size=None))
    with pytest.raises(DataError, match="the DataLoader has batch_size=None, so the dataset decides the batch size"):
        check_batch_size(ready, 4, asked=True)


def test_batch_size_in_conflict_with_the_configuration_is_an_error() -> None:
    check_batch_size(Batching(4, shuffle=False, drop_last=False), 4)
    with pytest.raises(DataError, match="batch_size=4, but the configuration makes micro-batches of 8") as caught:
        check_batch_size(Batching(4, shuffle=False, drop_last=False), 8)
    assert "micro_batch_size=4" in caught.value.hint


class InOrder:
    def __len__(self) -> int:
        return 10

    def __iter__(self) -> Iterator[int]:
        return iter(range(10))


@pytest.mark.parametrize("name", ["sampler", "batch_sampler"])
@pytest.mark.parametrize(
    ("data", "said"),
    [
        (SampleStream(range(3)), "is set, but train_data is a SampleStream, whose samples have no index"),
        (DataLoader(DATA, batch_size=2), "is set, but train_data is a DataLoader, which has a sampler itself"),
    ],
    ids=["stream", "DataLoader"],
)
def test_sampler_in_the_configuration_needs_a_dataset(name: str, data: Any, said: str) -> None:
    dataset, loader = open_data(data, "train_data")
    with pytest.raises(ConfigError, match=f"data.{name} {said}"):
        train_batching(dataset, loader, DataConfig(**{name: InOrder()}))  # type: ignore[arg-type]


def test_distributed_sampler_in_the_configuration_is_refused() -> None:
    own = divided()
    with pytest.raises(DataError, match=r"data.sampler contains a DistributedSampler, which yields only this rank's"):
        train_batching(DATA, None, DataConfig(sampler=own))
    with pytest.raises(DataError, match=r"data.batch_sampler contains a DistributedSampler"):
        train_batching(DATA, None, DataConfig(batch_sampler=BatchSampler(own, 2, drop_last=False)))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"data": {"sampler": [0], "batch_sampler": [[0]]}}, "data.sampler is not supported with data.batch_sampler"),
        ({"data": {"sampler": 3}}, r"data\.sampler"),
        (
            {"data": {"batch_sampler": [[0]]}, "global_batch_size": 4},
            "global_batch_size = 4 is not supported with data.batch",
        ),
        (
            {"data": {"batch_sampler": [[0]]}, "micro_batch_size": "auto"},
            "micro_batch_size = 'auto' is not supported with data.batch_sampler",
        ),
    ],
)
def test_batch_size_or_sampler_with_a_batch_sampler_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        TrainerConfig(**settings)


def test_sampler_in_the_configuration_is_not_saved() -> None:
    config = TrainerConfig(data={"sampler": [0, 1]})
    assert "sampler" not in config.model_dump()["data"]
