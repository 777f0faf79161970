"""An epoch that was left in its midst is continued with the samples that it was begun with, or not at all."""

import random
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, Sampler, Subset

from ddp_kit import DataError
from tests.support.toys import SampleStream, counting_data, linear_layer, sgd, trainer_for


class NotedSamples(torch.utils.data.Dataset[Tensor]):
    """Notes which samples are taken."""

    def __init__(self, length: int) -> None:
        self.length, self.taken = length, list[int]()

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Tensor:
        self.taken.append(index)
        return torch.tensor([float(index)])


def counting_stream(length: int = 100) -> SampleStream:
    return SampleStream(counting_data(length))


line_trainer = partial(
    trainer_for,
    model=partial(linear_layer, 1),
    loss_fn=lambda model, batch: model(batch).mean(),
    optimizer=sgd(1e-6),
    global_batch_size=10,
)


def left(folder: Path, data: Any, /, steps: int = 3, **settings: Any) -> None:
    trainer = line_trainer(folder, **settings)
    for step in trainer.steps(data):
        if step.number == steps:
            trainer.save()
            break


@pytest.mark.parametrize(
    ("length", "begun", "continued", "said"),
    [
        (100, {}, {"seed": 1}, "the setting seed was 0 and is now 1"),
        (100, {}, {"data": {"shuffle": False}}, "the sampler was in random order and is now in the dataset's order"),
        (99, {}, {"data": {"drop_last": True}}, "drop_last was False and is now True"),
        (100, {}, {"global_batch_size": 20}, "the global batch was 10 and is now 20"),
    ],
)
def test_resume_in_mid_epoch_with_another_setting_names_it(
    tmp_path: Path, length: int, begun: dict[str, Any], continued: dict[str, Any], said: str
) -> None:
    left(tmp_path, NotedSamples(length), **begun)
    with pytest.raises(DataError, match=said):
        line_trainer(tmp_path, **continued).fit(NotedSamples(length))


def test_resume_in_mid_epoch_with_a_grown_dataset_is_refused(tmp_path: Path) -> None:
    left(tmp_path, NotedSamples(91))
    with pytest.raises(DataError, match="the number of samples was 91 and is now 99") as raised:
        line_trainer(tmp_path).fit(NotedSamples(99))
    assert "the number of its steps" not in raised.value.message


def test_resume_in_mid_epoch_with_other_samples_of_a_subset_is_refused(tmp_path: Path) -> None:
    left(tmp_path, Subset(NotedSamples(100), range(60)))
    with pytest.raises(DataError, match="the samples of the Subset was"):
        line_trainer(tmp_path).fit(Subset(NotedSamples(100), range(40, 100)))


def test_resume_at_the_end_of_an_epoch_accepts_other_settings_and_data(tmp_path: Path) -> None:
    left(tmp_path, NotedSamples(30))
    resumed = line_trainer(tmp_path, seed=4, global_batch_size=7, epochs=2)
    assert resumed.fit(NotedSamples(33)).samples == 30 + 33


@pytest.mark.parametrize(
    ("continued", "said"),
    [
        ({"global_batch_size": 20}, "the global batch was 10 and is now 20"),
        ({"seed": 3}, "the setting seed was 0 and is now 3"),
        ({"data": {"drop_last": True}}, "drop_last was False and is now True"),
        ({"data": {"num_workers": 2}}, "data.num_workers was 1 and is now 2"),
    ],
)
def test_resume_in_mid_epoch_of_a_stream_needs_the_same_steps(
    tmp_path: Path, continued: dict[str, Any], said: str
) -> None:
    left(tmp_path, counting_stream())
    with pytest.raises(DataError, match=said):
        line_trainer(tmp_path, **continued).fit(counting_stream())
    assert line_trainer(tmp_path).fit(counting_stream()).samples == 100


def test_resume_in_mid_epoch_of_a_stream_that_is_now_shorter_is_an_error(tmp_path: Path) -> None:
    left(tmp_path, counting_stream())
    with pytest.raises(DataError, match="resumes at step 4 of an epoch, but train_data ended before"):
        line_trainer(tmp_path).fit(counting_stream(30))


@pytest.mark.parametrize("length", [9, 0])
def test_stream_without_a_whole_global_batch_is_an_error(tmp_path: Path, length: int) -> None:
    with pytest.raises(DataError, match=f"yielded {length} samples in an epoch|yielded no sample on any rank"):
        line_trainer(tmp_path, data={"drop_last": True}).fit(counting_stream(length))


class Drawn(Sampler[int]):
    """An order that is drawn from a generator of its own."""

    def __init__(self, generator: Any) -> None:
        self.chance = generator

    def __len__(self) -> int:
        return 40

    def __iter__(self) -> Iterator[int]:
        order = [*range(40)]
        self.chance.shuffle(order)
        return iter(order)


class OwnBatchSampler(BatchSampler):
    """A batch sampler of the user's own."""


GENERATORS = {
    "random": lambda: random.Random(1),
    "RandomState": lambda: np.random.RandomState(1),
    "Generator": lambda: np.random.default_rng(1),
    "the global ones": lambda: random,
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", GENERATORS)
@pytest.mark.parametrize("batched", [False, True])
def test_sampler_with_a_generator_draws_the_same_in_a_resumed_run(tmp_path: Path, kind: str, batched: bool) -> None:
    def given() -> tuple[NotedSamples, Any]:
        data, sampler = NotedSamples(40), Drawn(GENERATORS[kind]())
        if batched:
            return data, DataLoader(data, batch_sampler=OwnBatchSampler(sampler, 10, False))
        return data, DataLoader(data, batch_size=10, sampler=sampler)

    settings: dict[str, Any] = {"epochs": 2, "global_batch_size": None}
    whole, loader = given()
    line_trainer(tmp_path / "whole", **settings).fit(loader)
    first, loader = given()
    left(tmp_path / "left", loader, steps=6, **settings)
    second, loader = given()
    line_trainer(tmp_path / "left", **settings).fit(loader)
    assert first.taken[:60] + second.taken[-20:] == whole.taken
    assert sorted(whole.taken) == sorted([*range(40)] * 2)
    assert whole.taken[:40] != whole.taken[40:]


@pytest.mark.parametrize("batched", [False, True])
def test_sampler_in_the_configuration_draws_the_same_in_a_resumed_run(tmp_path: Path, batched: bool) -> None:
    def settings() -> dict[str, Any]:
        sampler = Drawn(random.Random(1))
        own = {"batch_sampler": OwnBatchSampler(sampler, 10, False)} if batched else {"sampler": sampler}
        return {"epochs": 2, "global_batch_size": None if batched else 10, "data": own | {"compare_items": 0}}

    whole, first, second = NotedSamples(40), NotedSamples(40), NotedSamples(40)
    line_trainer(tmp_path / "whole", **settings()).fit(whole)
    left(tmp_path / "left", first, steps=6, **settings())
    line_trainer(tmp_path / "left", **settings()).fit(second)
    assert first.taken[:60] + second.taken[-20:] == whole.taken
    assert sorted(whole.taken) == sorted([*range(40)] * 2)


def test_sampler_that_draws_differently_in_a_resumed_run_is_refused(tmp_path: Path) -> None:
    class Stateful(Drawn):
        drawn = 0

        def __iter__(self) -> Iterator[int]:
            type(self).drawn += 1
            return iter([(number * 7 + self.drawn) % 40 for number in range(40)])

    def loader() -> Any:
        return DataLoader(NotedSamples(40), batch_size=10, sampler=Stateful(None))

    left(tmp_path, loader(), global_batch_size=None)
    with pytest.raises(DataError, match="the order of the DataLoader's own sampler was"):
        line_trainer(tmp_path, global_batch_size=None).fit(loader())
