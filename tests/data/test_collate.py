"""GivenSamples that do not fit together: one error that names what differs, wherever the batch was to be made."""

import pickle
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from ddp_kit.config.settings import DataConfig
from ddp_kit.data import DeviceTransform, build_loader, loading, on_device
from ddp_kit.data.collate import Collate, Partial, checked_batches, unpacked
from ddp_kit.distributed.world import World
from ddp_kit.errors import DataError
from tests.support.fake_cuda import visible_gpus

CPU = torch.device("cpu")
ALONE = World(rank=0, world_size=1, local_rank=0, local_world_size=1, node_rank=0, device=CPU)


class GivenSamples(Dataset[Any]):
    def __init__(self, *samples: Any) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        if isinstance(self.samples[index], Exception):
            raise self.samples[index]
        return self.samples[index]


def read_batches(*samples: Any, workers: int = 0, seed_samples: bool = False) -> None:
    class Backwards(list[list[int]]):
        seed, epoch = 0, 0

    data = GivenSamples(*samples)
    batches = Backwards([[0], [*range(len(samples) - 1, 0, -1)]])
    config = DataConfig(num_workers=workers, seed_samples=seed_samples)
    loader = build_loader(data, batches, config, ALONE, seed=0)
    list(on_device(loader, CPU, None, ahead=0))


MISTAKES = {
    "shapes": (
        [torch.zeros(2)] * 3 + [torch.zeros(3)],
        r"differ: shape \(3,\) in sample 3, shape \(2,\)(?m: in sample 2$)",
    ),
    "larger ones later": ([torch.zeros(3)] * 3 + [torch.zeros(2)], r"differ: shape \(2,\) in sample 3"),
    "a part": ([(torch.zeros(1), 1)] * 2 + [(torch.zeros(2), 1)], r"differ at \[0\]: shape \(2,\) in sample 2"),
    "a part by name": (
        [{"x": {"y": np.zeros(1)}}] * 2 + [{"x": {"y": np.zeros(2)}}],
        r"differ at \['x'\]\['y'\]: shape \(2,\)",
    ),
    "lengths": ([[1, 2]] * 2 + [[1, 2, 3]], "differ: length 3 in sample 2, length 2 in sample 1"),
    "names": ([{"a": 1}] * 2 + [{"b": 1}], "differ: keys 'b' in sample 2, keys 'a' in sample 1"),
    "None": ([torch.zeros(2)] * 2 + [None], r"the dataset returned None for sample 2(?s:.*)is a `return` missing"),
    "None for all": ([None] * 3, r"the dataset returned None for sample 0(?s:.*)is a `return` missing"),
    "None in a part": ([{"x": 1, "y": None}] * 2, r"sample 0 contains None at \['y'\]"),
    "None in a part of one": ([(1, 2)] * 2 + [(1, None)], r"sample 2 contains None at \[1\]"),
    "kinds": ([torch.zeros(2)] * 2 + [object()], "differ: object in sample 2|differ: .*object"),
    "a kind that torch does not know": ([1] + [object()] * 3, "cannot be collated into a batch: default_collate.*"),
}


@pytest.mark.parametrize(("samples", "said"), MISTAKES.values(), ids=MISTAKES)
def test_collate_of_mismatched_samples_names_them(samples: list[Any], said: str) -> None:
    with pytest.raises(DataError, match=said) as caught:
        read_batches(*samples)
    assert "collate_fn" in caught.value.hint


@pytest.mark.parametrize("mistake", ["shapes", "larger ones later", "a kind that torch does not know"])
def test_collate_of_mismatched_samples_in_dataloader_workers_names_them(mistake: str) -> None:
    samples, said = MISTAKES[mistake]
    with pytest.raises(DataError, match=said):
        read_batches(*samples, workers=1)


def test_collate_of_mismatched_seeded_samples_names_their_indices() -> None:
    with pytest.raises(DataError, match=r"shape \(2,\) in sample 2, shape \(1,\) (?m:in sample 1$)"):
        read_batches(torch.zeros(1), torch.zeros(1), torch.zeros(2), seed_samples=True)


def test_collate_of_many_shapes_lists_only_some() -> None:
    with pytest.raises(DataError, match=r"shape \(6,\) in sample 6, .*, shape \(3,\) in sample 3, \.\.\.\n"):
        read_batches(*(torch.zeros(size) for size in range(7)))


@pytest.mark.parametrize("workers", [0, 1])
def test_collate_without_shared_memory_names_mismatched_samples(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "_little_shared_memory", lambda: True)
    with pytest.raises(DataError, match=r"shape \(2,\) in sample 2"):
        read_batches(torch.zeros(1), torch.zeros(1), torch.zeros(2), workers=workers)


@pytest.mark.parametrize(
    ("error", "workers"),
    [(RuntimeError("stack expects me"), 0), (TypeError("own"), 0), (FileNotFoundError("gone"), 0)],
)
def test_exception_of_the_dataset_is_raised_unchanged(error: Exception, workers: int) -> None:
    with pytest.raises(type(error), match=str(error)):
        read_batches(1, error, workers=workers)


def failing_collate(samples: list[Any]) -> Any:
    raise RuntimeError("stack expects each tensor to be equal size, I say")


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])  # its end takes torch five seconds
def test_exception_of_the_users_collate_function_is_raised_unchanged(workers: int) -> None:
    data = GivenSamples(torch.zeros(1), torch.zeros(2))
    own = DataLoader(data, batch_size=2, collate_fn=failing_collate, num_workers=workers)
    with pytest.raises(RuntimeError, match="equal size, I say"):
        list(on_device(build_loader(data, [[0, 1]], DataConfig(), ALONE, 0, own), CPU, None, ahead=0))


def test_uncollated_samples_are_described_by_an_object_that_can_be_pickled() -> None:
    found = Collate()([torch.zeros(1), torch.zeros(2)], 2)
    assert pickle.loads(pickle.dumps(found)) == found


def dropped(samples: list[Any]) -> list[Any]:
    return [each for each in samples if each is not None]


X = torch.arange(6.0).reshape(6, 1)
BATCHES = {  # what a collate function makes of the samples: first dimensions that count no samples
    "a tensor": lambda samples: torch.stack(dropped(samples)),
    "a list of samples": dropped,
    "transformed samples": lambda samples: [each + 1 for each in dropped(samples)],
    "one packed row": lambda samples: torch.cat(dropped(samples))[None],
    "a shared grid": lambda samples: (torch.stack(dropped(samples), dim=1), torch.zeros(3)),
    "more rows than samples": lambda _: torch.zeros(12, 1),
    "different first dimensions": lambda _: (torch.zeros(5, 1), torch.zeros(4)),
    "no tensor": len,
    "nothing": lambda _: {"x": X[:0]},
}


COLLATED = [
    pytest.param(collate, missing, id=f"{name}-{missing}") for name, collate in BATCHES.items() for missing in (0, 1)
]
COLLATED += [pytest.param(dropped, 6, id="an empty list")]


@pytest.mark.parametrize(("collate", "missing"), COLLATED)
def test_samples_that_are_none_are_left_out_and_shapes_count_nothing(collate: Any, missing: int) -> None:
    own = DataLoader(GivenSamples(*[None] * missing, *X[missing:]), batch_size=6, collate_fn=collate)
    (batch,) = checked_batches(build_loader(own.dataset, [[*range(6)]], DataConfig(), ALONE, 0, own))
    assert unpacked(6, batch)[0] == 6 - missing
    assert (type(batch) is Partial) == (missing > 0)


class WithoutOdd(GivenSamples):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self.samples[index] for index in indices if index % 2 == 0]


class Seeded(list[list[int]]):
    seed, epoch = 0, 0


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("seed_samples", [False, True])
@pytest.mark.parametrize("collate", [None, torch.stack, list])
def test_getitems_that_omits_samples_makes_a_partial_batch(workers: int, seed_samples: bool, collate: Any) -> None:
    config = DataConfig(num_workers=workers, seed_samples=seed_samples, collate_fn=collate)
    data = WithoutOdd(*(torch.full((1,), float(number)) for number in range(6)))
    batches = list(checked_batches(build_loader(data, Seeded([[0, 1, 2], [2, 4]]), config, ALONE, seed=0)))
    assert type(batches[0]) is Partial
    assert batches[0].samples == 2
    rows = [torch.as_tensor(unpacked(0, batch)[1]).flatten() for batch in batches]
    assert [row.tolist() for row in rows] == [[0.0, 2.0], [2.0, 4.0]]


def test_device_transform_skips_omitted_samples() -> None:
    config = DataConfig(seed_samples=True)
    data = WithoutOdd(*(torch.full((1,), float(number)) for number in range(6)))
    loader = build_loader(data, Seeded([[0, 1, 2]]), config, ALONE, seed=0, keyed=True)
    (batch,) = on_device(loader, CPU, None, 0, DeviceTransform(lambda batch: batch + 1, ALONE, 0, 0, 0, 0))
    assert unpacked(3, batch) == (2, pytest.approx(torch.tensor([[1.0], [3.0]])))


def test_device_transform_per_sample_with_omitted_samples_is_refused() -> None:
    config = DataConfig(seed_samples=True, collate_fn=lambda samples: torch.stack(samples[1:]))
    loader = build_loader(GivenSamples(*X), Seeded([[0, 1, 2]]), config, ALONE, seed=0, keyed=True)
    with pytest.raises(DataError, match="a batch of 3 samples with a tensor of 2 rows"):
        list(loader)


def test_device_transform_seeds_the_generator_of_the_gpu_and_restores_it(monkeypatch: pytest.MonkeyPatch) -> None:
    state, drawn = [torch.tensor([7, 7])], []
    monkeypatch.setattr(torch.cuda, "get_rng_state", lambda *_: state[0])
    monkeypatch.setattr(torch.cuda, "set_rng_state", lambda new, _: state.__setitem__(0, new))
    monkeypatch.setattr(torch.cuda, "manual_seed", lambda seed: state.__setitem__(0, torch.tensor([seed, 0])))
    gpu = replace(ALONE, device=torch.device("cuda", 0))
    for start in (0, 1):  # a run that resumes at the second batch draws the same for it
        transform = DeviceTransform(lambda _: drawn.append(state[0][0].item()), gpu, 3, 0, 0, start)
        with visible_gpus(1):
            for _ in range(2 - start):
                transform(None)
                assert state[0].tolist() == [7, 7]
    assert drawn[0] != drawn[1] == drawn[2]
