"""The optimizer on the host: on a machine without a GPU, its copies are other tensors in the same memory."""

import gc
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

from ddp_kit import ConfigError, Trainer, TrainerConfig
from ddp_kit.parallel.offload import OffloadedOptimizer
from tests.support.toys import same_state, state_of, trainer_for

OFFLOADED = {"offload": "optimizer"}


class PartlyFrozen(nn.Module):
    """With a layer that is frozen, and one whose gradient is sparse."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4, sparse=sparse)
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.head = nn.Linear(4, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.head(torch.tanh(self.frozen(self.embed(tokens))))
        return found


DATA = [(torch.tensor(number % 7), torch.tensor(number % 3)) for number in range(40)]


def token_loss(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch[0]).float(), batch[1])


def offloading_trainer(
    memory: dict[str, bool], make: Callable[..., Any], loss: Any = token_loss, *, sparse: bool = False, **settings: Any
) -> Trainer:
    settings = {"max_steps": 6, "max_grad_norm": 0.5, "scheduler": lambda made: StepLR(made, 2), **settings}
    return trainer_for(model=lambda: PartlyFrozen(sparse), loss_fn=loss, optimizer=make, memory=memory, **settings)


def adamw(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=0.05)


class Overflows:
    """A loss function whose gradients overflow in every third step."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        self.calls += 1
        return token_loss(model, batch) * (1e38 if self.calls % 3 == 0 else 1.0)


@pytest.mark.parametrize(
    ("make", "settings"),
    [
        (adamw, {}),
        (adamw, {"precision": "bf16-true"}),
        (adamw, {"precision": "fp16"}),
        (lambda parameters: torch.optim.AdamW(parameters, lr=0.05, fused=True), {"precision": "fp16"}),
        (lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9), {"accumulation_steps": 2}),
        (lambda parameters: torch.optim.SGD(parameters, lr=0.1), {"sparse": True}),
        (adamw, {"parallel": {"device_map": {"": 0, "head": 1}}}),
    ],
)
def test_offloaded_run_is_bitwise_identical_to_one_without(make: Callable[..., Any], settings: dict[str, Any]) -> None:
    found = []
    for memory in ({}, OFFLOADED):
        loss = Overflows() if settings.get("precision") == "fp16" else token_loss
        trainer = offloading_trainer(memory, make, loss, **settings)
        result = trainer.fit(DATA)
        found.append((state_of(trainer.model), result.skipped, [row.loss for row in result.history]))
    assert same_state(found[0][0], found[1][0])
    assert found[0][1:] == found[1][1:]
    assert found[0][1] == (2 if settings.get("precision") == "fp16" else 0)
    assert not same_state(found[0][0], state_of(offloading_trainer({}, make, **settings).model))


def test_offloaded_optimizer_has_copies_and_updates_the_model() -> None:
    trainer = offloading_trainer(OFFLOADED, adamw)
    own = {each.data_ptr() for each in trainer.model.parameters() if each.requires_grad}
    steps = trainer.steps(DATA)
    next(steps)
    held = [each for group in trainer.optimizer.param_groups for each in group["params"] if each.requires_grad]
    assert len(held) == len(own)
    assert own.isdisjoint(each.data_ptr() for each in held)
    assert {id(each) for each in trainer.optimizer.state} == {id(each) for each in held}
    for each in trainer.model.parameters():
        each.data.mul_(0)
    next(steps)
    assert all(each.abs().max() < 0.2 for each in trainer.model.parameters()), "what the user wrote is updated"
    assert all(each.grad is None for each in (*held, *trainer.model.parameters()))


def test_offloaded_optimizer_keeps_its_existing_state() -> None:
    found = []
    for memory in ({}, OFFLOADED):
        torch.manual_seed(0)
        model = PartlyFrozen(sparse=False)
        optimizer = adamw(model.parameters())
        token_loss(model, (torch.arange(7), torch.arange(7) % 3)).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        trainer = Trainer(model, optimizer, token_loss, TrainerConfig(max_steps=2, memory=memory))
        trainer.fit(DATA)
        found.append(state_of(trainer.model))
    assert same_state(*found)


@pytest.mark.parametrize(("first", "second"), [(OFFLOADED, OFFLOADED), ({}, OFFLOADED), (OFFLOADED, {})])
def test_offloaded_run_resumes_bitwise_with_and_without_offloading(first: Any, second: Any, tmp_path: Path) -> None:
    whole = offloading_trainer({}, adamw)
    whole.fit(DATA)
    folder = {"checkpoint": {"dir": tmp_path, "every_steps": 100}}
    offloading_trainer(first, adamw, max_steps=3, **folder).fit(DATA)
    resumed = offloading_trainer(second, adamw, **folder)
    assert resumed.step == 3
    resumed.fit(DATA)
    assert same_state(state_of(whole.model), state_of(resumed.model))


def test_offloaded_trial_steps_are_rolled_back() -> None:
    found = []
    for search in (False, True):
        trainer = offloading_trainer(OFFLOADED, adamw)
        if search:
            trainer.find_learning_rate(DATA, steps=5)
        trainer.fit(DATA)
        found.append(state_of(trainer.model))
    assert same_state(*found)


def test_offloaded_plan_counts_state_on_the_host() -> None:
    trainer = offloading_trainer(OFFLOADED, adamw)
    values = sum(each.numel() for each in trainer.model.parameters() if each.requires_grad)
    plan = trainer.plan(DATA)
    assert plan.optimizer_state == 0
    assert plan.host == values * 4 * 4 + 4 * 3  # three step counts


class OnGpuOnly(torch.optim.SGD):
    """As optimizers with kernels of their own."""

    def step(self, closure: Any = None) -> None:
        raise RuntimeError("no kernel for the CPU")


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda parameters: torch.optim.Adam(parameters, capturable=True), "on the CPU, which Adam does not support"),
        (lambda parameters: OnGpuOnly(parameters, lr=0.1), "no kernel for the CPU"),
    ],
)
def test_offloaded_optimizer_that_needs_a_gpu_is_refused(make: Any, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        offloading_trainer(OFFLOADED, make)


def test_offloaded_optimizer_check_changes_nothing() -> None:
    parameter, before = nn.Parameter(torch.ones(2)), torch.get_rng_state()
    optimizer = torch.optim.AdamW([parameter])
    OffloadedOptimizer(optimizer)
    assert not optimizer.state
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16-true"])
def test_offloaded_run_has_no_optimizer_state_on_the_gpu(precision: str) -> None:
    """Its peak is lower by the state at least, and weights and losses are those of a run without."""
    peaks, found = [], []
    for memory in ({}, OFFLOADED):
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(8)), nn.Linear(1024, 3))
        config = TrainerConfig(max_steps=5, global_batch_size=8, log_every_steps=1, precision=precision, memory=memory)
        data = [(torch.randn(1024), torch.tensor(number % 3)) for number in range(40)]
        trainer = Trainer(model, lambda each: torch.optim.AdamW(each, lr=1e-4, fused=True), token_loss, config)
        result = trainer.fit(data)
        peaks.append(torch.cuda.max_memory_allocated() - before)
        found.append([row.loss for row in result.history])
        state = [each for kept in trainer.optimizer.state.values() for each in kept.values() if each.ndim]
        assert all(each.is_cpu == bool(memory) for each in state)
        assert all(each.is_cuda for each in model.parameters())
        if memory:
            held = [each for group in trainer.optimizer.param_groups for each in group["params"]]
            assert all(each.is_pinned() for each in held)
            assert peaks[0] - peaks[1] > 0.95 * sum(each.nbytes for each in state)
        del trainer, model, result
    assert found[1] == pytest.approx(found[0], rel=1e-2 if precision == "bf16-true" else 1e-3)


@pytest.mark.parametrize(
    ("memory", "parallel", "words"),
    [
        (
            {"offload": "all"},
            "ddp",
            "needs parallel.shard, .*: set parallel='fsdp'",
        ),
        (OFFLOADED, {"pipeline": 2}, "is not supported with parallel.pipeline = 2"),
        ({"offload": "all"}, {"pipeline": 2, "shard": 2}, "is not supported with parallel.pipeline = 2"),
    ],
)
def test_offload_with_an_unsupported_placement_is_refused(memory: Any, parallel: Any, words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        TrainerConfig(memory=memory, parallel=parallel)
    assert re.search(words, refused.value.problems[0])


def test_optimizer_that_changes_weights_outside_of_its_step_is_refused() -> None:
    class Modes(torch.optim.SGD):
        def train(self) -> None: ...

        def eval(self) -> None: ...

    with pytest.raises(
        ConfigError, match=r"Modes has train\(\) and eval\(\), which change the weights outside of step"
    ):
        offloading_trainer(OFFLOADED, lambda parameters: Modes(parameters, lr=0.1))
