"""Each epoch has the samples that its dataset and its sampler have then."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, OneCycleLR
from torch.utils.data import BatchSampler, ConcatDataset, DataLoader, Dataset, IterableDataset, Sampler, Subset

from ddp_kit import Callback, ConfigError, DataError, Trainer, TrainerConfig, scheduler_steps

GROWING, SHRINKING = [8, 12, 16], [16, 12, 5]


class NumberedSamples(Dataset[Tensor]):
    """Sample i of epoch e is (i, e). `lengths`: of each epoch."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths, self.epoch = lengths, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.lengths[self.epoch]

    def __getitem__(self, index: int) -> Tensor:
        assert index < len(self)
        return torch.tensor([float(index), float(self.epoch)])


class Backwards(Sampler[int]):
    """The first samples in reverse order. `lengths`: how many in each epoch."""

    def __init__(self, lengths: list[int]) -> None:
        self.lengths, self.epoch = lengths, 0

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __len__(self) -> int:
        return self.lengths[self.epoch]

    def __iter__(self) -> Iterator[int]:
        return iter(range(len(self) - 1, -1, -1))


class Pairs(BatchSampler):
    """A batch sampler of the user's own."""


def with_sampler(lengths: list[int]) -> Any:
    return DataLoader(NumberedSamples([16] * 3), batch_size=2, sampler=Backwards(lengths))


def with_batch_sampler(lengths: list[int]) -> Any:
    return DataLoader(NumberedSamples([16] * 3), batch_sampler=Pairs(Backwards(lengths), 2, drop_last=False))


MAKERS = [NumberedSamples, with_sampler, with_batch_sampler]


class NotedRun:
    """Notes the samples of each epoch, and what the Trainer says of the run's length at each step."""

    def __init__(self, folder: Path | None = None, scheduler: Any = None, **settings: Any) -> None:
        torch.manual_seed(0)
        self.samples: dict[int, list[tuple[int, ...]]] = {}
        self.totals: list[int | None] = []
        model = nn.Linear(2, 1)
        self.config = TrainerConfig(
            **({"epochs": 3, "accumulation_steps": 2} | settings),
            log_every_steps=1,
            checkpoint={"dir": folder, "save": "blocking"},
        )
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
        self.trainer = Trainer(model, optimizer, self._loss, self.config, scheduler=scheduler)

    def _loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        noted = self.samples.setdefault(self.trainer.epoch, [])
        noted += [tuple(map(int, sample)) for sample in batch.tolist()]
        return model(batch).square().mean()

    def train(self, data: Any, until: int | None = None, between: Callable[[], object] = lambda: None) -> "NotedRun":
        """`until`: the step at which to save and leave. `between()`: called at the end of each epoch."""
        for step in self.trainer.steps(data):
            self.totals.append(self.trainer.total_steps)
            if step.ends_epoch:
                between()
            if step.number == until:
                self.trainer.save()
                break
        return self

    @property
    def lengths(self) -> list[int]:
        return [len(samples) for samples in self.samples.values()]

    @property
    def weights(self) -> list[float]:
        return [*nn.utils.parameters_to_vector(self.trainer.model.parameters()).tolist()]


@pytest.mark.parametrize("lengths", [GROWING, SHRINKING], ids=["growing", "shrinking"])
@pytest.mark.parametrize("make", MAKERS)
def test_epoch_has_the_length_of_its_dataset_or_sampler(make: Any, lengths: list[int]) -> None:
    run = NotedRun(global_batch_size=4 if make is NumberedSamples else None).train(make(lengths))
    assert run.lengths == lengths
    assert [sorted(each) for each in run.samples.values()] == [
        [(index, epoch) for index in range(length)] for epoch, length in enumerate(lengths)
    ]
    steps = sum(-(-length // 4) for length in lengths)
    assert run.trainer.step == steps == run.totals[-1]
    if make is not NumberedSamples:
        assert set(run.totals) == {steps}, "a sampler is asked for the lengths of all epochs before the first step"


@pytest.mark.parametrize("left", [1, 3, 7])
@pytest.mark.parametrize("lengths", [GROWING, SHRINKING], ids=["growing", "shrinking"])
@pytest.mark.parametrize("make", MAKERS)
def test_run_resumes_in_an_epoch_of_another_length(tmp_path: Path, make: Any, lengths: list[int], left: int) -> None:
    settings = {"global_batch_size": 4 if make is NumberedSamples else None}
    whole = NotedRun(**settings).train(make(lengths))
    first = NotedRun(tmp_path, **settings).train(make(lengths), until=left)
    second = NotedRun(tmp_path, **settings).train(make(lengths))
    assert second.weights == whole.weights
    assert second.trainer.total_steps == whole.trainer.total_steps
    assert [*first.samples.values(), *second.samples.values()] != []
    joined = [sample for run in (first, second) for samples in run.samples.values() for sample in samples]
    assert joined == [sample for samples in whole.samples.values() for sample in samples]
    again = NotedRun(tmp_path, **settings)  # a finished run asks for no epoch after the last one
    assert again.trainer.fit(make(lengths)).steps == whole.trainer.step


@pytest.mark.parametrize("lengths", [GROWING, SHRINKING], ids=["growing", "shrinking"])
@pytest.mark.parametrize("make", [with_sampler, with_batch_sampler])
def test_scheduler_steps_of_a_varying_sampler_is_the_length_of_the_run(make: Any, lengths: list[int]) -> None:
    data = make(lengths)
    steps = scheduler_steps(NotedRun().config, data)
    assert steps == sum(-(-length // 4) for length in lengths)
    run = NotedRun(scheduler=lambda optimizer: OneCycleLR(optimizer, 0.1, total_steps=steps)).train(data)
    with pytest.raises(ValueError, match="Tried to step"):  # not one tick was left
        run.trainer.scheduler.step()  # type: ignore[union-attr]


def test_scheduler_steps_of_a_plain_sampler_is_counted() -> None:
    data = DataLoader(NumberedSamples([16] * 3), batch_size=2, sampler=[3, 1, 2])
    assert scheduler_steps(TrainerConfig(epochs=3), data) == 6


@pytest.mark.parametrize("make", MAKERS)
def test_epoch_without_samples_is_refused(make: Any) -> None:
    run = NotedRun(global_batch_size=4 if make is NumberedSamples else None)
    with pytest.raises(DataError, match="has length 0 in epoch 3: there are no samples"):
        run.train(make([8, 4, 0]))
    assert run.trainer.step == (3 if make is NumberedSamples else 0), "a sampler is asked before the first step"


def test_epoch_without_a_complete_step_is_refused() -> None:
    run = NotedRun(global_batch_size=8, data={"drop_last": True})
    with pytest.raises(DataError, match="12 samples, fewer than the global batch of 14: there is no complete step in"):
        NotedRun(global_batch_size=14, data={"drop_last": True}).train(NumberedSamples([16, 12, 16]))
    assert run.train(NumberedSamples([*SHRINKING[:2], 8])).lengths == [16, 8, 8]


# --- a dataset that changes between epochs ---------------------------------------------------------------------------


class GrowingSamples(Dataset[Tensor]):
    """Has no `set_epoch`: other code changes it."""

    def __init__(self) -> None:
        self.numbers = [0.0] * 8

    def grow(self) -> None:
        self.numbers = [number + 1 for number in [*self.numbers, *[-1.0] * 4]]

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([self.numbers[index], 1.0])


def test_dataset_that_grows_is_trained_on_from_the_next_epoch(said: list[str]) -> None:
    data = GrowingSamples()
    run = NotedRun(global_batch_size=4).train(data, between=data.grow)
    assert run.lengths == GROWING
    assert run.totals == [6] * 2 + [8] * 3 + [9] * 4
    assert not any("differs in length" in line for line in said), "nothing was created for a number of steps"


def test_scheduler_for_a_length_that_changes_is_warned_about(said: list[str]) -> None:
    data = GrowingSamples()
    NotedRun(global_batch_size=4, scheduler=lambda o: CosineAnnealingLR(o, 6)).train(data, between=data.grow)
    lines = [line for line in said if "differs in length" in line]
    assert lines[0].startswith("epoch 2 differs in length from the previous epoch, so the run has 8 steps, not 6; the")
    assert "set max_steps" in lines[0]
    assert len(lines) == 2
    data, run = GrowingSamples(), NotedRun(global_batch_size=4, scheduler=lambda o: OneCycleLR(o, 0.1, total_steps=6))
    with pytest.raises(ConfigError, match="has 8 steps, not 6; the scheduler allows only 4 more steps"):
        run.train(data, between=data.grow)
    limited = NotedRun(global_batch_size=4, max_steps=6, scheduler=lambda o: OneCycleLR(o, 0.1, total_steps=6))
    data = GrowingSamples()
    assert limited.train(data, between=data.grow).lengths == [8, 12, 4]


READERS: dict[str, Any] = {
    "no worker": lambda data: ({}, data),
    "a worker": lambda data: ({"num_workers": 1}, data),
    "seeded samples in a worker": lambda data: ({"num_workers": 1, "seed_samples": True}, data),
    "a loader": lambda data: ({}, DataLoader(data, batch_size=4, num_workers=1)),
    "a loader with persistent workers": lambda data: (
        {},
        DataLoader(data, batch_size=4, num_workers=2, persistent_workers=True),
    ),
}


@pytest.mark.parametrize("reader", READERS.values(), ids=READERS)
def test_every_process_that_reads_a_dataset_calls_its_set_epoch(reader: Any) -> None:
    settings, data = reader(ConcatDataset([Subset(NumberedSamples([4, 8, 8]), range(4)), NumberedSamples([4, 8, 8])]))
    run = NotedRun(data=settings, micro_batch_size=4, accumulation_steps=1).train(data)
    assert {epoch: {at for _, at in samples} for epoch, samples in run.samples.items()} == {0: {0}, 1: {1}, 2: {2}}


@pytest.mark.parametrize("reader", [*READERS.values()][:4], ids=[*READERS][:4])
def test_every_process_reads_a_changed_dataset_in_the_next_epoch(reader: Any) -> None:
    data = GrowingSamples()
    settings, given = reader(data)
    run = NotedRun(data=settings, micro_batch_size=4, accumulation_steps=1).train(given, between=data.grow)
    assert [sorted({number for number, _ in samples}) for samples in run.samples.values()] == [[0], [0, 1], [0, 1, 2]]


class RisingStream(IterableDataset[Tensor]):
    level = 0.0

    def rise(self) -> None:
        self.level += 1

    def __iter__(self) -> Iterator[Tensor]:
        return iter(torch.full((4, 2), self.level))


@pytest.mark.parametrize("workers", [0, 1])
def test_stream_that_changes_is_read_in_the_next_epoch(workers: int) -> None:
    data = RisingStream()
    run = NotedRun(data={"num_workers": workers}).train(data, between=data.rise)
    assert [{number for number, _ in samples} for samples in run.samples.values()] == [{0}, {1}, {2}]


class Draws(NumberedSamples):
    """Chooses a number for each epoch at random."""

    def set_epoch(self, epoch: int) -> None:
        self.epoch = int(torch.randint(1000, ()))

    def __len__(self) -> int:
        return 4


def test_sampler_of_a_resumed_run_draws_the_same_and_changes_no_random_state(
    tmp_path: Path,
) -> None:
    whole = NotedRun(data={"shuffle": False}).train(Draws([]))
    NotedRun(tmp_path, data={"shuffle": False}).train(Draws([]), until=1)
    torch.rand(3)
    second = NotedRun(tmp_path, data={"shuffle": False}).train(Draws([]))
    assert [second.samples[epoch] for epoch in (1, 2)] == [whole.samples[epoch] for epoch in (1, 2)]
    assert len({samples[0] for samples in whole.samples.values()}) == 3
    before = torch.get_rng_state()
    assert scheduler_steps(whole.config, Draws([])) == 3
    assert torch.equal(torch.get_rng_state(), before)


class GrowsAtEvaluations(Callback):
    """Notes the mean number of each evaluation, and lets the data grow after it."""

    def __init__(self, data: GrowingSamples) -> None:
        self.data = data
        self.means: list[float] = []

    def on_evaluate(self, trainer: Any, metrics: dict[str, float]) -> None:
        self.means.append(metrics["mean"])
        self.data.grow()


@pytest.mark.parametrize("workers", [0, 1])
def test_evaluation_uses_every_sample_that_the_dataset_has_then(workers: int) -> None:
    grows = GrowsAtEvaluations(GrowingSamples())
    model = nn.Linear(2, 1)
    trainer = Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=1e-3),
        lambda model, batch: model(batch).square().mean(),
        TrainerConfig(epochs=3, global_batch_size=5, data={"num_workers": workers}),
        metrics={"mean": lambda output, batch: batch[:, 0].mean()},
        callbacks=[grows],
    )
    trainer.fit(torch.ones(10, 2), grows.data)
    assert grows.means == pytest.approx([0, 8 / 12, (8 * 2 + 4) / 16])
