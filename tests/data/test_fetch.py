"""Batches in one piece are what DataLoader makes of samples; seeded samples depend on nothing else."""

import random
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, get_worker_info

from ddp_kit.config.settings import DataConfig
from ddp_kit.data import build_loader
from ddp_kit.data.sampler import Epochs, RankBatches, passes_of, plan_batches
from ddp_kit.distributed.world import World

CPU = torch.device("cpu")
ALONE = World(rank=0, world_size=1, local_rank=0, local_world_size=1, node_rank=0, device=CPU)
BATCHES = [[7, 0, 2], [3, -1], [9]]

TENSORS = TensorDataset(
    torch.randn(10, 3, 2), torch.arange(10), torch.arange(20, dtype=torch.uint8).reshape(10, 2), torch.empty(10, 0)
)


class Counted(TensorDataset):
    """With code of the user's own in it, which has to be called."""

    fetched = 0

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        self.fetched += 1
        return super().__getitem__(index)


WHOLE = {
    "tensors": TENSORS,
    "subset": Subset(TENSORS, range(9, -1, -1)),
    "nested": Subset(Subset(TENSORS, torch.arange(9, -1, -1)), [*range(5), *range(5)]),  # type: ignore[arg-type]
    "not contiguous": TensorDataset(torch.randn(4, 10).t()),
    "channels last": TensorDataset(torch.randn(10, 3, 4, 4).to(memory_format=torch.channels_last)),
}


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("name", WHOLE)
def test_batch_fetched_whole_equals_that_of_torchs_dataloader(name: str, workers: int) -> None:
    dataset = WHOLE[name]
    expected = list(DataLoader(dataset, batch_sampler=BATCHES))
    found = list(build_loader(dataset, BATCHES, DataConfig(num_workers=workers), ALONE, seed=0))
    assert len(found) == len(expected)
    for own, torch_s in zip(found, expected, strict=True):
        assert type(own) is type(torch_s) is list
        assert [(leaf.dtype, leaf.shape, leaf.stride()) for leaf in own] == [
            (leaf.dtype, leaf.shape, leaf.stride()) for leaf in torch_s
        ]
        assert all(map(torch.equal, own, torch_s))


@pytest.mark.parametrize("dataset", [TENSORS, Subset(Subset(TENSORS, range(9, -1, -1)), np.arange(10))])  # type: ignore[arg-type]
def test_batch_fetched_whole_fetches_no_single_samples(dataset: Dataset[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(TensorDataset, "__getitem__")
    assert len(list(build_loader(dataset, [[7, 0, 2], [3]], DataConfig(), ALONE, seed=0))) == 2


def test_batch_does_not_share_memory_with_the_dataset() -> None:
    tensors = TensorDataset(torch.zeros(4))
    for (batch,) in build_loader(tensors, [[0], [0, 1], [0, 1, 2, 3]], DataConfig(), ALONE, seed=0):
        batch += 1
    assert tensors.tensors[0].tolist() == [0.0] * 4


def test_dataset_that_overrides_getitem_is_asked_for_every_sample() -> None:
    data = Counted(torch.arange(10.0))
    assert len(list(build_loader(Subset(data, range(10)), BATCHES, DataConfig(), ALONE, seed=0))) == 3
    assert data.fetched == 6


@pytest.mark.parametrize("key", [10, "a", 0.5])
def test_fetch_of_an_invalid_index_raises_the_error_of_torch(key: object) -> None:
    errors = []
    for loader in (DataLoader(TENSORS, batch_sampler=[[key]]), build_loader(TENSORS, [[key]], DataConfig(), ALONE, 0)):  # type: ignore[list-item]
        with pytest.raises((IndexError, TypeError)) as caught:
            list(loader)
        errors.append((caught.type, str(caught.value)))
    assert errors[0] == errors[1]


def test_users_collate_function_gets_a_list_of_samples() -> None:
    own = DataLoader(TENSORS, batch_size=3, collate_fn=len)
    assert list(build_loader(TENSORS, BATCHES, DataConfig(), ALONE, 0, own)) == [3, 2, 1]


def test_worker_info_has_the_users_dataset() -> None:
    def note(number: int) -> None:
        dataset = get_worker_info().dataset  # type: ignore[union-attr]
        dataset.tensors = (torch.full((10,), float(number)),)

    data = TensorDataset(torch.zeros(10))
    own = DataLoader(data, batch_size=1, num_workers=2, worker_init_fn=note)
    loader = build_loader(data, [[0], [0]], DataConfig(), ALONE, 0, own)
    assert [batch[0].item() for batch in loader] == [0.0, 1.0]


# --- seeded samples ---------------------------------------------------------------------------------------------


class Augmented(Dataset[Tensor]):
    """Draws from every generator, another number of times for every sample."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Tensor:
        for _ in range(index):
            random.random(), np.random.rand(), torch.rand(1)
        return torch.tensor([index, random.random(), np.random.rand(), torch.rand(1).item()], dtype=torch.float64)


class AugmentedTogether(Augmented):
    def __getitems__(self, indices: list[int]) -> list[Tensor]:
        return [self[index] for index in indices]


def seeded(
    dataset: Augmented, epochs: Iterable[int], workers: int = 0, rank: int = 0, world_size: int = 1
) -> dict[int, dict[int, list[float]]]:
    """What each sample was, by epoch and index."""
    world = World(rank, world_size, rank, world_size, 0, CPU)
    plan = plan_batches(4, None, None, world_size)
    batches = RankBatches(Epochs(dataset, 5, 4, shuffle=True), rank, plan.micro_batches)
    loader = build_loader(dataset, batches, DataConfig(num_workers=workers, seed_samples=True), world, seed=epochs_seed)
    found = {}
    for epoch in epochs:
        batches.set_position(epoch, 0)
        samples = (sample.tolist() for batch in loader for sample in batch)
        found[epoch] = {int(index): rest for index, *rest in samples}
    return found


epochs_seed = 99  # of the DataLoader workers: no sample depends on it


@pytest.mark.parametrize("workers", [0, 1, 2])
@pytest.mark.parametrize("kind", [Augmented, AugmentedTogether])
def test_seeded_sample_does_not_depend_on_workers_or_the_order_of_epochs(kind: type[Augmented], workers: int) -> None:
    expected = seeded(Augmented(), [0, 1, 2])
    assert seeded(kind(), [2, 0, 1], workers) == expected
    assert expected[0].keys() == set(range(12))
    draws = [draw for samples in expected.values() for drawn in samples.values() for draw in drawn]
    assert len(set(draws)) == 12 * 3 * 3, "every draw of every sample in every epoch is another"


@pytest.mark.parametrize("world_size", [2, 3])
def test_seeded_sample_does_not_depend_on_ranks(world_size: int) -> None:
    together: dict[int, list[float]] = {}
    for rank in range(world_size):
        together |= seeded(Augmented(), [1], 0, rank, world_size)[1]
    assert together == seeded(Augmented(), [1])[1]


def test_seeding_samples_does_not_change_the_random_numbers_of_training() -> None:
    def draws(fetch: bool) -> list[float]:
        random.seed(1), np.random.seed(1), torch.manual_seed(1)
        if fetch:
            seeded(Augmented(), [0])
        return [random.random(), np.random.rand(), torch.rand(1).item()]

    assert draws(fetch=True) == draws(fetch=False)


class Failing(Augmented):
    def __getitem__(self, index: int) -> Tensor:
        raise KeyError(index)


def test_seeding_restores_the_random_states_after_an_error() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    with pytest.raises(KeyError):
        seeded(Failing(), [0])
    assert torch.equal(torch.get_rng_state(), before)


def test_evaluation_with_seeded_samples_does_not_depend_on_workers() -> None:
    def samples(workers: int) -> list[list[float]]:
        batches = RankBatches(Epochs(Augmented(), 5), 0, partial(passes_of, 5, 1))
        config = DataConfig(num_workers=workers, seed_samples=True)
        loader = build_loader(Augmented(), batches, config, ALONE, seed=0)
        return [sample.tolist() for batch in loader for sample in batch]

    assert samples(0) == samples(1)


def test_tensor_datasets_are_not_seeded() -> None:
    def batches() -> Iterator[list[int]]:
        return iter(BATCHES)

    (first, *_) = build_loader(TENSORS, batches(), DataConfig(seed_samples=True), ALONE, seed=0)
    assert first[1].tolist() == [7, 0, 2]


def test_batch_keeps_requires_grad_of_the_data() -> None:
    data = TensorDataset(torch.ones(4, requires_grad=True))
    ((batch,),) = build_loader(data, [[1, 2]], DataConfig(), ALONE, seed=0)
    assert batch.requires_grad


class Drawing(Dataset[Tensor]):
    """Draws from all generators, as does what makes a batch of its samples."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> Tensor:
        return torch.randn(2) + random.random() + float(np.random.rand())


def with_noise(samples: list[Tensor]) -> Tensor:
    return torch.stack(samples) + torch.randn(2)


@pytest.mark.parametrize("first", [0, 2])
def test_prefetched_batches_draw_the_same_after_a_resume_at_any_batch(first: int) -> None:
    """As on a GPU, for which batches are fetched ahead of their use."""
    gpu = World(0, 1, 0, 1, 0, torch.device("cuda", 0))
    own = DataLoader(Drawing(), batch_size=2, collate_fn=with_noise, pin_memory=False)

    def batches(first: int) -> list[Tensor]:
        keys = RankBatches(Epochs(Drawing(), 3, 2, shuffle=True), 0, plan_batches(2, None, None, 1).micro_batches)
        keys.set_position(1, first)
        loader = build_loader(Drawing(), keys, DataConfig(pin_memory=False), gpu, 0, own)
        before = torch.get_rng_state(), random.getstate()
        found = list(loader)
        assert torch.equal(torch.get_rng_state(), before[0])
        assert random.getstate() == before[1]
        return found

    whole = batches(0)
    torch.randn(first)  # elsewhere in the training's own states
    assert all(map(torch.equal, batches(first), whole[first:]))
