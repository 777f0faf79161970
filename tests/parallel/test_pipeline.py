"""How a model is cut into stages, what its forward pass is on each, and what is refused."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddp_kit import ConfigError, LossError, TrainerConfig
from ddp_kit.config.settings import ParallelConfig
from ddp_kit.distributed.world import World
from ddp_kit.parallel.pipeline.buffers import PipelineBuffers, changed_buffers
from ddp_kit.parallel.pipeline.model import Activation, StageModel, chain_of, sharded_parameters
from ddp_kit.parallel.pipeline.strategy import PipelineStrategy
from ddp_kit.parallel.strategy import sizes_of
from tests.support.toys import mean_square


class ScaledBlock(nn.Module):
    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.kind = "full"

    def forward(self, x: Tensor, scale: Any = 1.0) -> Tensor:
        y: Tensor = torch.tanh(self.layer(x)) * scale
        return y


class Stages(nn.Module):
    """`order`: of the blocks; `between`, `after`: what is done with the outputs of blocks."""

    def __init__(self, order: Any = range(4), between: Any = None, after: Any = None) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 3)
        self.blocks = nn.ModuleList(ScaledBlock() for _ in range(4))
        self.head = nn.Linear(3, 1)
        self.order, self.between, self.after = order, between, after

    def forward(self, x: Tensor) -> Tensor:
        scale, outputs = x.mean(), [self.inner(x)]
        for number in self.order:
            assert self.blocks[number].kind == "full"
            x = outputs[-1] if self.between is None else self.between(outputs[-1])
            outputs.append(self.blocks[number](x, scale))
        y: Tensor = self.head(outputs[-1] if self.after is None else self.after(outputs))
        return y


def pipeline_config(**settings: Any) -> ParallelConfig:
    return ParallelConfig(**{"pipeline": 2} | settings)


def loss_in_two_stages(model: nn.Module, function: Any = mean_square, **settings: Any) -> Tensor:
    """Run a forward and a backward pass in two stages, and return the loss."""
    chain, batch = chain_of(model, pipeline_config(**settings)), torch.linspace(-1, 2, 10).reshape(5, 2)
    activation = StageModel(model, chain, 0).call(function, batch)
    assert isinstance(activation, Activation)
    received = activation.tensor.detach().requires_grad_()
    loss: Tensor = StageModel(model, chain, 1).call(function, batch, Activation(received, activation.items))
    loss.backward()  # type: ignore[no-untyped-call]
    assert received.grad is not None
    activation.tensor.backward(received.grad)  # type: ignore[no-untyped-call]
    return loss


def test_stages_compute_the_model_s_loss_and_gradients_and_leave_it_unchanged() -> None:
    model, batch = Stages(), torch.linspace(-1, 2, 10).reshape(5, 2)
    names = [name for name, _ in model.named_modules()]
    expected = mean_square(model, batch)
    gradients = torch.autograd.grad(expected, [*model.parameters()])
    loss = loss_in_two_stages(model)
    assert loss.item() == expected.item()
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-6, atol=1e-9)
    assert [name for name, _ in model.named_modules()] == names
    assert all(type(block) is ScaledBlock for block in model.blocks)


@pytest.mark.parametrize(
    ("model", "function", "message"),
    [
        (
            Stages(order=(0, 2, 1, 3)),
            mean_square,
            "out of order: blocks.2 was called where blocks.1 was expected.*\n.*parallel='fsdp' needs neither",
        ),
        (Stages(order=(0, 1, 2)), mean_square, "ran 3 of its 4 blocks"),
        (Stages(between=torch.relu), mean_square, "changes the output of blocks.1 before it calls blocks.2"),
        (Stages(after=lambda outputs: outputs[1] + outputs[-1]), mean_square, "not only through the next block"),
        (
            Stages(),
            lambda model, batch: mean_square(model, batch) + mean_square(model, batch),
            "out of order: blocks.0 was",
        ),
    ],
)
def test_stages_of_a_model_that_is_no_chain_of_blocks_raise_an_error(
    model: nn.Module, function: Any, message: str
) -> None:
    with pytest.raises(LossError, match=message):
        loss_in_two_stages(model, function)
    assert all(type(block) is ScaledBlock for block in model.blocks)  # type: ignore[union-attr]


def test_stage_whose_loss_function_does_not_call_the_model_raises_an_error() -> None:
    model = Stages()
    with pytest.raises(LossError, match="ran 0 of its 4 blocks"):
        StageModel(model, chain_of(model, pipeline_config()), 0).call(lambda model, batch: batch.sum(), torch.ones(2))


def test_stages_by_default_have_about_equally_many_weights() -> None:
    model = nn.Sequential(*(ScaledBlock(width) for width in (9, 3, 3, 3)))
    assert chain_of(model, pipeline_config()).stages == (range(1), range(1, 4))


def test_stages_with_names_begin_at_these_modules() -> None:
    assert chain_of(Stages(), pipeline_config(pipeline=3, pipeline_stages=("blocks.1", "blocks.3"))).stages == (
        range(1),
        range(1, 3),
        range(3, 4),
    )
    assert (
        chain_of(nn.Sequential(*(nn.Linear(2, 2) for _ in range(3))), pipeline_config(pipeline_stages=("1",))).prefix
        == ""
    )


@pytest.mark.parametrize(
    ("model", "settings", "message"),
    [
        (nn.Linear(2, 2), {}, "no repeated blocks"),
        (nn.ModuleDict({"a": Stages(), "b": Stages()}), {}, "several places: a.blocks, b.blocks"),
        (Stages(), {"pipeline": 5}, "makes 5 stages, but the model Stages has only 4 repeated"),
        (Stages(), {"pipeline_stages": ()}, "names 0 modules"),
        (Stages(), {"pipeline_stages": ("blocks.9",)}, "no such module"),
        (Stages(), {"pipeline_stages": ("head",)}, "do not belong to the same nn.ModuleList"),
        (Stages(), {"pipeline_stages": ("blocks.0",)}, "the first stage always begins"),
        (Stages(), {"pipeline": 3, "pipeline_stages": ("blocks.2", "blocks.1")}, "not in the order"),
        (nn.Sequential(ScaledBlock(), ScaledBlock(), nn.BatchNorm1d(3)), {}, "BatchNorm.*: 2\n.*use LayerNorm"),
        (nn.Sequential(nn.Embedding(3, 3, sparse=True), ScaledBlock(), ScaledBlock()), {}, "sparse gradients: 0"),
    ],
)
def test_pipeline_of_an_unsupported_model_or_setting_raises_an_error(
    model: nn.Module, settings: dict[str, Any], message: str
) -> None:
    parallel = pipeline_config(**settings)
    ranks = parallel.pipeline * max(1, parallel.shard)
    with pytest.raises(ConfigError, match=message):
        PipelineStrategy(World(0, ranks, 0, ranks, 0, torch.device("cpu")), parallel).check(model)


@pytest.mark.parametrize("schedule", ["interleaved", "zbv"])
def test_pipeline_schedule_with_several_stages_per_rank_names_the_schedules(schedule: str) -> None:
    with pytest.raises(ConfigError) as raised:
        TrainerConfig(max_steps=1, global_batch_size=4, parallel={"pipeline": 2, "pipeline_schedule": schedule})  # type: ignore[typeddict-item]
    assert f'parallel.pipeline_schedule = \'{schedule}\': must be "1f1b" or "gpipe"' in str(raised.value)


def test_ranks_of_a_pipeline_share_samples_and_only_the_last_one_contributes() -> None:
    ranks = [PipelineStrategy(World(rank, 4, rank, 4, 0, torch.device("cpu")), pipeline_config()) for rank in range(4)]
    assert [(each.data_rank, each.data_ranks, each.contributes) for each in ranks] == [
        (0, 2, False),
        (1, 2, False),
        (0, 2, True),
        (1, 2, True),
    ]
    assert ranks[0].replicas == ([0, 1], [2, 3])


def test_ranks_of_a_tensor_group_share_samples_and_ranks_that_shard_do_not() -> None:
    world = [World(rank, 16, rank, 16, 0, torch.device("cpu")) for rank in range(16)]
    ranks = [PipelineStrategy(each, pipeline_config(tensor=2, shard=2)) for each in world]
    assert [each.data_rank for each in ranks] == [0, 0, 1, 1, 2, 2, 3, 3] * 2
    assert {each.data_ranks for each in ranks} == {4}
    assert [each.world.rank for each in ranks if each.contributes] == [8, 10, 12, 14]
    assert ranks[0].replicas == tuple([first, first + 4] for first in (0, 1, 2, 3, 8, 9, 10, 11))


def test_sharded_parameters_are_those_of_exactly_one_block() -> None:
    model = Stages()
    model.blocks[1].layer.weight = model.blocks[0].layer.weight  # type: ignore[union-attr]
    model.blocks[2].layer.bias = model.head.weight  # type: ignore[union-attr]
    model.blocks[3].scale = nn.Parameter(torch.tensor(1.0))  # type: ignore[union-attr]
    names = {parameter: name for name, parameter in model.named_parameters()}
    sharded = sharded_parameters(model, chain_of(model, pipeline_config()))
    assert {names[parameter]: block for parameter, block in sharded.items()} == {
        "blocks.0.layer.bias": "blocks.0",
        "blocks.1.layer.bias": "blocks.1",
        "blocks.2.layer.weight": "blocks.2",
        "blocks.3.layer.weight": "blocks.3",
        "blocks.3.layer.bias": "blocks.3",
    }


class BlockWithCounter(nn.Module):
    """A block with a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("calls", torch.zeros(()))


def buffers_of(model: nn.Module, ranks: int) -> PipelineBuffers:
    world = World(0, ranks, 0, ranks, 0, torch.device("cpu"))
    return PipelineBuffers(model, chain_of(model, pipeline_config()), sizes_of(pipeline_config(), ranks), world)


def model_with_buffers() -> nn.ModuleDict:
    model = nn.ModuleDict({"blocks": nn.ModuleList([BlockWithCounter(), BlockWithCounter()])})
    model.register_buffer("seen", torch.zeros(()))
    model.register_buffer("table", torch.zeros(()))
    return model


def test_buffers_of_stages_are_valid_on_the_first_stage_that_changes_them() -> None:
    buffers = buffers_of(model_with_buffers(), 2)
    buffers.learn({"seen": [0, 1], "table": [], "blocks.0.calls": [], "blocks.1.calls": [1]})
    stages = {name: buffers.stage_of(name) for name in ("seen", "table", "blocks.0.calls", "blocks.1.calls")}
    assert stages == {"seen": 0, "table": None, "blocks.0.calls": 0, "blocks.1.calls": 1}


@pytest.mark.parametrize(("ranks", "name"), [(2, "table"), (4, "table"), (4, "blocks.0.calls")])
def test_buffers_that_only_a_later_pass_changes_raise_an_error(ranks: int, name: str) -> None:
    model = model_with_buffers()
    buffers = buffers_of(model, ranks)
    buffers.learn({"seen": [1], "table": [], "blocks.0.calls": [], "blocks.1.calls": []})
    model.get_buffer(name).add_(1)  # between steps, as a callback may
    buffers.begin_passes()
    model.get_buffer("seen").add_(1)
    buffers.check_passes()
    model.get_buffer(name).add_(1)
    with pytest.raises(LossError, match=f"a pass changed {name}, which the first pass of the run did not change"):
        buffers.check_passes()


def test_buffers_of_a_block_that_only_one_rank_uses_may_change_in_later_passes() -> None:
    model = model_with_buffers()
    buffers = buffers_of(model, 2)
    buffers.learn({"seen": [], "table": [], "blocks.0.calls": [], "blocks.1.calls": []})
    buffers.begin_passes()
    model.get_buffer("blocks.0.calls").add_(1)
    buffers.check_passes()


def test_changed_buffers_are_those_changed_in_place_and_those_replaced() -> None:
    model = model_with_buffers()
    buffers = buffers_of(model, 2)
    before = buffers.versions()
    model.get_buffer("seen").add_(1)
    model.table = torch.zeros(())
    assert changed_buffers(before, buffers.versions()) == {"seen", "table"}
