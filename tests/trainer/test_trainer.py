"""The loop in one process; what several ranks make of it is in end_to_end."""

import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, Dataset, TensorDataset

from ddp_kit import (
    Callback,
    ConfigError,
    DataConfig,
    DataError,
    FitResult,
    LogRow,
    Loss,
    LossError,
    Trainer,
    TrainerConfig,
)
from tests.support.toys import sgd, small_network, squared_error


def regression(samples: int, seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 3, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randn(samples, 1, generator=generator, dtype=torch.float64))


def network64() -> nn.Module:
    return small_network().double()


def sample_weights(batch: tuple[Tensor, Tensor]) -> Tensor:
    """Another weight for each sample; some weigh nothing."""
    return (batch[0][:, 0] * 3).round().clamp(min=0)


def error_with_weights(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Loss:
    x, y = batch
    weights = sample_weights(batch)
    return Loss(((model(x) - y).squeeze(1) ** 2 * weights).sum(), weight=weights.sum())


momentum_sgd = sgd(0.01, momentum=0.9)


def fitted(config: TrainerConfig, data: Any, loss: Callable[..., Any] = squared_error, **options: Any) -> Trainer:
    trainer = Trainer(network64(), options.pop("optimizer", momentum_sgd), loss, config, **options)
    trainer.fit(data)
    return trainer


def fitted_by_hand(
    data: TensorDataset, global_batch: int, epochs: int, weighted: bool, clip: float | None
) -> nn.Module:
    """The loop that anyone would write for one process that holds the whole global batch."""
    model = network64()
    optimizer = momentum_sgd(model.parameters())
    for _ in range(epochs):
        for start in range(0, len(data), global_batch):
            x, y = data[start : start + global_batch]
            errors = (model(x) - y).squeeze(1) ** 2
            weights = sample_weights((x, y)) if weighted else torch.ones(len(x), dtype=torch.float64)
            loss = (errors * weights).sum() / weights.sum() if weights.sum() else (errors * weights).sum()
            optimizer.zero_grad()
            loss.backward()
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
    return model


@settings(max_examples=60)
@example(samples=29, global_batch=1, accumulation=1, epochs=2, weighted=False, clip=None)
@given(
    samples=st.integers(1, 40),
    global_batch=st.integers(1, 24),
    accumulation=st.integers(1, 5),
    epochs=st.integers(1, 2),
    weighted=st.booleans(),
    clip=st.none() | st.just(0.3),
)
def test_step_equals_one_on_the_whole_global_batch(
    samples: int, global_batch: int, accumulation: int, epochs: int, weighted: bool, clip: float | None
) -> None:
    data = regression(samples)
    config = TrainerConfig(
        epochs=epochs,
        global_batch_size=global_batch,
        accumulation_steps=accumulation,
        max_grad_norm=clip,
        data=DataConfig(shuffle=False),
    )
    trainer = fitted(config, data, error_with_weights if weighted else squared_error)
    expected = fitted_by_hand(data, global_batch, epochs, weighted, clip)
    for ours, theirs in zip(trainer.model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_fit_result_counts_steps_and_samples_and_has_a_row_per_interval() -> None:
    trainer = Trainer(
        network64(),
        momentum_sgd,
        squared_error,
        TrainerConfig(epochs=2, global_batch_size=8, log_every_steps=4),
    )
    result = trainer.fit(regression(21))
    assert (result.steps, result.samples, trainer.step, trainer.epoch) == (6, 42, 6, 2)
    assert [row.step for row in result.history] == [4, 6]
    assert result.loss == result.history[-1].loss
    assert [row.epoch for row in result.history] == [1, 1]
    assert all(row.samples_per_second > 0 and row.step_seconds >= row.data_seconds > 0 for row in result.history)


def test_logged_loss_is_the_mean_over_the_samples_of_the_interval() -> None:
    data = regression(10)
    config = TrainerConfig(global_batch_size=4, log_every_steps=3, data=DataConfig(shuffle=False))
    trainer = Trainer(network64(), lambda p: torch.optim.SGD(p, lr=0.0), squared_error, config)
    expected = squared_error(network64(), data[:]).item()
    assert trainer.fit(data).loss == pytest.approx(expected, abs=1e-15)
    assert trainer.evaluate(data) == {"loss": pytest.approx(expected, abs=1e-15)}


@pytest.mark.parametrize(
    ("limits", "steps"), [({"epochs": 3}, 9), ({"max_steps": 5}, 5), ({"epochs": 1, "max_steps": 5}, 3), ({}, 3)]
)
def test_run_ends_at_the_first_limit(limits: dict[str, int], steps: int) -> None:
    assert fitted(TrainerConfig(global_batch_size=4, **limits), regression(10)).step == steps


def test_steps_interrupted_continue_where_they_were_left() -> None:
    data = regression(23)
    config = TrainerConfig(epochs=3, global_batch_size=5, log_every_steps=2)
    whole = fitted(config, data)
    parts = Trainer(network64(), momentum_sgd, squared_error, config)
    while parts.epoch < 3:
        for step in parts.steps(data):
            if step.number % 4 == 0:
                break
    assert parts.step == whole.step == 15
    for ours, theirs in zip(parts.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_steps_yields_number_epoch_and_samples() -> None:
    trainer = Trainer(
        network64(),
        momentum_sgd,
        squared_error,
        TrainerConfig(epochs=2, global_batch_size=4, log_every_steps=2),
    )
    steps = list(trainer.steps(regression(6)))
    assert [(step.number, step.epoch, step.samples, step.ends_epoch) for step in steps] == [
        (1, 0, 4, False),
        (2, 0, 2, True),
        (3, 1, 4, False),
        (4, 1, 2, True),
    ]
    assert [step.log is not None for step in steps] == [False, True, False, True]


def test_scheduler_steps_once_per_optimizer_step() -> None:
    rates: list[float] = []

    class Watch(Callback):
        def on_log(self, trainer: Trainer, row: LogRow) -> None:
            rates.append(row.learning_rate)

    config = TrainerConfig(max_steps=3, global_batch_size=8, accumulation_steps=4, log_every_steps=1)
    fitted(config, regression(24), scheduler=lambda o: LambdaLR(o, lambda tick: 1 / (1 + tick)), callbacks=[Watch()])
    assert rates == pytest.approx([0.01, 0.01 / 2, 0.01 / 3])


def test_scheduler_does_not_step_if_fp16_skipped_the_step() -> None:
    def overflowing(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        return squared_error(model, batch) * 1e35  # finite, and infinite once it is scaled

    trainer = Trainer(
        network64().float(),
        momentum_sgd,
        overflowing,
        TrainerConfig(max_steps=2, precision="fp16", global_batch_size=4),
        scheduler=lambda optimizer: LambdaLR(optimizer, lambda tick: 0.5**tick),
    )
    data = TensorDataset(*(tensor.float() for tensor in regression(8).tensors))
    trainer.fit(data)
    assert trainer.scheduler is not None
    assert trainer.scheduler.last_epoch == 0


def test_callbacks_are_called_for_every_event_in_order() -> None:
    heard: list[str] = []

    class Listener(Callback):
        def on_fit_start(self, trainer: Trainer) -> None:
            heard.append("start")

        def on_step(self, trainer: Trainer) -> None:
            heard.append("step")

        def on_log(self, trainer: Trainer, row: LogRow) -> None:
            heard.append(f"log {row.step}")

        def on_evaluate(self, trainer: Trainer, metrics: dict[str, float]) -> None:
            heard.append(f"evaluate {sorted(metrics)}")

        def on_fit_end(self, trainer: Trainer, result: FitResult) -> None:
            heard.append(f"end {result.steps}")

    trainer = Trainer(
        network64(),
        momentum_sgd,
        squared_error,
        TrainerConfig(global_batch_size=4, log_every_steps=2),
        callbacks=[Listener()],
    )
    trainer.fit(regression(8), regression(4))
    assert heard == ["start", "step", "step", "log 2", "evaluate ['loss']", "end 2"]


def test_evaluation_runs_when_due_and_always_at_the_end() -> None:
    due: list[int] = []

    class Watch(Callback):
        def on_evaluate(self, trainer: Trainer, metrics: dict[str, float]) -> None:
            due.append(trainer.step)

    config = TrainerConfig(epochs=2, global_batch_size=4, eval_every_steps=3)
    Trainer(network64(), momentum_sgd, squared_error, config, callbacks=[Watch()]).fit(regression(14), regression(3))
    assert due == [3, 6, 8]


@pytest.mark.parametrize("samples", [1, 7, 33])
def test_metrics_get_the_models_output_and_count_each_sample_once(samples: int) -> None:
    data = regression(samples)
    trainer = Trainer(
        network64(),
        momentum_sgd,
        squared_error,
        TrainerConfig(global_batch_size=4),
        metrics={
            "absolute": lambda output, batch: (output - batch[1]).abs().mean(),
            "share above": lambda output, batch: Loss((output > batch[1]).double().sum(), weight=len(output)),
        },
    )
    output = trainer.model(data.tensors[0])
    assert trainer.evaluate(data) == pytest.approx(
        {
            "loss": F.mse_loss(output, data.tensors[1]).item(),
            "absolute": (output - data.tensors[1]).abs().mean().item(),
            "share above": (output > data.tensors[1]).double().mean().item(),
        },
        abs=1e-14,
    )


def test_evaluation_restores_the_mode_of_every_module() -> None:
    model = nn.Sequential(nn.Linear(3, 4).double(), nn.BatchNorm1d(4).double().eval(), nn.Linear(4, 1).double())
    trainer = Trainer(model, momentum_sgd, squared_error, TrainerConfig(global_batch_size=4))
    trainer.evaluate(regression(8))
    assert [module.training for module in model.modules()] == [True, True, False, True]


def test_fit_with_the_users_loader_uses_its_collate_function() -> None:
    seen: list[int] = []

    def collate(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        seen.append(len(samples))
        return torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])

    fitted(TrainerConfig(micro_batch_size=5), DataLoader(regression(12), batch_size=5, collate_fn=collate))
    assert seen == [5, 5, 2]


def test_fit_draws_the_same_random_numbers_in_every_run() -> None:
    class Noisy(Dataset[tuple[Tensor, Tensor]]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            return torch.rand(3, dtype=torch.float64), torch.tensor([random.random()], dtype=torch.float64)

    first, second = (fitted(TrainerConfig(global_batch_size=4, seed=5), Noisy()) for _ in range(2))
    for ours, theirs in zip(first.model.parameters(), second.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_fit_with_bf16_true_converts_the_batch() -> None:
    types: set[torch.dtype] = set()

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        types.update((batch[0].dtype, model(batch[0]).dtype))
        return squared_error(model, batch)

    fitted(TrainerConfig(precision="bf16-true", global_batch_size=4), regression(8), loss)
    assert types == {torch.bfloat16}


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        ({"optimizer": lambda p: "adam"}, ConfigError, "the function passed as optimizer returned a str"),
        ({"scheduler": lambda o: o}, ConfigError, "the function passed as scheduler returned an SGD"),
        ({"scheduler": 0.1}, ConfigError, "scheduler is a float, not an LRScheduler"),
        ({"callbacks": [print]}, ConfigError, "callbacks contains a builtin_function_or_method"),
        ({"callbacks": None}, ConfigError, "callbacks is None"),
        ({"metrics": {"error": lambda output: output}}, ConfigError, "'error' takes .output., but it is called with"),
        ({"loss": nn.MSELoss}, ConfigError, "loss_fn is the class MSELoss"),
        ({"loss": F.mse_loss}, ConfigError, "loss_fn is torch's mse_loss"),
    ],
)
def test_trainer_with_unsuitable_arguments_is_refused(
    change: dict[str, Any], error: type[Exception], said: str
) -> None:
    with pytest.raises(error, match=said):
        fitted(TrainerConfig(global_batch_size=4), regression(8), **change)


def test_loss_function_that_changes_its_return_type_raises_error() -> None:
    calls = iter([squared_error, error_with_weights])
    with pytest.raises(LossError, match="a plain tensor at some steps and a Loss at others"):
        fitted(TrainerConfig(global_batch_size=4), regression(8), lambda *given: next(calls)(*given))


def test_metric_without_the_models_output_raises_error() -> None:
    trainer = Trainer(
        network64(),
        momentum_sgd,
        lambda model, batch: model[0].weight.sum(),
        metrics={"any": lambda output, batch: output},
    )
    with pytest.raises(LossError, match="did not call the model"):
        trainer.evaluate(regression(2))


def test_step_with_weight_zero_everywhere_leaves_the_weights_unchanged() -> None:
    trainer = Trainer(
        network64(),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        lambda model, batch: Loss(squared_error(model, batch) * 0, weight=0),
        TrainerConfig(global_batch_size=4),
    )
    result = trainer.fit(regression(4))
    assert math.isnan(result.loss)
    for ours, theirs in zip(trainer.model.parameters(), network64().parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_optimizer_with_a_parameter_outside_the_model_is_refused() -> None:
    temperature = nn.Parameter(torch.ones(1))
    with pytest.raises(ConfigError, match="holds 1 parameters that the model does not have"):
        Trainer(network64(), lambda parameters: momentum_sgd([*parameters, temperature]), squared_error)


def test_unfreezing_after_the_trainer_was_made_is_refused() -> None:
    model = network64()
    model[0].weight.requires_grad_(False)
    trainer = Trainer(model, momentum_sgd, squared_error, TrainerConfig(max_steps=2))
    next(trainer.steps(regression(64)))
    model[0].weight.requires_grad_(True)
    with pytest.raises(ConfigError, match="frozen or unfrozen"):
        trainer.fit(regression(64))


def test_gradients_from_before_fit_do_not_enter_the_first_step() -> None:
    data, config = regression(8), TrainerConfig(max_steps=1, global_batch_size=8)
    model = network64()
    squared_error(model, data[:]).backward()
    Trainer(model, momentum_sgd, squared_error, config).fit(data)
    for ours, theirs in zip(model.parameters(), fitted(config, data).model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_step_that_failed_leaves_no_gradients() -> None:
    data, config = regression(8), TrainerConfig(max_steps=1, global_batch_size=8, accumulation_steps=2)
    calls = iter([squared_error, None])  # the second micro-batch fails

    def failing(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        function = next(calls, squared_error)
        if function is None:
            raise ZeroDivisionError
        return function(model, batch)

    trainer = Trainer(network64(), momentum_sgd, failing, config)
    with pytest.raises(ZeroDivisionError):
        trainer.fit(data)
    trainer.fit(data)
    for ours, theirs in zip(trainer.model.parameters(), fitted(config, data).model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_steps_in_several_loops_continue_the_random_numbers() -> None:
    drawn: list[float] = []

    def noisy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        drawn.append(torch.rand(()).item())
        return squared_error(model, batch)

    trainer = Trainer(network64(), momentum_sgd, noisy, TrainerConfig(global_batch_size=2))
    for _ in range(4):
        next(trainer.steps(regression(8)))
    assert len(set(drawn)) == 4


def test_fit_with_other_data_in_mid_epoch_is_refused() -> None:
    trainer = Trainer(network64(), momentum_sgd, squared_error, TrainerConfig(max_steps=100, global_batch_size=2))
    steps = trainer.steps(regression(20))
    for _ in range(8):
        next(steps)
    with pytest.raises(DataError, match="after 8 steps of epoch 1, .*: the number of its steps was 10 and is now 5"):
        trainer.fit(regression(10))


def test_callbacks_see_the_completed_step_counted() -> None:
    seen: list[tuple[str, int]] = []

    class Watch(Callback):
        def on_step(self, trainer: Trainer) -> None:
            seen.append(("step", trainer.step))

        def on_log(self, trainer: Trainer, row: LogRow) -> None:
            seen.append(("log", row.step))

    fitted(TrainerConfig(max_steps=2, global_batch_size=4, log_every_steps=1), regression(8), callbacks=[Watch()])
    assert seen == [("step", 1), ("log", 1), ("step", 2), ("log", 2)]


def test_fit_with_no_steps_left_still_evaluates() -> None:
    trainer = fitted(TrainerConfig(global_batch_size=4), regression(8))
    result = trainer.fit(regression(8), regression(3))
    assert result.history == ()
    assert set(result.metrics) == {"loss"}


def test_model_wrapped_in_ddp_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/meeting", rank=0, world_size=1)
    try:
        wrapped = nn.parallel.DistributedDataParallel(network64())
        with pytest.raises(ConfigError, match="wrapped in DistributedDataParallel"):
            Trainer(wrapped, momentum_sgd, squared_error)
    finally:
        torch.distributed.destroy_process_group()


def test_model_wrapped_in_fsdp_is_refused_and_a_compiled_one_is_not() -> None:
    class FSDPModule(nn.Linear):
        """What fully_shard makes a module's class derive from has this name."""

    with pytest.raises(ConfigError, match="the module 0 of the model is wrapped in FSDPModule"):
        Trainer(nn.Sequential(FSDPModule(2, 1)), momentum_sgd, squared_error)
    Trainer(torch.compile(network64(), backend="eager"), momentum_sgd, squared_error)


def test_steps_loop_replaced_by_another_raises_error() -> None:
    trainer = Trainer(network64(), momentum_sgd, squared_error, TrainerConfig(global_batch_size=2, epochs=3))
    first = trainer.steps(regression(8))
    next(first)
    next(trainer.steps(regression(8)))
    with pytest.raises(DataError, match="another loop over steps.. was started"):
        next(first)


def test_deterministic_allows_only_deterministic_algorithms() -> None:
    try:
        fitted(TrainerConfig(global_batch_size=4, deterministic=True), regression(8))
        assert torch.are_deterministic_algorithms_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_step_that_is_not_finite_is_skipped_if_so_configured(precision: str) -> None:
    def sometimes_nan(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        loss = squared_error(model, batch) * 1e-3  # or the scaling of fp16 overflows in its first steps
        return loss * float("nan") if trainer.step == 2 else loss

    data = TensorDataset(*(tensor.float() for tensor in regression(20).tensors))
    config = TrainerConfig(
        global_batch_size=4,
        log_every_steps=5,
        non_finite_gradients="skip",
        precision=precision,
        data=DataConfig(shuffle=False),
    )
    trainer = Trainer(network64().float(), lambda p: torch.optim.SGD(p, lr=0.0), sometimes_nan, config)
    result = trainer.fit(data)
    assert (result.steps, result.skipped) == (5, 1)
    assert math.isfinite(result.loss)


def test_evaluation_waits_for_data_do_not_count_in_step_times() -> None:
    class Slow(Dataset[tuple[Tensor, Tensor]]):
        def __len__(self) -> int:
            return 64

        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            return torch.randn(300, 300).mm(torch.randn(300, 300))[0, :3].double(), torch.zeros(1).double()

    config = TrainerConfig(epochs=2, global_batch_size=8, log_every_steps=1)
    history = Trainer(network64(), momentum_sgd, squared_error, config).fit(regression(8), Slow()).history
    assert all(row.data_seconds <= row.step_seconds for row in history)


class Words(nn.Module):
    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.words = nn.Embedding(7, 3, sparse=sparse, dtype=torch.float64)
        self.last = nn.Linear(3, 1, dtype=torch.float64)

    def forward(self, words: Tensor) -> Any:
        return self.last(self.words(words))


@pytest.mark.parametrize("weighted", [False, True])
def test_sparse_gradients_are_measured_weighted_and_clipped_like_dense_ones(weighted: bool) -> None:
    data = TensorDataset(torch.arange(12) % 5, torch.randn(12, 1, dtype=torch.float64))

    def loss_fn(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor | Loss:
        errors = (model(batch[0]) - batch[1]) ** 2
        return Loss(errors.sum(), weight=2 * len(errors)) if weighted else errors.mean()

    config = TrainerConfig(global_batch_size=4, accumulation_steps=2, max_grad_norm=0.1, log_every_steps=1)
    found = []
    for sparse in (True, False):
        trainer = Trainer(Words(sparse), lambda parameters: torch.optim.SGD(parameters, lr=0.1), loss_fn, config)
        norms = [row.grad_norm for row in trainer.fit(data).history]
        found.append([*norms, *nn.utils.parameters_to_vector(trainer.model.parameters()).tolist()])
    assert found[0] == pytest.approx(found[1], abs=1e-12)


def test_run_stopped_at_a_log_point_has_all_its_rows() -> None:
    class StopAt(Callback):
        def on_evaluate(self, trainer: Any, metrics: dict[str, float]) -> None:
            trainer.stop()

    config = TrainerConfig(global_batch_size=4, log_every_steps=2, eval_every_steps=4, epochs=3)
    trainer = Trainer(network64(), momentum_sgd, squared_error, config, callbacks=[StopAt()])
    trainer._run.log_points._reads_late = True  # as on a GPU
    result = trainer.fit(regression(40), regression(8))
    assert [row.step for row in result.history] == [2, 4]
    assert result.loss == result.history[-1].loss


def test_users_loader_sets_the_micro_batch_if_the_configuration_does_not() -> None:
    trainer = fitted(TrainerConfig(accumulation_steps=2), DataLoader(regression(12), batch_size=3))
    assert (trainer.batch_plan.micro_batch, trainer.batch_plan.global_batch, trainer.step) == (3, 6, 2)
