"""Values that user code logs: exact means in rows and metrics, and none of what does not count."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ddp_kit import Callback, ConfigError, JSONLinesLogger, LearningRateSearch, LogRow, Loss, Trainer, TrainerConfig
from tests.support.toys import linear_layer, trainer_for

X = torch.arange(10.0, dtype=torch.float64).reshape(10, 1)


def logging_trainer(log: Any, **settings: Any) -> Trainer:
    """Steps of 4, 4 and 2 samples in micro-batches of 2, in order; a row after each epoch."""

    def loss_fn(model: nn.Module, batch: tuple[Tensor]) -> Tensor:
        log(trainer, batch[0])
        loss: Tensor = model(batch[0]).mean()
        return loss

    sizes = {"epochs": 2, "global_batch_size": 4, "micro_batch_size": 2, "log_every_steps": 3}
    settings = sizes | {"data": {"shuffle": False}} | settings
    trainer = trainer_for(model=linear_layer(1).double(), loss_fn=loss_fn, **settings)
    return trainer


def test_logged_values_of_rows_are_means_over_samples_or_weights() -> None:
    def log(trainer: Trainer, x: Tensor) -> None:
        trainer.log({"mean": x.mean(), "weighted": Loss((x * x).sum(), x.sum()), "number": float(x.max())})

    result = logging_trainer(log).fit(TensorDataset(X))
    for row in result.history:
        assert row.values == pytest.approx(
            {"mean": 4.5, "weighted": float((X * X).sum() / X.sum()), "number": (1 + 3 + 5 + 7 + 9) / 5}
        )
    assert "  mean 4.5" in str(result.history[0])


def test_logged_values_outside_the_loss_function_count_once_per_call() -> None:
    class Logs(Callback):
        def on_step(self, trainer: Any) -> None:
            trainer.log({"reward": trainer.step})

    trainer = logging_trainer(lambda trainer, x: trainer.log({"mean": x.mean()}))
    trainer._run = replace(trainer._run, callbacks=(Logs(),))
    result = trainer.fit(TensorDataset(X), TensorDataset(X[:6] + 100))
    assert [row.values["reward"] for row in result.history] == [2, 5]
    assert [row.values["mean"] for row in result.history] == [4.5, 4.5]
    assert result.metrics["mean"] == 102.5
    assert trainer.evaluate(TensorDataset(X))["mean"] == 4.5
    trainer.predict(TensorDataset(X))
    assert not trainer._run.logged.take()


def test_logged_values_of_repeated_or_skipped_steps_do_not_count() -> None:
    def log(trainer: Trainer, x: Tensor) -> None:
        trainer.log({"mean": x.mean()})

    data = X.clone()
    data[5] = float("nan")
    rows = logging_trainer(log, non_finite_gradients="skip").fit(TensorDataset(data)).history
    assert [row.values["mean"] for row in rows] == pytest.approx([(0 + 1 + 2 + 3 + 8 + 9) / 6] * 2)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        (3.0, "trainer.log got a float"),
        ({"loss": 1.0}, "reserved for a value that ddpkit logs"),
        ({"": 1.0}, "got the name ''"),
        ({"two": torch.ones(2)}, "a tensor of shape (2,) for 'two', not a single number"),
        ({"text": "high"}, "a str for 'text'"),
    ],
)
def test_logged_value_that_is_not_a_named_number_is_refused(values: Any, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        logging_trainer(lambda *_: None).log(values)
    assert words in str(caught.value)


def test_log_row_has_the_learning_rates_of_all_groups() -> None:
    rows: list[LogRow] = []

    class Keeps(Callback):
        def on_log(self, trainer: Any, row: LogRow) -> None:
            rows.append(row)

    model = nn.Linear(1, 1).double()
    optimizer = torch.optim.SGD([{"params": [model.weight], "lr": 0.1}, {"params": [model.bias], "lr": 0.2}])
    config = TrainerConfig(max_steps=1, log_every_steps=1)
    Trainer(model, optimizer, lambda model, batch: model(batch[0]).mean(), config, callbacks=[Keeps()]).fit(
        TensorDataset(X)
    )
    assert (rows[0].learning_rate, rows[0].learning_rates) == (0.1, (0.1, 0.2))


@pytest.mark.parametrize(
    "settings",
    [
        {"non_finite_gradients": "skip"},
        {"non_finite_gradients": "skip", "max_grad_norm": 1.0},
        {"non_finite_gradients": "skip", "accumulation_steps": 2, "micro_batch_size": 2},
        {"precision": "fp16"},
        {"precision": "fp16", "non_finite_gradients": "skip"},
    ],
    ids=str,
)
def test_gradient_norm_of_a_skipped_step_is_not_a_number(settings: dict[str, Any], tmp_path: Path) -> None:
    """Not 0.0, as if the gradient were zero. The norms of other steps are not affected."""
    data = torch.ones(12, 1)
    fp16 = settings.get("precision") == "fp16"
    data[4:8] = 6e4 if fp16 else torch.inf  # in fp16, the loss is finite, but its scaled gradient is not
    model = nn.Linear(1, 1)
    logger = JSONLinesLogger(tmp_path / "rows.jsonl")
    fixed = {"max_steps": 3, "global_batch_size": 4, "log_every_steps": 1, "data": {"shuffle": False}}
    trainer = Trainer(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        lambda model, batch: model(batch[0]).float().abs().mean() * 1e-3,
        TrainerConfig(**fixed | settings),
        callbacks=[logger],
    )
    result = trainer.fit(TensorDataset(data))
    assert result.skipped == 1
    first, skipped, last = (row.grad_norm for row in result.history)
    assert first > 0 < last
    assert not math.isfinite(skipped)
    assert math.isfinite(last)
    rows = [json.loads(line)["grad_norm"] for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert rows == [first, None, last]


def test_repr_of_a_result_is_short() -> None:
    trainer = logging_trainer(lambda *_: None, epochs=200, log_every_steps=1)
    result = trainer.fit(TensorDataset(X))
    assert len(result.history) == 600
    for text in (str(result), repr(result), f"{result}"):
        assert text.startswith("FitResult(steps=600, samples=2000, loss=")
        assert "history=<600 rows>, skipped=0, metrics={}" in text
        assert len(text) < 200
    search = LearningRateSearch(tuple(range(100)), tuple(range(100)), 0.1)
    assert repr(search) == "LearningRateSearch(rates=<100 rates>, losses=<100 losses>, suggestion=0.1)"
