"""`checkpoint.trainable_only`: small checkpoints of what is trained, bound to the frozen weights of their run."""

from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ddp_kit import EMA, Callback, CheckpointError, Trainer, load_model
from ddp_kit.checkpoint.format import name_of
from ddp_kit.checkpoint.load_model import fingerprint
from ddp_kit.cli.export import run as export
from ddp_kit.state_values import Piece
from ddp_kit.terminal import Terminal
from tests.support.toys import same_state, trainer_for

WIDTH = 128
TRAINED = {"adapter.down.weight", "adapter.up.weight", "norm.weight", "norm.bias"}
BUFFERS = {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
PATTERN = torch.Generator().manual_seed(1)
DATA = TensorDataset(torch.randn(24, WIDTH, generator=PATTERN), torch.randn(24, WIDTH, generator=PATTERN))


class Adapted(nn.Module):
    """A frozen layer, and a low-rank one that is trained next to it, as in LoRA."""

    def __init__(self, base: int = 0) -> None:
        super().__init__()
        torch.manual_seed(base)
        self.base = nn.Linear(WIDTH, WIDTH)
        torch.manual_seed(7)
        down, up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)
        self.adapter = nn.ModuleDict({"down": down, "up": up})
        self.norm = nn.BatchNorm1d(WIDTH)
        self.base.requires_grad_(False)

    def forward(self, x: Tensor) -> Any:
        return self.norm(self.base(x) + self.adapter["up"](self.adapter["down"](x)))


def adapter_trainer(folder: Path, *callbacks: Callback, **named: Any) -> Trainer:
    """One that trains the adapter and saves what is trained after every second of four steps."""
    settings = {"max_steps": 4, "eval_every_steps": 1, "every_steps": 2, "trainable_only": True, "model": Adapted}
    return trainer_for(
        folder,
        *callbacks,
        optimizer=lambda parameters: torch.optim.Adam([each for each in parameters if each.requires_grad], lr=0.1),
        **settings | named,
    )


def test_trainable_only_checkpoint_is_small_and_resumes_bitwise(tmp_path: Path) -> None:
    whole = adapter_trainer(tmp_path / "whole", max_steps=6)
    whole.fit(DATA)
    adapter_trainer(tmp_path / "torn", EMA(0.5), max_steps=2).fit(DATA, DATA)
    path = tmp_path / "torn" / name_of(2)
    assert safetensors.torch.load_file(path / "model.safetensors").keys() == TRAINED | BUFFERS
    base = (WIDTH + 1) * WIDTH * 4
    assert sum(file.stat().st_size for file in path.iterdir()) < base, "callbacks included"
    resumed = adapter_trainer(tmp_path / "torn", EMA(0.5), max_steps=6)
    assert resumed.step == 2
    resumed.fit(DATA)
    assert same_state(resumed.model.state_dict(), whole.model.state_dict())
    for name in ("model.safetensors", "optimizer.safetensors"):
        assert (tmp_path / "torn" / name_of(6) / name).read_bytes() == (
            tmp_path / "whole" / name_of(6) / name
        ).read_bytes()


def test_trainable_only_checkpoint_with_other_frozen_weights_is_refused(tmp_path: Path) -> None:
    adapter_trainer(tmp_path).fit(DATA)
    with pytest.raises(
        CheckpointError,
        match=r"frozen weights are not the same as in the run that saved it: base.weight, base.bias differ",
    ):
        adapter_trainer(tmp_path, model=Adapted(base=1))
    almost = Adapted()
    with torch.no_grad():
        row = almost.base.weight[0]
        row[[0, 1]] = row[[1, 0]]
    with pytest.raises(CheckpointError, match=r"in the run that saved it: base.weight differ"):
        adapter_trainer(tmp_path, model=almost)


def test_trainable_only_run_whose_frozen_weights_change_ends(tmp_path: Path) -> None:
    class Changes(Callback):
        def on_step(self, trainer: Any) -> None:
            if trainer.step == 3:
                trainer.model.base.bias.data += 1

    with pytest.raises(CheckpointError, match=r"frozen weights have changed .* such as base.bias"):
        adapter_trainer(tmp_path, Changes()).fit(DATA)


def test_trainable_only_may_change_between_two_runs(tmp_path: Path) -> None:
    """A checkpoint with all weights brings its own; one without takes those of the model."""
    full = adapter_trainer(tmp_path, max_steps=2, trainable_only=False, model=Adapted(base=3))
    full.fit(DATA)
    small = adapter_trainer(tmp_path, max_steps=4, model=Adapted(base=4))
    small.fit(DATA)
    assert torch.equal(small.model.base.weight, full.model.base.weight)
    with pytest.raises(CheckpointError, match="frozen weights are not the same as in the run that saved it"):
        adapter_trainer(tmp_path, max_steps=6, trainable_only=False, model=Adapted(base=4))
    again = adapter_trainer(tmp_path, max_steps=6, trainable_only=False, model=Adapted(base=3))
    assert again.step == 4
    assert same_state(again.model.state_dict(), small.model.state_dict())


def test_trainable_only_run_that_resumes_all_weights_saves_them(tmp_path: Path) -> None:
    full = adapter_trainer(tmp_path / "full", max_steps=2, trainable_only=False, model=Adapted(base=3))
    full.fit(DATA)
    small = adapter_trainer(tmp_path / "small", max_steps=2)
    small.fit(DATA)
    small.resume(tmp_path / "full" / name_of(2))
    small.save()
    model = Adapted(base=3)
    assert load_model(tmp_path / "small", model).matches
    assert same_state(model.state_dict(), full.model.state_dict())


def test_load_model_and_export_report_frozen_weights_that_are_not_included(tmp_path: Path) -> None:
    trainer = adapter_trainer(tmp_path / "run")
    trainer.fit(DATA)
    model = Adapted()
    assert load_model(tmp_path / "run", model).matches
    assert same_state(model.state_dict(), trainer.model.state_dict())
    with pytest.raises(CheckpointError, match="in the run that saved it: base.weight, base.bias"):
        load_model(tmp_path / "run", Adapted(base=1))
    assert load_model(tmp_path / "run", Adapted(base=1), strict=False).missing == ("base.weight", "base.bias")
    lines: list[str] = []
    target = tmp_path / "adapter.safetensors"
    assert export([str(tmp_path / "run"), str(target)], Terminal({}, lines.append)) == 0
    assert "2 frozen weights are not included" in lines[-1]
    assert safetensors.torch.load_file(target).keys() == TRAINED | BUFFERS


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.uint8, torch.complex64, torch.float64]
)
def test_fingerprints_of_pieces_add_up_to_that_of_the_tensor(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However a tensor is divided, and whatever part of it is looked at at once."""
    whole = torch.randn(6, 5, 4, generator=PATTERN).mul(50).to(dtype)
    expected = int(fingerprint(whole))
    monkeypatch.setattr("ddp_kit.checkpoint.load_model._CHUNK", 7)
    flat = whole.reshape(-1)
    divided = [
        [Piece(whole[:4], (6, 5, 4), (0, 0, 0)), Piece(whole[4:], (6, 5, 4), (4, 0, 0))],
        [Piece(whole[:, :, 1:], (6, 5, 4), (0, 0, 1)), Piece(whole[:, :, :1], (6, 5, 4), (0, 0, 0))],
        [
            Piece(whole[:2, :3], (6, 5, 4), (0, 0, 0)),
            Piece(whole[:2, 3:], (6, 5, 4), (0, 3, 0)),
            Piece(whole[2:], (6, 5, 4), (2, 0, 0)),
        ],
        [Piece(flat[:33], (6, 5, 4), (0,), flat=True), Piece(flat[33:], (6, 5, 4), (33,), flat=True)],
    ]
    for pieces in [[whole], *divided]:
        total = sum(int(fingerprint(each)) for each in pieces)
        assert (total - expected) % 2**64 == 0
    changed = whole.clone()
    changed[0, 0, [0, 1]] = changed[0, 0, [1, 0]]
    assert int(fingerprint(changed)) != expected
    assert int(fingerprint(torch.tensor(2.5))) != int(fingerprint(torch.tensor(-2.5)))
