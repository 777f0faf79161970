"""Sparse gradients train as dense ones do, with each setting that reads or changes gradients.

As a script on several ranks, it compares them on these ranks.
"""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ddp_kit import EMA, Callback, ConfigError, Loss, Trainer, TrainerConfig


class Halves(Callback):
    def on_gradients(self, trainer: Any, gradients: Any) -> None:
        assert all(bool(norm > 0) for norm in gradients.norms().values())
        for name, gradient in gradients.items():
            gradients[name] = None if gradient is None else gradient * 0.5


SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "norm": {"max_grad_norm": 0.05},
    "value": {"max_grad_value": 0.02},
    "norm_and_value": {"max_grad_norm": 0.1, "max_grad_value": 0.02},
    "skip": {"non_finite_gradients": "skip"},
    "accumulated": {"accumulation_steps": 2, "max_grad_value": 0.02},
    "replayed": {"verify_ranks": "replay"},
    "compared": {"verify_ranks": "all"},
    "fp16": {"precision": "fp16", "max_grad_value": 0.02},
    "bf16": {"precision": "bf16"},
    "bf16-true": {"precision": "bf16-true", "max_grad_norm": 0.05},
    "offloaded": {"memory": {"offload": "optimizer"}, "max_grad_value": 0.02},
    "searched": {"micro_batch_size": "auto"},
    "weighted": {},
    "ema": {},
    "halves": {"max_grad_value": 0.02},
}
LAYERS = {"embedding": nn.Embedding, "bag": nn.EmbeddingBag}


def weights_and_norms(layer: str, name: str, *, sparse: bool) -> tuple[list[float], list[float]]:
    """The weights and the logged norms of a run in which each token occurs several times in a batch."""
    torch.manual_seed(0)
    model = nn.Sequential(LAYERS[layer.removesuffix(" alone")](5, 3, sparse=sparse))
    if not layer.endswith(" alone"):
        model.append(nn.Linear(3, 1))
    tokens = torch.arange(16) % 3
    if layer.startswith("bag"):
        tokens = torch.stack([tokens, tokens.roll(1)], 1)

    def loss(model: nn.Module, batch: Any) -> Tensor | Loss:
        errors = (model(batch[0]).float() - 1).square()
        return Loss(errors.sum() * 3, 3 * len(errors)) if name == "weighted" else errors.mean()

    callbacks = [{"ema": EMA(decay=0.5), "halves": Halves()}[name]] if name in ("ema", "halves") else []
    config = TrainerConfig(**{"epochs": 2, "global_batch_size": 8, "log_every_steps": 1} | SETTINGS[name])
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), loss, config, callbacks=callbacks)
    result = trainer.fit(TensorDataset(tokens), TensorDataset(tokens))
    weights = [parameter.detach().float().reshape(-1) for parameter in model.parameters()]
    return torch.cat(weights).tolist(), [row.grad_norm for row in result.history]


@pytest.mark.parametrize("layer", [*LAYERS, *(f"{layer} alone" for layer in LAYERS)])
@pytest.mark.parametrize("name", SETTINGS)
def test_sparse_gradients_train_as_dense_ones(layer: str, name: str) -> None:
    weights, norms = weights_and_norms(layer, name, sparse=True)
    expected, expected_norms = weights_and_norms(layer, name, sparse=False)
    # With bf16-true, each of the four steps rounds values up to 1.5 to multiples of 1/128.
    assert weights == pytest.approx(expected, rel=1e-2 if "16" in name else 1e-5, abs=2e-2 if "true" in name else 0)
    assert norms == pytest.approx(expected_norms, rel=2e-2 if "16" in name else 1e-4)


@pytest.mark.slow
def test_sparse_gradients_train_as_dense_ones_on_two_ranks(tmp_path: Path) -> None:
    from tests.support import launching  # not in the script

    run = launching.run(launching.DDPKIT, "launch", "--nproc-per-node", "2", __file__, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == [name for layer in LAYERS for name in SETTINGS]


if __name__ == "__main__":
    SETTINGS["compressed"] = {"parallel": {"compression": "fp16"}}
    with pytest.raises(ConfigError, match="compression='fp16' does not support modules with sparse gradients: 0\n"):
        weights_and_norms("embedding", "compressed", sparse=True)
    del SETTINGS["compressed"]
    for layer in LAYERS:
        for name in SETTINGS:
            test_sparse_gradients_train_as_dense_ones(layer, name)
            if int(os.environ["RANK"]) == 0:
                print(name)
