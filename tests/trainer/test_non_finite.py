"""The error of a loss that is not finite names the module and the samples; several ranks: end_to_end/not_finite.py."""

import math
from collections import UserDict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset

from ddp_kit import Loss, LossError, Trainer, TrainerConfig, Update
from ddp_kit.trainer import step_loss
from ddp_kit.trainer.non_finite import PassNote, cause_alone, part_of
from tests.support.toys import sgd, small_network, squared_error, trainer_for


def data_with_nan(samples: int = 24, bad: int | None = 13, value: float = math.nan) -> TensorDataset:
    x = torch.randn(samples, 3, generator=torch.Generator().manual_seed(0))
    if bad is not None:
        x[bad, 1] = value
    return TensorDataset(x, x.nan_to_num(0, 0, 0).sum(dim=1, keepdim=True))


def ordered_trainer(model: nn.Module, loss: Any = squared_error, **settings: Any) -> Trainer:
    settings = {"global_batch_size": 6, "epochs": 1, "log_every_steps": 4, "data": {"shuffle": False}} | settings
    return trainer_for(model=model, loss_fn=loss, optimizer=sgd(0.01), **settings)


def message_of(trainer: Trainer, data: Any = None) -> str:
    with pytest.raises(LossError) as caught:
        trainer.fit(data_with_nan() if data is None else data)
    return str(caught.value)


def network_with(*layers: nn.Module) -> nn.Module:
    return small_network(3, 4, *layers or [nn.Identity()])


@pytest.mark.parametrize("accumulation", [1, 3])
def test_nan_sample_in_a_later_step_is_named_with_the_first_module(accumulation: int) -> None:
    message = message_of(ordered_trainer(network_with(nn.Dropout(0.5)), accumulation_steps=accumulation))
    assert "from step 3 on, first on rank 0\n  its pass was repeated: " in message
    assert "the first module whose output is not finite is 0 (Linear); it comes from sample 13 of train_data" in message
    assert "the micro-batch has values that are not finite; the largest absolute value before it is" in message


def test_nan_sample_in_the_first_step_is_named() -> None:
    message = message_of(ordered_trainer(network_with()), data_with_nan(bad=2))
    assert "the loss is nan in the first step of this run, on rank 0\n" in message
    assert "is 0 (Linear); it comes from sample 2 of train_data alone" in message


def test_large_sample_is_named_with_the_module_that_overflows() -> None:
    class Cube(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x**3

    message = message_of(
        ordered_trainer(nn.Sequential(nn.Identity(), Cube(), nn.Linear(3, 1))), data_with_nan(value=1e20)
    )
    assert "the first module whose output is not finite is 1 (Cube); it comes from sample 13 of train_data" in message
    assert "the largest absolute value before it is 1e+20, in the micro-batch" in message


def test_loss_function_that_computes_nan_itself_is_named() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        factor = math.nan if trainer.step == 2 else 0
        return squared_error(model, batch) + (batch[0].abs() + 1).log().sum().log() * factor

    trainer = ordered_trainer(network_with(), loss)
    message = message_of(trainer, data_with_nan(bad=None))
    assert "the outputs of all modules are finite, but not what the loss function computes from them" in message
    assert "each sample of the micro-batch gives it alone, so look at the weights" in message


def test_weights_that_a_gradient_made_nan_are_named() -> None:
    def loss(model: Any, batch: Any) -> Tensor:
        root = (model[0].weight * (0.0 if trainer.step == 1 else 1.0)).square().sum().sqrt()  # its gradient is NaN at 0
        return squared_error(model, batch) + 0.01 * root

    trainer = ordered_trainer(network_with(), loss)
    message = message_of(trainer, data_with_nan(bad=None))
    assert "from step 3 on" in message
    assert "is 0 (Linear), whose weights are not finite since an earlier update" in message


def test_samples_that_give_it_only_together_are_named_together() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        return model(batch[0] * 0).mean() + batch[0][:, 1].abs().sum()

    data = data_with_nan(bad=None)
    data.tensors[0][13:15, 1] = 2e38  # their sum overflows
    assert "it comes from samples 13, 14 of train_data only together" in message_of(
        ordered_trainer(network_with(), loss), data
    )


def test_samples_that_cannot_be_tried_alone_are_named_together() -> None:
    """BatchNorm needs two samples."""
    message = message_of(ordered_trainer(network_with(nn.BatchNorm1d(4))))
    assert "it comes from samples 13, 14 of train_data, which cannot be tried alone" in message


def test_sample_without_targets_of_its_own_is_not_blamed() -> None:
    """Its own mean is 0 / 0, but not in the whole micro-batch: another module is the origin."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        counted = batch[0][:, 0] > 0
        return (model(batch[0]) - batch[1]).square().mean(dim=1)[counted].mean()

    data = data_with_nan(bad=None)
    data.tensors[0][:, 0] = 1.0
    data.tensors[0][14, 0] = -1.0
    data.tensors[0][13, 1] = math.nan
    assert "is 0 (Linear); it comes from sample 13 of train_data alone;" in message_of(
        ordered_trainer(network_with(), loss), data
    )


def test_module_whose_output_is_infinite_in_good_passes_is_not_named() -> None:
    class Mask(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.full_like(x, -math.inf).triu(1)

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mask, self.inner = Mask(), nn.Linear(3, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.inner(x + self.mask(x).exp())

    assert "is inner (Linear); it comes from sample 13" in message_of(ordered_trainer(Masked()))


def test_loss_function_that_empties_its_batch_is_repeated() -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Loss:
        errors = (model(batch.pop("x")) - batch.pop("y")).square()
        return Loss(errors.sum(), len(errors))

    def collate(samples: Any) -> dict[str, Tensor]:
        return {"x": torch.stack([x for x, _ in samples]), "y": torch.stack([y for _, y in samples])}

    trainer = ordered_trainer(network_with(), loss, data={"shuffle": True, "collate_fn": collate})
    assert "is 0 (Linear); it comes from sample 13 of train_data alone" in message_of(trainer)


def test_sample_of_a_stream_is_named_by_its_position() -> None:
    class Stream(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(data_with_nan())

    message = message_of(ordered_trainer(network_with()), Stream())
    assert "it comes from item 1 of the micro-batch alone" in message


def test_update_whose_loss_is_not_finite_is_named() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": nn.Linear(3, 1), "b": nn.Linear(3, 1)})
    updates = [
        Update(
            name,
            lambda m, batch, name=name: squared_error(m[name], batch),
            torch.optim.SGD(model[name].parameters(), 0.1),
        )
        for name in ("a", "b")
    ]
    config = TrainerConfig(global_batch_size=6, epochs=1, log_every_steps=4, data={"shuffle": False})
    message = message_of(Trainer(model, updates=updates, config=config))
    assert (
        "update 'a' at step 3: its pass was repeated: the first module whose output is not finite is a (Lin" in message
    )


def test_unknown_cause_is_found_by_logging_in_each_step(monkeypatch: pytest.MonkeyPatch) -> None:

    monkeypatch.setattr(step_loss, "can_read_losses", lambda _context: False)  # as on a GPU
    message = message_of(ordered_trainer(network_with()))
    assert "repeated" not in message
    assert "run the same command with log_every_steps=1" in message


@pytest.mark.parametrize("every", [1, 4])
def test_fp16_step_that_overflows_is_skipped_and_not_repeated(every: int, monkeypatch: pytest.MonkeyPatch) -> None:

    def no_cause(*_: object) -> str:
        raise AssertionError("nothing is repeated")

    monkeypatch.setattr(step_loss, "cause_alone", no_cause)

    def loss(model: nn.Module, batch: Any) -> Tensor:
        return squared_error(model, batch) * (1e36 if trainer.step == 2 else 1e-3)  # too large once it is scaled

    trainer = ordered_trainer(network_with(), loss, precision="fp16", log_every_steps=every)
    assert trainer.fit(data_with_nan(bad=None)).skipped == 1


def test_fp16_loss_that_is_not_finite_is_named() -> None:
    message = message_of(
        ordered_trainer(network_with(), lambda *values: squared_error(*values) * 1e-3, precision="fp16")
    )
    assert "is 0 (Linear); it comes from sample 13 of train_data alone" in message


def test_skipped_step_is_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:

    notes: list[object] = []
    monkeypatch.setattr(step_loss, "PassNote", lambda *values: notes.append(values))
    assert ordered_trainer(network_with(), non_finite_gradients="skip").fit(data_with_nan()).skipped == 1
    assert len(notes) == 1, "only before the first pass, whose loss is always read"


def test_repeated_pass_leaves_no_trace_and_draws_the_same_numbers() -> None:
    drawn: list[Tensor] = []

    class Draws(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            drawn.append(torch.rand(3))
            return x

    trainer = ordered_trainer(network_with(Draws(), nn.BatchNorm1d(4)), log_every_steps=100)
    context = trainer._run
    batch = [*data_with_nan()[12:18]]
    note = PassNote(batch, 6, 0, None)
    squared_error(trainer.model, batch)
    state, buffers = torch.get_rng_state(), {name: each.clone() for name, each in trainer.model.named_buffers()}
    assert "0 (Linear)" in cause_alone(context, note, None)
    assert len(drawn) > 2
    assert all(torch.equal(numbers, drawn[0]) for numbers in drawn)
    assert torch.equal(state, torch.get_rng_state())
    for name, buffer in trainer.model.named_buffers():
        assert torch.equal(buffer, buffers[name].nan_to_num()) or torch.equal(
            buffer.nan_to_num(), buffers[name].nan_to_num()
        )


def test_pass_that_gives_another_result_is_said_to_depend_on_something_else() -> None:
    calls = iter([math.nan] + [1.0] * 99)
    trainer = ordered_trainer(network_with(), lambda *values: squared_error(*values) * next(calls))
    assert "its loss was finite: it depends on something else that changes" in message_of(
        trainer, data_with_nan(bad=None)
    )


def test_loss_function_that_writes_to_its_batch_is_named() -> None:
    """Its pass can only be repeated with the batch as it has left it."""

    def loss(model: nn.Module, batch: Any) -> Tensor:
        value = squared_error(model, [batch[0].clone(), batch[1]])
        batch[0].nan_to_num_(0)
        return value

    message = message_of(ordered_trainer(network_with(), loss))
    assert "its pass was repeated, and its loss was finite: the loss function writes to its batch, so the" in message


@pytest.mark.parametrize("by_data", [False, True])
def test_pass_that_writes_weights_is_repeated_after_the_backward_pass(by_data: bool) -> None:
    """A repeated forward pass changes them again, and autograd may need them as they were."""

    class Normalized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.calls = nn.Linear(3, 1), 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            with torch.no_grad():
                weight = self.layer.weight.data if by_data else self.layer.weight
                weight.mul_(0.5)
            return self.layer(x.requires_grad_() * x.detach())

    model = Normalized()
    message = message_of(ordered_trainer(model))
    assert "is layer (Linear); it comes from sample 13 of train_data alone;" in message
    assert "; the loss function writes to layer.weight, so the repeated pass began with other values" in message
    assert model.calls == 4, "those of repeated passes do not count"


def test_pass_that_raises_when_it_is_repeated_still_ends_with_the_loss() -> None:
    def loss(model: nn.Module, batch: Any) -> Tensor:
        if trainer.step == 2 and not torch.is_grad_enabled():
            raise RuntimeError("no gradients")
        return squared_error(model, batch)

    trainer = ordered_trainer(network_with(), loss)
    assert "its pass could not be repeated: RuntimeError: no gradients" in message_of(trainer)


def test_batch_is_divided_along_the_first_dimension() -> None:
    encoding = UserDict({"ids": torch.arange(8).view(4, 2)})
    batch = {"x": (torch.arange(4), encoding), "scale": torch.tensor(2.0), "name": "a"}
    part = part_of(batch, range(1, 3), 4)
    assert part["x"][0].tolist() == [1, 2]
    assert part["x"][1]["ids"].tolist() == [[2, 3], [4, 5]]
    assert (part["scale"], part["name"]) == (2.0, "a")
    assert len(encoding["ids"]) == 4
    assert part_of([torch.ones(4), torch.ones(3)], range(2), 4) is None
    assert part_of(["a", "b"], range(1), 2) is None


def test_module_inside_compiled_code_is_named_without_another_compilation() -> None:
    graphs: list[object] = []

    def backend(graph: Any, _inputs: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    ordered_trainer(torch.compile(network_with(nn.ReLU()), backend=backend)).fit(data_with_nan(bad=None))
    without, failing = len(graphs), torch.compile(network_with(nn.ReLU()), backend=backend)
    assert "is 0 (Linear); it comes from sample 13 of train_data alone" in message_of(ordered_trainer(failing))
    assert len(graphs) <= 2 * without
