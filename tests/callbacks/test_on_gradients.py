"""What `on_gradients` gets, and when; its effect at every placement is in end_to_end/test_hooks.py."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddp_kit import Callback, ConfigError, Gradients, Loss, Trainer, TrainerConfig, Update
from tests.support.toys import small_network, squared_error, trainer_for

GENERATOR = torch.Generator().manual_seed(0)
DATA = [
    (torch.randn(3, generator=GENERATOR), torch.randn(1, generator=GENERATOR), torch.tensor((1.0 + number) / 1000))
    for number in range(8)
]


def error_with_weights(model: nn.Module, batch: tuple[Tensor, ...]) -> Loss:
    x, y, weight = batch
    return Loss(((model(x) - y).square().squeeze(1) * weight).sum(), weight=weight.sum())


class Seen(Callback):
    """Keeps copies of the gradients of each call, and their norms."""

    def __init__(self) -> None:
        self.calls: list[dict[str, Tensor]] = []
        self.norms: list[dict[str, Tensor]] = []

    def on_gradients(self, trainer: Any, gradients: Gradients) -> None:
        self.calls.append({name: gradient.clone() for name, gradient in gradients.items()})
        self.norms.append(gradients.norms())


one_step_trainer = partial(trainer_for, None, max_steps=1, log_every_steps=1)


@pytest.mark.parametrize(
    "settings", [{}, {"accumulation_steps": 4}, {"precision": "fp16"}, {"memory": {"offload": "optimizer"}}]
)
@pytest.mark.parametrize("loss_fn", [error_with_weights, squared_error])
def test_on_gradients_gets_the_gradient_of_the_global_batch_before_clipping(
    loss_fn: Any, settings: dict[str, Any]
) -> None:
    callback = Seen()
    result = one_step_trainer(callback, loss_fn=loss_fn, max_grad_norm=0.01, **settings).fit(DATA)
    model = small_network()
    value = loss_fn(model, tuple(torch.stack(each) for each in zip(*DATA, strict=True)))
    (value.loss / value.weight if isinstance(value, Loss) else value).backward()
    expected = {name: each.grad for name, each in model.named_parameters()}
    (found,), (norms,) = callback.calls, callback.norms
    tolerance = {"rtol": 2e-2, "atol": 2e-3} if settings.get("precision") == "fp16" else {"rtol": 1e-5, "atol": 1e-6}
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(found[name], gradient, **tolerance)
        assert norms[name].item() == pytest.approx(found[name].norm().item())
    whole = torch.stack([*norms.values()]).norm().item()
    assert result.history[0].grad_norm == pytest.approx(whole, rel=1e-6)
    assert whole > 0.1


def test_clipping_uses_the_gradients_that_the_callback_has_changed() -> None:
    class Half(Callback):
        def on_gradients(self, trainer: Any, gradients: Gradients) -> None:
            gradients["0.weight"] = gradients["0.weight"] * 0.5
            gradients["2.weight"] = None
            del gradients["2.bias"]
            assert [*gradients] == ["0.weight", "0.bias"]
            assert len(gradients) == 2
            with pytest.raises(KeyError, match="2.bias"):
                gradients["2.bias"]
            assert gradients.norms().keys() == {"0.weight", "0.bias"}

    seen = Seen()
    one_step_trainer(seen).fit(DATA)
    trainer = one_step_trainer(Half(), max_grad_norm=0.01)
    before = {name: each.clone() for name, each in trainer.model.state_dict().items()}
    result = trainer.fit(DATA)
    expected = {"0.weight": seen.calls[0]["0.weight"] * 0.5, "0.bias": seen.calls[0]["0.bias"]}
    norm = torch.stack([each.norm() for each in expected.values()]).norm()
    assert result.history[0].grad_norm == pytest.approx(norm.item())
    for name, each in trainer.model.state_dict().items():
        step = -0.1 * expected[name] * (0.01 / (norm + 1e-6)) if name in expected else torch.zeros_like(each)
        torch.testing.assert_close(each - before[name], step, rtol=1e-3, atol=1e-7)


def test_on_gradients_of_each_update_gets_the_gradients_of_its_parameters() -> None:
    callback, model = Seen(), small_network()
    updates = [Update(name, squared_error, torch.optim.SGD(model[int(name)].parameters(), lr=0.1)) for name in "02"]  # type: ignore[index]
    config = TrainerConfig(max_steps=2, global_batch_size=8)
    Trainer(model, updates=updates, config=config, callbacks=[callback]).fit(DATA)
    assert [[*each] for each in callback.calls] == [["0.weight", "0.bias"], ["2.weight", "2.bias"]] * 2


def test_on_gradients_is_called_for_each_evaluation_of_a_closure() -> None:
    callback = Seen()
    one_step_trainer(callback, optimizer=lambda parameters: torch.optim.LBFGS(parameters, max_iter=3)).fit(DATA)
    assert len(callback.calls) > 1
    assert not torch.equal(callback.calls[0]["2.bias"], callback.calls[1]["2.bias"])


def test_on_gradients_set_on_the_instance_is_called() -> None:
    callback, calls = Callback(), []
    assert one_step_trainer(callback)._run.on_gradients is None
    callback.on_gradients = lambda trainer, gradients: calls.append([*gradients])  # type: ignore[method-assign]
    one_step_trainer(callback).fit(DATA)
    assert len(calls) == 1


def test_save_in_on_gradients_waits_for_the_end_of_the_step(tmp_path: Any) -> None:
    class Saves(Callback):
        def on_gradients(self, trainer: Any, gradients: Gradients) -> None:
            trainer.save()
            assert not [*tmp_path.glob("step-*")]

    one_step_trainer(Saves(), checkpoint={"dir": tmp_path}).fit(DATA)
    assert [each.name for each in tmp_path.glob("step-*")] == ["step-00000001"]


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("on_before_optimizer_step", "Callback.on_gradients"),
        ("on_pre_optimizer_step", "Callback.on_gradients"),
        ("on_after_backward", "Callback.on_gradients"),
        ("on_optimizer_step", "Callback.on_step"),
    ],
)
def test_callback_with_an_event_of_another_framework_names_the_event_to_use(name: str, answer: str) -> None:
    kind = type("Ported", (Callback,), {name: lambda *_: None})
    with pytest.raises(
        ConfigError, match=f"Ported has a method {name}, but there is no such event\n  hint: use {answer}"
    ):
        one_step_trainer(kind())
