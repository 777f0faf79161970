"""What a plan measures of a model, an optimizer and a loss function, without memory; and starts that are refused."""

import copy
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from loguru import logger
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from ddp_kit import ConfigError, Loss, Trainer, TrainerConfig, Update
from ddp_kit.env import PLAN_MEMORY, PLAN_RANKS
from ddp_kit.memory import checks, measure
from ddp_kit.memory.estimate import MemoryPlan, ModelMemory
from ddp_kit.memory.fake import FakeTensors, LiveBytes, is_fake
from ddp_kit.memory.measure import PeakMemory, TrainingPass
from ddp_kit.memory.plan_report import PlanPrinted
from tests.support.toys import SampleStream, regression_data

WIDTH = 32


class ResidualBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 4 * WIDTH)
        self.outer = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = x + self.outer(torch.tanh(self.inner(x)))
        return found


def residual_network() -> nn.Module:
    return nn.Sequential(
        nn.Linear(3, WIDTH), nn.BatchNorm1d(WIDTH), ResidualBlock(), ResidualBlock(), nn.Linear(WIDTH, 1)
    )


DATA = regression_data(64)


def unfused_error(model: nn.Module, batch: Any) -> Tensor:
    """The mean squared error, with each intermediate result in memory."""
    return (model(batch[0]) - batch[1]).square().mean()


def planning_trainer(loss_fn: Any = unfused_error, model: nn.Module | None = None, **settings: Any) -> Trainer:
    settings = {"global_batch_size": 16, "max_steps": 2} | settings
    return Trainer(model or residual_network(), lambda parameters: torch.optim.AdamW(parameters, lr=0.1), loss_fn,
                   TrainerConfig(**settings))  # fmt: skip


def of(planner: Trainer, data: Any) -> ModelMemory:
    model, _ = planner._run.planner.measure(data, planner.batch_plan, 0)
    return model


def test_measured_memory_equals_that_of_real_tensors() -> None:
    planner = planning_trainer()
    model = of(planner, DATA)
    parts, batch = planner._run, next(iter(DataLoader(DATA, 16)))
    training = TrainingPass([parts.loss_fn], batch, parts.precision, parts.config, parts.world.device)
    blocks = [planner.model[2], planner.model[3]]  # type: ignore[index]
    real = measure._pass(planner.model, blocks, training, parts.loss_fn)
    assert model.problems == ()
    assert model.passed == real
    assert real.activations > 2 * 16 * 4 * WIDTH * 4
    assert all(block.activations >= 16 * 4 * WIDTH * 4 and block.input == 16 * WIDTH * 4 for block in real.blocks)
    assert real.batch == 16 * 4 * 4
    found = {row.name: (row.shape, row.unit, row.state_per_value, row.constant_state_bytes) for row in model.rows}
    assert found["2.inner.weight"] == ((4 * WIDTH, WIDTH), "2", 8, 4)
    assert found["0.weight"] == ((WIDTH, 3), "", 8, 4)


def test_live_bytes_counts_memory_until_it_is_released() -> None:
    given = torch.zeros(100)
    live = LiveBytes([given])
    with live:
        kept = given + 1
        view = kept[:3]
        given.add_(1)
        (given + kept).sum()
    assert (live.now, live.peak) == (400, 804)
    del kept
    assert live.now == 400
    del view
    assert live.now == 0


def test_plan_does_not_change_the_run() -> None:
    planner, other = planning_trainer(), planning_trainer()
    other.model.load_state_dict(copy.deepcopy(planner.model.state_dict()))
    before = torch.random.get_rng_state()
    planned = planner.plan(DATA)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert not any(is_fake(each) for each in (*planner.model.parameters(), *planner.model.buffers()))
    for each in (planner, other):
        each.fit(DATA)
    for mine, theirs in zip(planner.model.state_dict().values(), other.model.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)
    assert planner.plan(DATA) == planned
    states = (planner.optimizer.state_dict()["state"], other.optimizer.state_dict()["state"])
    for mine, theirs in zip(*(state.values() for state in states), strict=True):
        assert all(torch.equal(mine[name], theirs[name]) for name in theirs)


def test_plan_of_several_updates_copies_each_optimizer_without_its_state() -> None:
    model = nn.ModuleDict({"first": nn.Linear(3, 1), "second": nn.Linear(3, 1)})
    updates = [
        Update(
            name, lambda model, batch, name=name: unfused_error(model[name], batch), torch.optim.Adam(part.parameters())
        )
        for name, part in model.items()
    ]
    planner = Trainer(model, updates=updates, config=TrainerConfig(global_batch_size=16, max_steps=2))
    before = planner.plan(DATA)
    assert before.problems == ()
    assert before.optimizer_state == 2 * (4 * 8 + 2 * 4)
    planner.fit(DATA)
    assert planner.plan(DATA) == before
    assert not any(map(is_fake, updates[0].optimizer.param_groups[0]["params"]))


@pytest.mark.parametrize("layers", [2, 20])
def test_optimizer_steps_with_one_parameter_of_each_shape_and_group(layers: int) -> None:
    stepped = []

    class Recorded(torch.optim.Adam):
        def step(self, closure: Any = None) -> Any:
            stepped.append([len(group["params"]) for group in self.param_groups])
            return super().step(closure)

    model = nn.Sequential(nn.Linear(3, 1), *(nn.Linear(1, 1) for _ in range(layers)))
    first, *others = model
    groups = [{"params": first.parameters()}, {"params": [each for layer in others for each in layer.parameters()]}]
    optimizer = Recorded(groups)
    planner = Trainer(model, optimizer, unfused_error, TrainerConfig(global_batch_size=16, max_steps=2))
    assert planner.plan(DATA).optimizer_state == (4 + 2 * layers) * 8 + (2 + 2 * layers) * 4
    assert stepped == [[2, 2]]  # [1, 3] and [1]; [1, 1] and [1]
    assert len(optimizer.param_groups[1]["params"]) == 2 * layers


def test_state_of_an_optimizer_with_its_own_list_of_parameters_is_planned() -> None:
    class Listed(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {"lr": 0.1})
            self.listed = [*self.param_groups[0]["params"]]

        def step(self, closure: Any = None) -> Any:
            for parameter in self.listed:
                self.state[parameter]["sum"] = torch.zeros_like(parameter) + parameter.grad

    parameters = [*nn.Sequential(nn.Linear(3, 1), nn.Linear(1, 1), nn.Linear(1, 1)).parameters()]
    assert measure._states(Listed(parameters)) == dict.fromkeys(parameters, (4, 0))
    assert all(parameter.grad is None for parameter in parameters)


def test_state_of_lbfgs_is_planned_but_not_certain_at_the_start() -> None:
    model = nn.Linear(3, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), history_size=10)
    planner = Trainer(model, optimizer, unfused_error, TrainerConfig(global_batch_size=16, max_steps=2))
    assert planner.plan(DATA).optimizer_state == 4 * 4 * 22
    assert measure.state_to_come(optimizer) == 0
    assert measure.state_to_come(torch.optim.Adam(model.parameters())) == 4 * 8


class RandomSamples(Dataset[Any]):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.randn(3), torch.randn(1)


@pytest.mark.parametrize("given", [SampleStream(DATA), RandomSamples(), DataLoader(DATA, batch_size=16)])
def test_plan_reads_the_batch_from_every_kind_of_data(given: Any) -> None:
    assert (
        of(planning_trainer(global_batch_size=None if isinstance(given, DataLoader) else 16), given).passed.batch
        == 16 * 16
    )


def test_plan_of_a_loss_function_that_reads_model_values_reports_a_problem() -> None:
    def counted(model: nn.Module, batch: Any) -> Loss:
        chosen = batch[1][:, 0] > -9.0
        return Loss((model(batch[0][chosen])).sum(), weight=int(chosen.sum()))

    assert of(planning_trainer(counted), DATA).problems == ()

    def peeking(model: nn.Module, batch: Any) -> Tensor:
        loss = unfused_error(model, batch)
        return loss * (2.0 if loss.item() > 1 else 1.0)

    (problem,) = of(planning_trainer(peeking), DATA).problems
    assert problem.startswith("activations: the loss function cannot run on tensors without values: ")


def test_plan_measures_autocast_and_two_byte_weights() -> None:
    whole, half, cast = (of(planning_trainer(precision=name), DATA) for name in ("fp32", "bf16-true", "bf16"))
    assert {row.itemsize for row in half.rows} == {2}
    assert {row.state_per_value for row in half.rows} == {4}
    assert half.passed.activations < whole.passed.activations
    assert cast.passed.casts == 2 * 2 * 4 * WIDTH * WIDTH * 2
    assert whole.passed.casts == 0


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_estimate_of_checkpointing_equals_the_measurement(precision: str) -> None:
    plain = of(planning_trainer(precision=precision, global_batch_size=256), regression_data(256)).passed
    less = of(
        planning_trainer(precision=precision, global_batch_size=256, memory={"activation_checkpointing": "blocks"}),
        regression_data(256),
    ).passed
    estimated = plain.with_less(checkpointing=1.0, offload=False)
    assert less.activations < 0.6 * plain.activations
    assert estimated.activations == pytest.approx(less.activations, rel=0.01)
    assert estimated.peak == pytest.approx(less.peak, rel=0.01)


def test_fake_module_can_be_converted() -> None:
    fakes = FakeTensors()
    model = nn.Linear(3, 5)
    model.weight, model.bias = fakes.like(model.weight), fakes.like(model.bias)  # type: ignore[assignment]
    weight = model.weight
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        model.to("cpu").to(dtype)
        assert model.weight is weight
        assert weight.dtype == dtype
        assert is_fake(weight)
    assert isinstance(weight, nn.Parameter)


def test_plan_command_makes_fit_print_a_plan(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(PLAN_RANKS, "4")
    monkeypatch.setenv(PLAN_MEMORY, str(2 * 1024**3))
    planner = planning_trainer(parallel="fsdp", accumulation_steps=2, checkpoint={"dir": "nowhere"}, compile="model")
    assert planner.batch_plan.micro_batch == 2
    assert planner.evaluate(DATA).keys() == {"loss"}
    with pytest.raises(PlanPrinted) as ended:
        planner.fit(DATA)
    assert ended.value.code == 0
    told = capsys.readouterr().out
    assert "parallel='fsdp', precision='fp32', micro-batch 2; on each of 4 devices:" in told
    assert "fits: 1.0 GiB of 2.0 GiB" in told
    with pytest.raises(ConfigError, match="the parallel sizes do not match"):
        planning_trainer(parallel={"shard": 3})


def test_plan_command_with_auto_prints_its_choice(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    values = sum(each.numel() for each in residual_network().parameters())
    monkeypatch.setenv(PLAN_RANKS, "4")
    monkeypatch.setenv(PLAN_MEMORY, str(int(values * 16 / 0.7)))  # what is not trained is missing
    with pytest.raises(PlanPrinted):
        planning_trainer(parallel="auto").fit(DATA)
    first, second, third, *_ = capsys.readouterr().out.splitlines()
    assert re.match(r"parallel='auto': parallel=\"zero1\" needs \d+\.\d\d KiB of ", first)
    assert re.match(r'  does not fit: parallel="ddp" needs \d+\.\d\d KiB of ', second)
    assert "parallel='zero1', precision='fp32'" in third


def test_plan_finds_parameters_of_stages_by_running_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PLAN_RANKS, "4")
    monkeypatch.setenv(PLAN_MEMORY, str(2 * 1024**3))
    model = nn.Sequential(nn.Linear(3, WIDTH), ResidualBlock(), ResidualBlock(), ResidualBlock(), nn.Linear(WIDTH, 1))
    model[0].weight.requires_grad_(requires_grad=False)
    found = of(planning_trainer(model=model, parallel={"pipeline": 2}), DATA)
    assert found.problems == ()
    first, last = found.stages
    shared = {"0.weight"}  # frozen: all stages keep it
    assert {name for name in first if name[0] in "04"} == {"0.bias"} | shared
    assert {name for name in last if name[0] in "04"} == {"4.weight", "4.bias"} | shared
    assert {name[0] for name in first | last} == set("01234")
    assert {name[0] for name in first & last} == {"0"}

    def reading(model: nn.Module, batch: Any) -> Tensor:
        return unfused_error(model, batch) + model[1].inner.weight.sum().item()  # type: ignore[index,union-attr]

    (_, problem) = of(planning_trainer(reading, model, parallel={"pipeline": 2}), DATA).problems
    assert problem.startswith("weights of each pipeline stage: ")


def test_plan_uses_the_tensor_plan_of_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PLAN_RANKS, "2")
    monkeypatch.setenv(PLAN_MEMORY, str(2 * 1024**3))
    table = {"*.inner": "column", "*.outer": "row"}
    found = of(planning_trainer(parallel={"tensor": 2, "tensor_plan": table}), DATA)
    assert found.problems == ()
    split = {row.name: row.split for row in found.rows if row.name.startswith("2.")}
    assert split == {"2.inner.weight": 0, "2.inner.bias": 0, "2.outer.weight": 1, "2.outer.bias": None}
    (problem,) = of(planning_trainer(parallel={"tensor": 2}), DATA).problems
    assert problem.startswith(
        "layers that tensor parallelism splits: parallel.tensor needs a plan of the layers to split"
    )


@pytest.mark.parametrize(
    ("counted", "planned", "said"),
    [
        (
            3 << 30,
            None,
            ["memory: calculated 3.0 GiB for weights, gradients and optimizer state; measured a peak of 5.0"],
        ),
        (
            3 << 30,
            MemoryPlan(1 << 30, 1 << 30, 1 << 30, 1 << 30, 0, 0, 0, 7 << 30),
            ["memory: planned 4.0 GiB, measured"],
        ),
        (None, None, []),
    ],
)
def test_peak_memory_is_logged_once_after_the_first_steps(
    monkeypatch: pytest.MonkeyPatch, counted: int | None, planned: MemoryPlan | None, said: list[str]
) -> None:
    found: list[str] = []
    handler = logger.add(lambda message: found.append(str(message)), format="{message}")
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _device: 5 << 30)
    for device, expected in (("cpu", []), ("cuda", said)):
        peak = PeakMemory(SimpleNamespace(device=torch.device(device)), counted)  # type: ignore[arg-type]
        if planned is not None:
            peak.compare_with(planned)
        for number in range(1, 10):
            peak.after_step()
            assert bool(found) == bool(expected and number >= 3)
    logger.remove(handler)
    assert len(found) == len(said)
    assert all(line.startswith(start) for line, start in zip(found, said, strict=True))


def test_start_that_cannot_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    values = sum(each.numel() for each in residual_network().parameters())
    buffers = 2 * WIDTH * 4 + 8
    for memory, fits in ((values * 16 + buffers, True), (values * 16 + buffers - 1, False), (values * 8 - 1, False)):
        monkeypatch.setattr(checks, "device_memory", lambda _device, memory=memory: memory)
        if fits:
            planning_trainer()
        else:
            with pytest.raises(ConfigError, match="the run cannot fit in memory: weights"):
                planning_trainer()
