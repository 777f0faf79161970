"""Which code may get at a tensor's memory unseen: the source of whatever a pass comes from is read."""

import importlib
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from ddp_kit.trainer.steady import SteadyState, reaches_memory

Write = Callable[..., ModuleType]

PLAIN = """
import torch.utils.data
from torch import nn

class Numbers(torch.utils.data.Dataset):
    def __init__(self, data):
        self.data = data

    def __getitem__(self, index):
        return self.data[index]

class Net(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)
        self.weight.data.fill_(2.0)  # weight.data.clamp_()

    def init_weights(self):
        self.weight.data.normal_()

    def grow(self):
        self.weight.data = self.weight * 2

def loss(model, batch):
    return model(batch).sum()
"""
CLIPS = "def clip(model): model.weight.data.clamp_(-1, 1)\n"


@pytest.fixture
def written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Write]:
    """Modules of the user's own, imported."""
    made = set[str]()
    monkeypatch.syspath_prepend(tmp_path)

    def write(**sources: str) -> ModuleType:
        for name, source in sources.items():
            (tmp_path / f"{name}.py").write_text(source)
            made.add(name)
        importlib.invalidate_caches()
        return importlib.import_module([*sources][-1])

    yield write
    for name in made:
        sys.modules.pop(name, None)


def test_what_makes_weights_or_puts_others_in_their_place_does_not_count(written: Write) -> None:
    script = written(script=PLAIN)
    assert not reaches_memory(script.Net(), script.loss)
    assert not reaches_memory(script.Net(), partial(script.loss))


@pytest.mark.parametrize(
    "added",
    [
        CLIPS,
        "clip = lambda model: model.weight.data.clamp_(-1, 1)",
        "def change(model): model.weight.data += 1",
        "def change(model): model.weight.untyped_storage().fill_(0)",
        "class Clips:\n    def __call__(self, model): model.weight.data[0] = 0",
        "def outer():\n    def inner(model): return model.weight.data\n    return inner",
        "import torch.distributed as dist\ndef gossip(model): dist.all_reduce(model.weight)",
    ],
)
def test_what_writes_to_the_data_anywhere_in_the_file_is_found(added: str, written: Write) -> None:
    script = written(script=PLAIN + added)
    assert reaches_memory(script.Net(), script.loss)
    assert reaches_memory(nn.Linear(1, 1), script.loss)
    assert reaches_memory(script.Net(), lambda model, batch: model(batch))


@pytest.mark.parametrize(
    "importing",
    ["import other", "from other import clip", "def late():\n    from other import clip as cut", "import more"],
)
def test_so_is_what_it_imports(importing: str, written: Write) -> None:
    written(other=CLIPS, more="from other import clip")
    script = written(script=PLAIN + importing)
    assert reaches_memory(script.Net(), script.loss)


@pytest.mark.parametrize(
    "register", ["register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"]
)
def test_so_are_hooks(register: str, written: Write) -> None:
    other, script = written(other=CLIPS), written(script=PLAIN)
    model = nn.Sequential(script.Net())
    getattr(model[0], register)(other.clip)
    assert reaches_memory(model, script.loss)


def test_so_are_hooks_of_weights(written: Write) -> None:
    other, script = written(other=CLIPS), written(script=PLAIN)
    model = script.Net()
    model.weight.register_hook(other.clip)
    assert reaches_memory(model, script.loss)
    stepping = script.Net()
    stepping.weight.register_post_accumulate_grad_hook(script.loss)
    assert reaches_memory(stepping, script.loss)


def test_folders_of_modules_are_read(written: Write, tmp_path: Path) -> None:
    for folder in ("empty", "without"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "layers.py").touch()
    (tmp_path / "empty" / "__init__.py").touch()
    script = written(
        script=PLAIN + "from empty import layers\nfrom without import layers as more\nimport empty, without"
    )
    assert not reaches_memory(script.Net(), script.loss)


def test_more_than_can_be_read_soon_counts(written: Write) -> None:
    script = written(script=PLAIN + "#" * 300_000)
    assert reaches_memory(script.Net(), script.loss)


def test_what_cannot_be_read_counts(written: Write) -> None:
    script = written(script=PLAIN)
    unread: dict[str, Any] = {"__name__": "nowhere"}
    exec("def loss(model, batch): return model(batch).sum()", unread)
    model = script.Net()
    optimizer = torch.optim.SGD(model.parameters())
    assert len(SteadyState(model, optimizer, script.loss).tensors()) == 2
    assert SteadyState(model, optimizer, unread["loss"]).tensors() == []


@pytest.mark.parametrize(
    "model", [nn.TransformerEncoderLayer(8, 2), nn.LSTM(3, 4), nn.utils.parametrizations.weight_norm(nn.Linear(2, 2))]
)
def test_torch_is_known(model: nn.Module, written: Write) -> None:
    assert not reaches_memory(model, written(script=PLAIN).loss)


def test_what_is_trained_and_the_optimizer_s_own_is_steady(written: Write) -> None:
    script = written(script=PLAIN)
    model = script.Net()
    model.bias.requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    model.weight.grad = torch.ones(4, 4)
    optimizer.step()
    first, second = SteadyState(model, optimizer, script.loss).tensors()
    assert first is model.weight
    assert second is optimizer.state[model.weight]["momentum_buffer"]
