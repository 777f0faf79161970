"""The layers of one model on several devices: names, placement, and the map that is chosen.

torch has one CPU device. Where tensors have to be on the right one, they are fake ones of "cpu:0" and "cpu:1": these
have no values, operations refuse to mix them, and autograd works.
"""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from ddp_kit import ConfigError, Trainer, TrainerConfig
from ddp_kit.checkpoint.model_state import ModelPart, OptimizerPart
from ddp_kit.checkpoint.reader import _Fetch
from ddp_kit.config.settings import ParallelConfig
from ddp_kit.distributed.consistency import bits
from ddp_kit.distributed.world import World
from ddp_kit.parallel import device_map, strategy_for
from ddp_kit.parallel.ddp import DdpReducer
from ddp_kit.parallel.device_map import DeviceMapStrategy, SingleRankDeviceMap, automatic_map, expanded, indices_of
from ddp_kit.parallel.strategy import scale_gradients
from tests.support.toys import world_of_cpus

TWO = (torch.device("cpu", 0), torch.device("cpu", 1))
SPLIT = {"": 0, "blocks.2-3": 1}


class BlockWithDict(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(4), nn.Linear(4, 4)

    def forward(self, x: Tensor, rest: dict[str, Any]) -> Tensor:
        return x + self.linear(self.norm(x)) * rest["scale"]


class NetworkWithDict(nn.Module):
    """Blocks that get a tensor of the model itself in a dict, among the arguments by name."""

    def __init__(self, tied: bool = False, blocks: int = 4) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 4)
        self.blocks = nn.ModuleList([BlockWithDict() for _ in range(blocks)])
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))  # numbers without dimensions may be mixed
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x, rest={"scale": self.scale, "number": 3})
        found: Tensor = self.head(self.drop(x))
        return found


def mapped_strategy(model: nn.Module, given_map: Any, gpus: tuple[torch.device, ...] = ()) -> SingleRankDeviceMap:
    strategy = strategy_for(ParallelConfig(device_map=given_map), world_of_cpus(gpus=gpus))
    assert isinstance(strategy, SingleRankDeviceMap)
    strategy.check(model)
    strategy.setup(model)
    return strategy


# --- names ------------------------------------------------------------------------------------------------------------


def test_device_map_prefers_longer_names_and_expands_ranges() -> None:
    model = NetworkWithDict()
    found = indices_of(model, expanded(model, {"": 2, "blocks.1-3": 1, "blocks.2.norm": 0}))
    assert found == {
        **{"": 2, "embed": 2, "head": 2, "blocks.0.norm": 2, "blocks.0.linear": 2},
        **{"blocks.1.norm": 1, "blocks.1.linear": 1, "blocks.3.norm": 1, "blocks.3.linear": 1},
        **{"blocks.2.norm": 0, "blocks.2.linear": 1},
    }


@pytest.mark.parametrize(
    ("given_map", "said"),
    [
        (
            {"": 0, "block.0": 1},
            "names 'block.0', but NetworkWithDict has no module 'block.0'\n  hint: did you mean 'blocks.0'?",
        ),
        ({"": 0, "blocks.2-4": 1}, "names 'blocks.2-4', but NetworkWithDict has no module 'blocks.4'"),
        ({"": 0, "blocks.3-2": 1}, "the range 3-2 in 'blocks.3-2' is empty"),
        ({"": 0, "blocks.0-2": 1, "blocks.2-3": 0}, "'blocks.2' in two entries: 'blocks.0-2' and 'blocks.2-3'"),
        (
            {"embed": 0, "blocks.0-2": 1},
            "leaves out 'blocks.3', 'head' and the parameters and buffers of the model itself",
        ),
        (
            {"embed": 0, "blocks": 0, "head": 0},
            "leaves out the parameters and buffers of the model itself ('' in the map)",
        ),
        ({"": 0, "head": 1}, "embed.weight and head.weight are tied (one tensor), but parallel.device_map puts them"),
        ({"": 0, "blocks.3": 2}, "names device 2, but there are 2 GPUs for rank 0: cpu:0, cpu:1"),
    ],
)
def test_device_map_that_is_invalid_is_refused_with_the_reason(given_map: dict[str, int], said: str) -> None:
    model = NetworkWithDict(tied=True)
    with pytest.raises(ConfigError) as caught:
        strategy_for(ParallelConfig(device_map=given_map), world_of_cpus(gpus=TWO)).check(model)
    assert said in str(caught.value)


@pytest.mark.parametrize("number", [-1, 0.5, True, "gpu"])
def test_device_map_with_a_negative_device_is_refused(number: object) -> None:
    with pytest.raises(ConfigError, match="parallel.device_map = .*: map module names to device numbers"):
        TrainerConfig(parallel={"device_map": {"": number}})


def test_device_map_from_a_file_can_be_overridden(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    file.write_text('{"parallel": {"device_map": {"blocks.0-11": 0, "head": 1}}}')
    config = TrainerConfig.load(file, {"parallel.device_map": {"blocks.12-23": 1}})
    assert config.parallel.device_map == {"blocks.0-11": 0, "head": 1, "blocks.12-23": 1}


def test_device_map_implies_its_strategy_and_excludes_others() -> None:
    assert ParallelConfig(device_map="auto") == ParallelConfig(strategy="device_map")
    for others in ({"strategy": "ddp"}, {"tensor": 2}, {"strategy": "zero1"}):
        with pytest.raises(ConfigError, match="device_map"):
            ParallelConfig(device_map="auto", **others)
    several = World(0, 2, 0, 2, 0, torch.device("cpu"))
    assert type(strategy_for(ParallelConfig(device_map="auto"), several)) is DeviceMapStrategy


# --- placement --------------------------------------------------------------------------------------------------------


@pytest.fixture
def fake(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every tensor made within is a fake one."""
    # Fake ones cannot change their device in place, so `on_devices` makes them there.
    monkeypatch.setattr(device_map, "_move_own_tensors", lambda *_: None)
    with FakeTensorMode(allow_non_fake_inputs=False):
        yield


def on_devices(model: nn.Module, given_map: Mapping[str, int]) -> nn.Module:
    """The model with its tensors where the map says."""
    for name, index in indices_of(model, expanded(model, given_map)).items():
        module = model.get_submodule(name)
        for own, tensor in [*module.named_parameters(recurse=False)]:
            setattr(module, own, nn.Parameter(torch.empty_like(tensor, device=TWO[index])))
        for own, tensor in [*module.named_buffers(recurse=False)]:
            setattr(module, own, torch.empty_like(tensor, device=TWO[index]))
    return model


@pytest.mark.usefixtures("fake")
@pytest.mark.parametrize(
    "given_map",
    [
        SPLIT,
        {"": 1},
        {"": 1, "blocks": 0},
        {"embed": 0, "blocks.0-1": 0, "blocks.2-3": 1, "head": 1, "": 0},
        {"": 0, "blocks.1": 1, "blocks.3.norm": 1},
        {"": 0, "drop": 1},
    ],
)
def test_device_map_runs_every_operation_on_one_device(given_map: dict[str, int]) -> None:
    model = on_devices(NetworkWithDict(), given_map)
    strategy = mapped_strategy(model, given_map, TWO)
    output = model(torch.empty(3, 4, device=TWO[0]))
    assert output.device == TWO[0]
    output.sum().backward()
    assert all(each.grad is not None and each.grad.device == each.device for each in model.parameters())
    scale_gradients(strategy.updated_parameters, torch.ones((), dtype=torch.float64, device=TWO[0]))
    nn.utils.clip_grads_with_norm_(strategy.updated_parameters, 1.0, strategy.grad_norm())
    nn.utils.clip_grad_value_(strategy.updated_parameters, 1.0)
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.step()
    assert all(optimizer.state[each]["exp_avg"].device == each.device for each in model.parameters())
    assert bits(model.parameters()).shape == ()


@pytest.mark.usefixtures("fake")
def test_model_on_several_devices_without_a_device_map_fails() -> None:
    model = on_devices(NetworkWithDict(), SPLIT)
    with pytest.raises(RuntimeError, match="same device|different devices"):
        model(torch.empty(3, 4, device=TWO[0]))


@pytest.mark.usefixtures("fake")
def test_device_map_returns_output_to_the_device_of_the_input_and_moves_once() -> None:
    model = on_devices(NetworkWithDict(), SPLIT)
    strategy = mapped_strategy(model, SPLIT, TWO)
    strategy._place(model)  # as after a step that ran out of memory: hooks are not doubled
    moved: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        to = Tensor.to
        patch.setattr(Tensor, "to", lambda own, device, **rest: (moved.append(str(device)), to(own, device, **rest))[1])
        assert model(torch.empty(3, 4, device=TWO[1])).device == TWO[1]
    # the input; x and scale for block 2, scale for block 3, x for the head, the output
    assert moved == ["cpu:0", "cpu:1", "cpu:1", "cpu:1", "cpu:1", "cpu:0", "cpu:1"]


def test_device_map_places_weights_and_buffers() -> None:
    model = NetworkWithDict()
    mapped_strategy(model, {"": 1, "blocks": 0}, (torch.device("cpu"), torch.device("meta")))
    assert {str(each.device) for each in model.blocks.parameters()} == {"cpu"}
    assert {str(each.device) for each in (model.embed.weight, model.head.bias, model.scale)} == {"meta"}


@pytest.mark.parametrize("given_map", [SPLIT, "auto"])
def test_device_map_trains_bitwise_like_one_device(given_map: Any) -> None:
    """Dropout too. On the CPU, where values can be compared, every number is the CPU."""
    ended = []
    x = torch.randn(12, 4)
    data = torch.utils.data.TensorDataset(x, x.flip(1))
    for parallel in ({}, {"device_map": given_map}):
        torch.manual_seed(3)
        trainer = Trainer(
            NetworkWithDict(tied=True),
            lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
            lambda model, batch: (model(batch[0]) - batch[1]).square().mean(),
            TrainerConfig(epochs=2, global_batch_size=5, accumulation_steps=2, max_grad_norm=0.5, parallel=parallel),
            metrics={"largest": lambda output, _: output.abs().max()},
        )
        result = trainer.fit(data, data)
        ended.append([result.loss, result.metrics, *map(Tensor.tolist, trainer.model.parameters())])
    assert ended[0] == ended[1]


@pytest.mark.usefixtures("fake")
def test_ddp_reducer_with_parameters_on_several_devices_contributes_zeros_without_gradients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, losses = on_devices(NetworkWithDict(), {"": 1, "blocks": 0}), list[Tensor]()
    reducer = DdpReducer(SimpleNamespace(module=model, broadcast_buffers=True), ())
    monkeypatch.setattr(reducer, "reduced", lambda loss: losses.append(loss) or loss)
    reducer.reduce_zeros()
    assert losses[0].device == next(model.parameters()).device
    assert all(parameter.grad is None for parameter in model.parameters())


def test_bits_of_weights_on_several_devices_are_one_number() -> None:
    assert bits([torch.ones(3, device="meta"), torch.ones(3)]).device.type == "meta"


def test_device_map_loads_a_checkpoint_to_the_device_of_each_parameter() -> None:
    model = NetworkWithDict()
    strategy = mapped_strategy(model, {"": 0, "head": 1}, (torch.device("cpu"), torch.device("meta")))
    optimizer = torch.optim.AdamW([{"params": model.head.parameters()}, {"params": model.embed.parameters()}])
    of_model = ModelPart(strategy, strategy.world, trainable_only=False)
    of_optimizer = OptimizerPart(strategy, optimizer, optimizer, "AdamW")
    assert [str(of_model.device_of(name)) for name in ("head.bias", "scale")] == ["meta", "cpu"]
    names = ("state.1.exp_avg", "state.2.exp_avg", "state.4.exp_avg", "param_groups.0.lr")
    assert [str(of_optimizer.device_of(name)) for name in names] == ["meta", "cpu", "None", "None"]
    fetch = _Fetch(
        {("model", "head.bias"): torch.ones(4)}, lambda _, name: of_model.device_of(name) or torch.device("cpu")
    )
    assert str(fetch("model", "head.bias", True).device) == "meta"
    assert str(fetch("model", "head.bias", False).device) == "cpu"  # it was on the host when it was saved


# --- "auto" -----------------------------------------------------------------------------------------------------------


def test_automatic_map_divides_blocks_and_other_modules_in_order() -> None:
    found = automatic_map(NetworkWithDict(), [math.inf] * 2)
    assert device_map.map_text(found) == '{"": 0, "embed": 0, "blocks.0-1": 0, "blocks.2-3": 1, "head": 1}'
    assert automatic_map(NetworkWithDict(), [math.inf]) == {"": 0}


def test_automatic_map_counts_an_embedding_as_memory_without_work() -> None:
    model = NetworkWithDict()
    model.embed = torch.nn.Embedding(100_000, 4)
    found = automatic_map(model, [math.inf] * 2)
    assert (found["blocks.1"], found["blocks.2"]) == (0, 1), "the blocks are divided evenly"
    a_block = sum(each.nbytes for each in model.blocks[0].parameters()) * 4
    first = int(model.embed.weight.nbytes * 4 + 1.5 * a_block)
    with_little = automatic_map(model, [first, math.inf])
    assert (with_little["embed"], with_little["blocks.0"], with_little["blocks.1"]) == (0, 0, 1), (
        "what the memory takes"
    )


def test_automatic_map_keeps_tied_tensors_on_one_device() -> None:
    found = automatic_map(NetworkWithDict(tied=True), [math.inf] * 3)
    assert found["head"] == found["embed"] == 0
    assert max(found.values()) == 2


@given(st.integers(2, 6), st.integers(1, 8), st.booleans())
def test_automatic_map_is_complete_and_uses_every_device_possible(blocks: int, devices: int, tied: bool) -> None:
    model = NetworkWithDict(tied, blocks)
    found = automatic_map(model, [math.inf] * devices)
    indices_of(model, found)
    links = blocks + (2 if tied else 3)  # the model's own buffer, embed, and head unless it is tied
    assert set(found.values()) == set(range(min(devices, links)))


def test_automatic_map_respects_memory_and_refuses_a_model_that_does_not_fit() -> None:
    block = sum(each.nbytes for each in BlockWithDict().parameters()) * 4  # gradients and two states
    found = automatic_map(NetworkWithDict(), [1.5 * block, 100 * block])
    assert [found[f"blocks.{number}"] for number in range(4)] == [1, 1, 1, 1]
    with pytest.raises(ConfigError, match="no split into consecutive stages fits"):
        automatic_map(NetworkWithDict(), [block, block])


def test_automatic_map_of_a_model_without_repeated_blocks_is_refused() -> None:
    with pytest.raises(ConfigError, match="'auto' needs repeated blocks, but Linear has no"):
        automatic_map(nn.Linear(2, 2), [math.inf] * 2)
