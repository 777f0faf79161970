"""How a model is cut into stages, what its forward pass is on each, and what is refused."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from ddp_kit import ConfigError, LossError, TrainerConfig
from ddp_kit.config.settings import ParallelConfig
from ddp_kit.distributed.world import World
from ddp_kit.parallel.pipeline import PipelineStrategy
from ddp_kit.parallel.stages import Received, StageModel, chain_of, places_of_stages, sharded_parameters
from ddp_kit.parallel.strategy import StageBoundary


class Block(nn.Module):
    def __init__(self, width: int = 3) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.kind = "full"

    def forward(self, x: Tensor, scale: Any = 1.0) -> Tensor:
        y: Tensor = torch.tanh(self.layer(x)) * scale
        return y


class Model(nn.Module):
    """`order`: of the blocks; `between`, `after`: what is done with the outputs of blocks."""

    def __init__(self, order: Any = range(4), between: Any = None, after: Any = None) -> None:
        super().__init__()
        self.inner = nn.Linear(2, 3)
        self.blocks = nn.ModuleList(Block() for _ in range(4))
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


def mean(model: nn.Module, batch: Tensor) -> Tensor:
    value: Tensor = model(batch).square().mean()
    return value


def config(**settings: Any) -> ParallelConfig:
    return ParallelConfig(**{"pipeline": 2} | settings)


def in_stages(model: nn.Module, function: Any = mean, **settings: Any) -> tuple[Tensor, Tensor]:
    """The loss on the last of two stages, and what was sent to it."""
    chain, batch = chain_of(model, config(**settings)), torch.linspace(-1, 2, 10).reshape(5, 2)
    with pytest.raises(StageBoundary) as passed:
        StageModel(model, chain, 0).call(function, batch)
    sent = passed.value.tensor
    received = sent.detach().requires_grad_()
    loss: Tensor = StageModel(model, chain, 1).call(function, batch, Received(received, passed.value.items))
    loss.backward()  # type: ignore[no-untyped-call]
    assert received.grad is not None
    sent.backward(received.grad)  # type: ignore[no-untyped-call]
    return loss, sent


def test_stages_compute_what_the_model_does_and_leave_it_as_it_was() -> None:
    model, batch = Model(), torch.linspace(-1, 2, 10).reshape(5, 2)
    names = [name for name, _ in model.named_modules()]
    expected = mean(model, batch)
    gradients = torch.autograd.grad(expected, [*model.parameters()])
    loss, _ = in_stages(model)
    assert loss.item() == expected.item()
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        assert parameter.grad is not None
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-6, atol=1e-9)
    assert [name for name, _ in model.named_modules()] == names
    assert all(type(block) is Block for block in model.blocks)


@pytest.mark.parametrize(
    ("model", "function", "found"),
    [
        (
            Model(order=(0, 2, 1, 3)),
            mean,
            "out of order: blocks.2 was called where blocks.1 was expected.*\n.*parallel='fsdp' needs neither",
        ),
        (Model(order=(0, 1, 2)), mean, "ran 3 of its 4 blocks"),
        (Model(between=torch.relu), mean, "changes the output of blocks.1 before it calls blocks.2"),
        (Model(after=lambda outputs: outputs[1] + outputs[-1]), mean, "not only through the next block"),
        (Model(), lambda model, batch: mean(model, batch) + mean(model, batch), "out of order: blocks.0 was"),
    ],
)
def test_what_is_no_chain_is_an_error_and_not_another_gradient(model: nn.Module, function: Any, found: str) -> None:
    with pytest.raises(LossError, match=found):
        in_stages(model, function)
    assert all(type(block) is Block for block in model.blocks)  # type: ignore[union-attr]


def test_a_loss_that_does_not_call_the_model_is_an_error_on_each_stage() -> None:
    model = Model()
    with pytest.raises(LossError, match="ran 0 of its 4 blocks"):
        StageModel(model, chain_of(model, config()), 0).call(lambda model, batch: batch.sum(), torch.ones(2))


def test_stages_have_about_the_same_bytes() -> None:
    model = nn.Sequential(*(Block(width) for width in (9, 3, 3, 3)))
    assert chain_of(model, config()).stages == (range(1), range(1, 4))


def test_stages_can_be_named() -> None:
    assert chain_of(Model(), config(pipeline=3, pipeline_stages=("blocks.1", "blocks.3"))).stages == (
        range(1),
        range(1, 3),
        range(3, 4),
    )
    assert chain_of(nn.Sequential(*(nn.Linear(2, 2) for _ in range(3))), config(pipeline_stages=("1",))).prefix == ""


@pytest.mark.parametrize(
    ("model", "settings", "found"),
    [
        (nn.Linear(2, 2), {}, "no repeated blocks"),
        (nn.ModuleDict({"a": Model(), "b": Model()}), {}, "several places: a.blocks, b.blocks"),
        (Model(), {"pipeline": 5}, "makes 5 stages, but the model Model has only 4 repeated"),
        (Model(), {"pipeline_stages": ()}, "names 0 modules"),
        (Model(), {"pipeline_stages": ("blocks.9",)}, "no such module"),
        (Model(), {"pipeline_stages": ("head",)}, "do not belong to the same nn.ModuleList"),
        (Model(), {"pipeline_stages": ("blocks.0",)}, "the first stage always begins"),
        (Model(), {"pipeline": 3, "pipeline_stages": ("blocks.2", "blocks.1")}, "not in the order"),
        (nn.Sequential(Block(), Block(), nn.BatchNorm1d(3)), {}, "BatchNorm.*: 2\n.*use LayerNorm"),
        (nn.Sequential(nn.Embedding(3, 3, sparse=True), Block(), Block()), {}, "sparse"),
        (
            Model(),
            {"pipeline_schedule": "zbv", "pipeline": 3},
            "makes 6 stages, but the model Model has only 4 repeated",
        ),
        (Model(), {"compression": "bf16"}, "a setting of DDP"),
        (Model(), {"strategy": "pipeline", "pipeline": 1}, "parallel.pipeline is 1"),
        (
            Model(),
            {"shard": 2, "pipeline_schedule": "zbv"},
            "which FSDP does not support.*\n.*'1f1b', 'interleaved' or 'gpipe'",
        ),
        (Model(), {"shard": 2, "fsdp_units": ("blocks.*",)}, "in which each block is a unit\n.*leave it out"),
    ],
)
def test_what_cannot_be_a_pipeline_is_refused(model: nn.Module, settings: dict[str, Any], found: str) -> None:
    parallel = config(**settings)
    ranks = parallel.pipeline * max(1, parallel.shard)
    with pytest.raises(ConfigError, match=found):
        PipelineStrategy(World(0, ranks, 0, ranks, 0, torch.device("cpu")), parallel).check(model)


def test_zero_bubble_puts_the_first_and_the_last_stage_on_the_first_rank() -> None:
    assert places_of_stages(config(pipeline=3, pipeline_schedule="zbv")) == (0, 1, 2, 2, 1, 0)
    assert places_of_stages(config(pipeline=3, pipeline_schedule="interleaved")) == (0, 1, 2, 0, 1, 2)


@pytest.mark.parametrize("setting", [{"compile": "blocks"}, {"memory": {"activation_checkpointing": "blocks"}}])
def test_zero_bubble_is_refused_where_a_backward_pass_cannot_be_divided(setting: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="use '1f1b' or 'interleaved'"):
        TrainerConfig(global_batch_size=4, max_steps=1, parallel={"pipeline": 2, "pipeline_schedule": "zbv"}, **setting)


def test_all_ranks_of_a_pipeline_share_samples_and_the_last_one_has_the_losses() -> None:
    ranks = [PipelineStrategy(World(rank, 4, rank, 4, 0, torch.device("cpu")), config()) for rank in range(4)]
    assert [(each.data_rank, each.data_ranks, each.contributes) for each in ranks] == [
        (0, 2, False),
        (1, 2, False),
        (0, 2, True),
        (1, 2, True),
    ]
    assert ranks[0].replicas == ([0, 1], [2, 3])


def test_ranks_of_a_tensor_group_share_samples_too_and_those_that_shard_do_not() -> None:
    world = [World(rank, 16, rank, 16, 0, torch.device("cpu")) for rank in range(16)]
    ranks = [PipelineStrategy(each, config(tensor=2, shard=2)) for each in world]
    assert [each.data_rank for each in ranks] == [0, 0, 1, 1, 2, 2, 3, 3] * 2
    assert {each.data_ranks for each in ranks} == {4}
    assert [each.world.rank for each in ranks if each.contributes] == [8, 10, 12, 14]
    assert ranks[0].replicas == tuple([first, first + 4] for first in (0, 1, 2, 3, 8, 9, 10, 11))


def test_what_one_block_alone_has_is_sharded() -> None:
    model = Model()
    model.blocks[1].layer.weight = model.blocks[0].layer.weight  # type: ignore[union-attr]
    model.blocks[2].layer.bias = model.head.weight  # type: ignore[union-attr]
    model.blocks[3].scale = nn.Parameter(torch.tensor(1.0))  # type: ignore[union-attr]
    names = {each: name for name, each in model.named_parameters()}
    found = {names[each]: block for each, block in sharded_parameters(model, chain_of(model, config())).items()}
    assert found == {
        "blocks.0.layer.bias": "blocks.0",
        "blocks.1.layer.bias": "blocks.1",
        "blocks.2.layer.weight": "blocks.2",
        "blocks.3.layer.weight": "blocks.3",
        "blocks.3.layer.bias": "blocks.3",
    }
