"""What the search for the micro-batch counts, and what a step that is done again finds as it was; in one process."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from ddp_kit import ConfigError, LossError, MemoryConfig, Trainer, TrainerConfig
from ddp_kit.memory import choose
from ddp_kit.trainer.out_of_memory import with_hint
from tests.support.toys import adam, regression_data, squared_error, trainer_for

Loss = Callable[[nn.Module, Any], Tensor]


DATA = regression_data(48, dtype=torch.float64)


class CountingNet(nn.Module):
    """Draws random numbers, and counts its samples in a buffer that it replaces instead of changing it."""

    def __init__(self, batch_norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(1)
        layers = [nn.Linear(3, 8), nn.Dropout(0.3), nn.Linear(8, 1)]
        self.layers = nn.Sequential(*layers, *[nn.BatchNorm1d(1)] * batch_norm).double()
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Any:
        if self.training:
            self.seen = self.seen + len(x)
        return self.layers(x)


def full() -> torch.OutOfMemoryError:
    return torch.OutOfMemoryError("CUDA out of memory (a pretence)")


def searching_trainer(loss: Loss = squared_error, model: Any = CountingNet, **settings: Any) -> Trainer:
    settings = {"global_batch_size": 16, "micro_batch_size": "auto", "log_every_steps": 1} | settings
    return trainer_for(model=model, loss_fn=loss, optimizer=adam(), **settings)


def test_auto_micro_batch_size_counts_the_optimizer_state(said: list[str]) -> None:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        if len(batch[0]) > 4 and trainer.optimizer.state:  # from the second step on
            raise full()
        return squared_error(model, batch)

    trainer = searching_trainer(loss)
    trainer.fit(DATA)
    assert trainer.batch_plan.micro_batch == 4
    assert "micro_batch_size='auto' chose 4 samples (a rank has at most 16 per step)" in said
    assert not any("halved" in line for line in said)


def test_auto_micro_batch_size_search_runs_in_training_mode_and_leaves_no_trace() -> None:
    modes: list[bool] = []

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        modes.append(model.training)
        return squared_error(model, batch)

    trainer = searching_trainer(loss, CountingNet().eval())
    fixed = searching_trainer(micro_batch_size=None)
    assert trainer.fit(DATA).loss == fixed.fit(DATA).loss
    assert all(modes)
    for ours, theirs in zip(trainer.model.state_dict().values(), fixed.model.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)


def test_auto_micro_batch_size_with_batch_norm_tries_no_single_sample() -> None:
    trainer = searching_trainer(model=CountingNet(batch_norm=True))
    trainer.fit(DATA)
    assert trainer.batch_plan.micro_batch == 16


class _Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        raise full()


def state_after_failure(fails: Callable[[Tensor], Tensor], before: bool, **settings: Any) -> dict[str, Tensor]:
    """What a run ends with whose third step fails with 16 samples, before the model is called or after it."""

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        struck = trainer.step == 2 and len(batch[0]) > 8
        if struck and before:
            raise full()
        found = squared_error(model, batch)
        return fails(found) if struck else found

    trainer = searching_trainer(loss, **settings)
    result = trainer.fit(DATA)
    assert trainer.batch_plan.micro_batch == 8
    assert [row.step for row in result.history] == [1, 2, 3]
    return dict(trainer.model.state_dict())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_repeated_step_finds_buffers_and_random_states_restored(precision: str) -> None:
    early, late = (state_after_failure(_Fails.apply, before, precision=precision) for before in (True, False))
    assert early.keys() == late.keys()
    assert all(torch.equal(early[name], late[name]) for name in early)
    assert early["seen"] == 48  # each sample once


def test_resumed_run_keeps_its_micro_batch_size(tmp_path: Path) -> None:
    sizes: list[int] = []

    def trained(steps: int, **settings: Any) -> dict[str, Tensor]:
        def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
            sizes.append(len(batch[0]))
            if trainer.step == 2 and len(batch[0]) > 8:
                raise full()
            return squared_error(model, batch)

        trainer = searching_trainer(loss, max_steps=steps, **settings)
        sizes.clear()
        trainer.fit(DATA)
        return dict(trainer.model.state_dict())

    whole = trained(5)
    trained(4, checkpoint={"dir": tmp_path})
    resumed = trained(5, checkpoint={"dir": tmp_path})
    assert sizes == [8, 8]  # nothing is tried
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)


def test_out_of_memory_error_that_ends_the_run_has_a_hint(said: list[str]) -> None:
    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        raise full()

    for micro_batch, hint in (
        (4, 'hint: set micro_batch_size="auto"'),
        ("auto", "hint: there is no smaller micro-batch"),
    ):
        with pytest.raises(torch.OutOfMemoryError) as found:
            searching_trainer(loss, micro_batch_size=micro_batch).fit(DATA)
        assert found.value.__notes__[0].startswith(hint)


def test_out_of_memory_error_that_ends_the_run_names_a_placement_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024, bias=False)) for _ in range(4)))  # 16 MiB
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), squared_error)
    trainer.optimizer.state[model[0][0].weight]["momentum_buffer"] = torch.zeros(1024, 1024)  # type: ignore[index]
    world = SimpleNamespace(rank=0, world_size=4, local_world_size=4, device=torch.device("cuda"))
    monkeypatch.setattr(choose, "device_memory", lambda _device: 55 << 20)
    for strategy, expected in (
        ("ddp", 'parallel="zero1" needs 36.00 MiB of 55.00 MiB on each rank'),  # 36 MiB are less than 70 % of 55
        ("zero1", 'parallel="fsdp" needs 28.00 MiB of 55.00 MiB on each rank'),
        (
            "fsdp",
            'parallel="fsdp", memory={"activation_checkpointing": "blocks", "offload": "optimizer"} needs 24.00 MiB',
        ),
        ("fsdp offloaded", ""),
    ):
        config = TrainerConfig(parallel=strategy.split()[0])  # type: ignore[arg-type]
        if strategy == "fsdp offloaded":
            config = config.model_copy(
                update={"memory": MemoryConfig(activation_checkpointing="blocks", offload="optimizer")}
            )
        parts = replace(trainer._run, world=world, config=config)  # type: ignore[arg-type]
        error = with_hint(torch.OutOfMemoryError("CUDA out of memory, in so many words"), parts)
        assert str(error) == "CUDA out of memory, in so many words"
        (note,) = error.__notes__
        assert note.startswith('hint: set micro_batch_size="auto"')
        assert "by calculation, " + expected in note if expected else "calculation" not in note, note

    def broken(_device: torch.device) -> int:
        raise MemoryError

    monkeypatch.setattr(choose, "device_memory", broken)
    assert with_hint(torch.OutOfMemoryError("full"), parts).__notes__[0].startswith("hint: set micro_batch_size")


def test_auto_micro_batch_size_leaves_other_errors_unchanged() -> None:
    with pytest.raises(LossError, match="a tensor that does not require grad"):
        searching_trainer(lambda model, batch: squared_error(model, batch).detach()).fit(DATA)
    with pytest.raises(RuntimeError, match="^the user's own$"):
        searching_trainer(lambda model, batch: _raise(RuntimeError("the user's own"))).fit(DATA)


def _raise(error: Exception) -> Tensor:
    raise error


def test_auto_micro_batch_size_with_the_users_batches_is_refused() -> None:
    with pytest.raises(ConfigError, match="train_data is a DataLoader that decides the batch size"):
        searching_trainer().fit(DataLoader(DATA, batch_size=4))


def test_auto_micro_batch_size_is_searched_once() -> None:
    sizes: list[int] = []

    def loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        sizes.append(len(batch[0]))
        return squared_error(model, batch)

    trainer = searching_trainer(loss, max_steps=4)
    trainer.find_learning_rate(DATA, steps=3)
    assert 1 in sizes
    sizes.clear()
    trainer.fit(DATA)
    trainer.fit(DATA)
    assert set(sizes) == {16}
