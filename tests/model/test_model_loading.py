"""`load_model`: the weights of a run in an ordinary model, and what did not match."""

from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ddp_kit import EMA, Callback, CheckpointError, ConfigError, Trainer, TrainerConfig, load_model
from ddp_kit.checkpoint.format import name_of
from ddp_kit.cli.export import run as export
from ddp_kit.terminal import Terminal
from tests.support.toys import same_state, sgd, state_of, trainer_for

PATTERN = torch.Generator().manual_seed(1)
DATA = TensorDataset(torch.randn(32, 4, generator=PATTERN), torch.randn(32, 4, generator=PATTERN))


class TiedNetwork(nn.Module):
    """With buffers, tied weights and a state of its own that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.one, self.two = nn.Linear(4, 4), nn.Linear(4, 4)
        self.two.weight = self.one.weight
        self.count = 0

    def forward(self, x: Tensor) -> Any:
        self.count += self.training
        return self.two(self.one(self.norm(x)).tanh())

    def get_extra_state(self) -> Any:
        return {"count": self.count}

    def set_extra_state(self, state: Any) -> None:
        self.count = state["count"]


class States(Callback):
    """The model's state after each step."""

    def __init__(self) -> None:
        self.after: dict[int, dict[str, Any]] = {}

    def on_step(self, trainer: Any) -> None:
        self.after[trainer.step] = state_of(trainer.model)


def train_six_steps(folder: Path, *callbacks: Callback, model: Any = TiedNetwork, **checkpoint: Any) -> Trainer:
    """Six steps, evaluated after every second; the best is the first by default."""
    checkpoint = {"every_steps": 1, "keep_last": 9, "best_metric": "loss", "best_mode": "max", **checkpoint}
    trainer = trainer_for(
        folder, *callbacks, model=model, optimizer=sgd(0.3), max_steps=6, eval_every_steps=2, checkpoint=checkpoint
    )
    trainer.fit(DATA, DATA)
    return trainer


def quiet(*words: object) -> None:
    assert export([*map(str, words)], Terminal({}, lambda _: None)) == 0


def test_load_model_loads_the_newest_the_best_or_a_named_checkpoint(tmp_path: Path) -> None:
    states = States()
    trainer = train_six_steps(tmp_path / "run", states)
    for path, which, step in (("run", "newest", 6), ("run", "best", 2), (f"run/{name_of(3)}", "newest", 3)):
        model = TiedNetwork()
        parameters = [*model.parameters()]
        result = load_model(tmp_path / path, model, which=which)  # type: ignore[arg-type]
        assert (result.step, result.path, result.matches) == (step, tmp_path / "run" / name_of(step), True)
        assert same_state(model.state_dict(), states.after[step])
        assert all(one is other for one, other in zip(model.parameters(), parameters, strict=True))
        assert model.two.weight is model.one.weight
    assert same_state(trainer.model.state_dict(), states.after[6])
    with pytest.raises(ConfigError, match="which='best' needs a run's checkpoint folder"):
        load_model(tmp_path / "run" / name_of(3), TiedNetwork(), which="best")


@pytest.mark.parametrize("shards", [(), ("--max-shard-size", "100B")], ids=["one file", "shards"])
def test_load_model_loads_exported_files(shards: tuple[str, ...], tmp_path: Path) -> None:
    states = States()
    train_six_steps(tmp_path / "run", states)
    target = tmp_path / "model.safetensors"
    quiet(tmp_path / "run", target, "--best", *shards)
    if shards:
        with pytest.raises(CheckpointError, match=r"(?s)cannot be read.*model.safetensors.index.json"):
            load_model(target, TiedNetwork())
        target = tmp_path / "model.safetensors.index.json"
    model = TiedNetwork()
    result = load_model(target, model, strict=False)
    assert result.missing == ("_extra_state",)  # it is no tensor
    assert same_state(model.state_dict() | {"_extra_state": 0}, states.after[2] | {"_extra_state": 0})


def test_load_model_accepts_a_file_with_one_name_of_a_tied_weight(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)
            self.two.weight = self.one.weight

    for name in ("one.weight", "two.weight"):
        weight, model = torch.randn(3, 3), Tied()
        safetensors.torch.save_file({name: weight}, tmp_path / "m.safetensors")
        assert load_model(tmp_path / "m.safetensors", model).matches
        assert torch.equal(model.one.weight, weight)


class Compiled(nn.Module):
    """Has the names of what `torch.compile(model)` returns."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._orig_mod = model

    def forward(self, x: Tensor) -> Any:
        return self._orig_mod(x)


def test_load_model_into_a_compiled_model_ignores_its_prefix(tmp_path: Path) -> None:
    trained = train_six_steps(tmp_path / "run").model.state_dict()
    model = Compiled(TiedNetwork())
    assert load_model(tmp_path / "run", model).matches
    assert same_state(model._orig_mod.state_dict(), trained)


def test_load_model_lists_mismatches_and_strict_changes_nothing(tmp_path: Path) -> None:
    saved = nn.Sequential(OrderedDict(body=nn.Linear(4, 4), head=nn.Linear(4, 4), gone=nn.Identity()))
    train_six_steps(tmp_path, model=saved)
    model = nn.Sequential(OrderedDict(body=nn.Linear(4, 4), head=nn.Linear(4, 2), extra=nn.Linear(2, 2)))
    del model.body.bias
    model.body.register_parameter("bias", None)
    before = state_of(model)
    with pytest.raises(CheckpointError) as raised:
        load_model(tmp_path, model)
    for words in ("missing: extra.weight, extra.bias", "unexpected: body.bias", "head.weight [4, 4] -> [2, 4]"):
        assert words in str(raised.value)
    assert same_state(model.state_dict(), before)
    result = load_model(tmp_path, model, strict=False)
    assert (result.loaded, result.missing, result.unexpected, result.mismatched, result.matches) == (
        ("body.weight",),
        ("extra.weight", "extra.bias"),
        ("body.bias",),
        {"head.weight": ((4, 4), (2, 4)), "head.bias": ((4,), (2,))},
        False,
    )
    after = model.state_dict()
    assert torch.equal(after["body.weight"], saved.body.weight)  # type: ignore[arg-type]
    assert torch.equal(after["head.weight"], before["head.weight"])
    with pytest.raises(CheckpointError, match="do not match the model .*: 0 weights"):
        load_model(tmp_path, nn.Sequential(OrderedDict(other=nn.Linear(1, 1))), strict=False)


def test_load_model_converts_values_to_the_dtype_of_the_model(tmp_path: Path) -> None:
    trainer = train_six_steps(tmp_path)
    model = TiedNetwork().bfloat16()
    load_model(tmp_path, model)
    assert torch.equal(model.one.weight, trainer.model.one.weight.bfloat16())


def test_load_model_skips_or_refuses_a_damaged_checkpoint(tmp_path: Path, said: list[str]) -> None:
    train_six_steps(tmp_path)
    for step in (6, 2):
        file = tmp_path / name_of(step) / "model.safetensors"
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
    model = TiedNetwork()
    assert load_model(tmp_path, model).step == 5
    assert any("checkpoint skipped" in line and "its hash differs" in line for line in said)
    before = state_of(model)
    for words in ({"which": "best"}, {"path": tmp_path / name_of(6)}):
        with pytest.raises(CheckpointError, match="its hash differs"):
            load_model(**{"path": tmp_path, **words}, model=model)  # type: ignore[arg-type]
    assert same_state(model.state_dict(), before)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b"\x80\x04\x95pickle", "cannot be loaded"),
        (b"", "cannot be loaded"),
        (None, "cannot be read"),
    ],
    ids=["pickle", "empty", "none"],
)
def test_load_model_from_a_file_without_weights_raises_error(content: bytes | None, why: str, tmp_path: Path) -> None:
    for name in ("m.safetensors", "m.safetensors.index.json"):
        if content is not None:
            (tmp_path / name).write_bytes(content)
        with pytest.raises(CheckpointError, match=why):
            load_model(tmp_path / name, TiedNetwork())
    (tmp_path / "m.safetensors.index.json").write_text('{"weight_map": {"a": "../m.safetensors"}}')
    with pytest.raises(CheckpointError, match="not name files in the same folder"):
        load_model(tmp_path / "m.safetensors.index.json", TiedNetwork())
    with pytest.raises(CheckpointError, match="there is no checkpoint"):
        load_model(tmp_path / "nowhere", TiedNetwork())


def test_load_model_into_a_meta_model_is_refused(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = nn.Linear(4, 4)
    with pytest.raises(ConfigError, match="meta device"):
        load_model(tmp_path, model)


# The average, and one idea of the best -------------------------------------------------------------------------------


def test_load_model_with_ema_loads_the_average(tmp_path: Path, said: list[str]) -> None:
    ema = EMA(0.5)
    trainer = train_six_steps(tmp_path / "run", EMA(0.9), ema)
    model = TiedNetwork()
    load_model(tmp_path / "run", model)
    assert same_state(model.state_dict(), trainer.model.state_dict())
    assert any("ema=True" in line for line in said)
    load_model(tmp_path / "run", model, ema=True)
    expected = ema.model_state()
    assert same_state(model.state_dict(), expected)
    quiet(tmp_path / "run", tmp_path / "average.safetensors", "--ema")
    exported = safetensors.torch.load_file(tmp_path / "average.safetensors")
    assert exported.keys() == expected.keys() - {"_extra_state", "two.weight"}  # the tied name is in the metadata
    assert all(torch.equal(value, expected[name]) for name, value in exported.items())
    assert not torch.equal(exported["one.weight"], trainer.model.one.weight)
    train_six_steps(tmp_path / "plain")
    with pytest.raises(ConfigError, match="has no average"):
        load_model(tmp_path / "plain", model, ema=True)


@pytest.mark.parametrize("averaged", [False, True])
@pytest.mark.parametrize(("mode", "step"), [("max", 2), ("min", 6)])
def test_load_model_best_loads_the_weights_of_the_best_evaluation(
    averaged: bool, mode: str, step: int, tmp_path: Path
) -> None:
    evaluated: dict[int, dict[str, Tensor]] = {}

    class KeepsWeights(Callback):
        def on_evaluate(self, trainer: Trainer, metrics: dict[str, float]) -> None:
            evaluated[trainer.step] = {name: weight.clone() for name, weight in trainer.model.named_parameters()}

    train_six_steps(tmp_path, *([EMA(0.5)] if averaged else []), KeepsWeights(), best_mode=mode)
    model = TiedNetwork()
    assert load_model(tmp_path, model, which="best", ema=averaged).step == step
    assert same_state(dict(model.named_parameters()), evaluated[step])


class Recorded(nn.Module):
    """With extra state in a tensor that is longer at each save, as Transformer Engine's is."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.history = nn.Linear(4, 4), torch.zeros(0, dtype=torch.uint8)

    def forward(self, x: Tensor) -> Any:
        self.history = torch.cat((self.history, torch.tensor([len(self.history) % 256], dtype=torch.uint8)))
        return self.layer(x)

    def get_extra_state(self) -> Tensor:
        return self.history

    def set_extra_state(self, state: Tensor) -> None:
        self.history = state.clone()


def test_load_model_accepts_extra_state_of_another_length(tmp_path: Path) -> None:
    def trainer(steps: int) -> Trainer:
        torch.manual_seed(0)
        config = TrainerConfig(max_steps=steps, global_batch_size=8, checkpoint={"dir": tmp_path, "every_steps": 2})
        return Trainer(
            Recorded(),
            lambda parameters: torch.optim.SGD(parameters, lr=0.1),
            lambda model, batch: model(batch).square().mean(),
            config,
        )

    data = torch.randn(64, 4)
    trainer(4).fit(data)
    resumed = trainer(6)
    assert resumed.step == 4
    assert resumed.model.history.tolist() == [0, 1, 2, 3]
    resumed.fit(data)
    loaded = Recorded()
    assert load_model(tmp_path, loaded).matches
    assert loaded.history.tolist() == [0, 1, 2, 3, 4, 5]
