"""The functions in `data`: collate_fn, and transforms of batches on the device."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from ddp_kit import ConfigError, DataError, Trainer, TrainerConfig
from tests.support.toys import SampleStream

VALUES = torch.arange(1.0, 25.0)


class Ragged(Dataset[Tensor]):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Tensor:
        return VALUES[index].repeat(1 + index % 3)


class RaggedStream(IterableDataset[Tensor]):
    def __iter__(self) -> Any:
        return map(Ragged().__getitem__, range(24))


def noisy(batch: list[Tensor]) -> list[Tensor]:
    return [batch[0] + torch.rand(len(batch[0]))]


class RecordedRun:
    """A run whose batches are recorded."""

    def __init__(self, folder: Path | None = None, seed_samples: bool = False, **settings: Any) -> None:
        torch.manual_seed(0)
        self.batches: list[Any] = []
        model = nn.Sequential(nn.Linear(1, 4), nn.Dropout(0.5), nn.Linear(4, 1))
        config = TrainerConfig(
            data={"seed_samples": seed_samples, **settings.pop("data", {})},
            checkpoint={"dir": folder},
            **{"global_batch_size": 4, "accumulation_steps": 2} | settings,
        )
        self.trainer = Trainer(model, lambda parameters: torch.optim.SGD(parameters, lr=1e-3), self._loss, config)

    def _loss(self, model: nn.Module, batch: Any) -> Tensor:
        values = batch[0] if isinstance(batch, list | tuple) else batch
        self.batches.append(values.clone())
        return model(values.reshape(-1, 1)).square().mean()

    @property
    def weights(self) -> list[Tensor]:
        return [*self.trainer.model.parameters()]


@pytest.mark.parametrize("data", [Ragged(), RaggedStream()], ids=["dataset", "stream"])
@pytest.mark.parametrize("workers", [0, 1])
def test_collate_fn_of_the_settings_makes_the_batches(data: Any, workers: int) -> None:
    def padded(samples: list[Tensor]) -> Tensor:
        return pad_sequence(samples, batch_first=True)

    run = RecordedRun(max_steps=3, data={"collate_fn": padded, "shuffle": False, "num_workers": workers})
    run.trainer.fit(data, Ragged())
    assert run.batches[2].tolist() == [[3, 3, 3], [4, 0, 0]]  # the first is of the rehearsal


def test_two_collate_functions_are_refused() -> None:
    run = RecordedRun(max_steps=1, data={"collate_fn": list, "shuffle": False}, global_batch_size=None)
    loader = DataLoader(Ragged(), batch_size=2, collate_fn=tuple)
    with pytest.raises(ConfigError, match="both the DataLoader and data.collate_fn set a collate function"):
        run.trainer.fit(loader)


def test_functions_in_the_settings_are_not_saved() -> None:
    config = TrainerConfig(data={"collate_fn": list, "device_transform": noisy})
    assert not {"collate_fn", "device_transform"} & config.model_dump()["data"].keys()
    assert "collate_fn" not in str(TrainerConfig.model_json_schema())
    with pytest.raises(ConfigError, match=r"data.collate_fn.*'pad'.*callable"):
        TrainerConfig(data={"collate_fn": "pad"})  # type: ignore[typeddict-item]


def test_transforms_draw_separately_and_resume_with_the_same_numbers(tmp_path: Path) -> None:
    data = TensorDataset(VALUES)
    whole = RecordedRun(epochs=2, data={"device_transform": noisy})
    whole.trainer.fit(data)
    assert len({batch.sum().item() for batch in whole.batches}) == 24
    split = RecordedRun(tmp_path, max_steps=4, data={"device_transform": noisy})
    split.trainer.fit(data)
    rest = RecordedRun(tmp_path, epochs=2, data={"device_transform": noisy})
    rest.trainer.fit(data)
    assert all(map(torch.equal, [*split.batches, *rest.batches], whole.batches))
    assert all(map(torch.equal, rest.weights, whole.weights))
    plain = RecordedRun(epochs=2, data={"device_transform": lambda batch: (torch.rand(5), batch)[1]})
    plain.trainer.fit(data)
    bare = RecordedRun(epochs=2)
    bare.trainer.fit(data)
    assert all(map(torch.equal, plain.weights, bare.weights))  # dropout draws what it draws without a transform


@pytest.mark.parametrize("workers", [0, 1])
def test_transform_of_a_seeded_sample_does_not_depend_on_its_batch(workers: int) -> None:
    seen = {}
    for size, passes in ((4, 1), (8, 2), (6, 3)):
        run = RecordedRun(
            epochs=1,
            seed_samples=True,
            global_batch_size=size,
            accumulation_steps=passes,
            data={"device_transform": noisy, "num_workers": workers},
        )
        run.trainer.fit(TensorDataset(VALUES))
        seen[size] = sorted(torch.cat(run.batches).tolist())
    assert seen[4] == seen[8] == seen[6]
    assert seen[4] != VALUES.tolist()


def test_evaluation_uses_its_own_transform() -> None:
    data = {"device_transform": noisy, "eval_device_transform": lambda batch: [-batch[0]], "shuffle": False}
    run = RecordedRun(max_steps=1, data=data, sanity_check="off")
    run.trainer.fit(TensorDataset(VALUES))
    assert run.trainer.predict(TensorDataset(VALUES), lambda model, batch: batch[0]).tolist() == (-VALUES).tolist()
    run.batches.clear()
    run.trainer.evaluate(TensorDataset(VALUES))
    assert torch.cat(run.batches).tolist() == (-VALUES).tolist()


@pytest.mark.parametrize("workers", [0, 1])
def test_users_loader_over_a_stream_makes_the_batches(workers: int) -> None:
    run = RecordedRun(max_steps=2, global_batch_size=None, accumulation_steps=1)
    run.trainer.fit(
        DataLoader(SampleStream(VALUES), batch_size=3, num_workers=workers),
        DataLoader(SampleStream(VALUES), batch_size=5),
    )
    assert [batch.tolist() for batch in run.batches[:2]] == [[1, 2, 3], [4, 5, 6]]


def test_pipeline_around_a_loader_is_refused() -> None:
    class Pipeline(SampleStream):
        pipeline = [DataLoader(SampleStream(VALUES), batch_size=4)]

    with pytest.raises(DataError, match="train_data is a Pipeline around a DataLoader, which yields whole batches"):
        RecordedRun(max_steps=1).trainer.fit(Pipeline(VALUES))
