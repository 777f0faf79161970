"""Run by test_pipelined.py in 1, 2 and 4 processes: trains small transformers in float64, results in files.

In one process the same cases run without a pipeline.
"""

import hashlib
import json
import os
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from ddp_kit import EMA, Loss, Trainer, TrainerConfig
from ddp_kit.checkpoint.format import checkpoints
from ddp_kit.checkpoint.weight_files import TensorFiles

VOCABULARY, WIDTH, LENGTH = 11, 8, 5


class AttentionBlock(nn.Module):
    def __init__(self, tuples: bool) -> None:
        super().__init__()
        self.mix, self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.tuples = tuples

    def forward(self, x: Tensor, mask: Tensor, *, tone: Tensor) -> Any:
        weights = (self.mix(x) @ x.transpose(1, 2) + mask).softmax(-1)
        x = x + weights @ x + tone
        x = x + self.down(functional.gelu(self.up(x)))
        return (x, None) if self.tuples else x


class Transformer(nn.Module):
    """Masks come from the batch, and `tone` from weights that every block needs: both are computed outside of them."""

    def __init__(
        self, *, tied: bool = False, tuples: bool = False, checkpointed: bool = False, dropout: float = 0.0
    ) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.words, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.tone = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(AttentionBlock(tuples) for _ in range(5))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.register_buffer("calls", torch.zeros(()))
        self.checkpointed, self.dropout = checkpointed, dropout
        if tied:
            self.head.weight = self.words.weight
        self.double()

    def forward(self, tokens: Tensor) -> Tensor:
        mask = torch.full((LENGTH, LENGTH), -torch.inf, dtype=torch.float64).triu(1)
        mask = mask[: tokens.shape[1], : tokens.shape[1]].expand(len(tokens), -1, -1)
        tone = self.tone(self.places.sum(0))
        if self.dropout:
            tone = functional.dropout(tone, self.dropout, self.training)
        self.calls += 1
        x = self.words(tokens) + self.places[: tokens.shape[1]]
        for block in self.blocks:
            if self.checkpointed:
                x = torch.utils.checkpoint.checkpoint(block, x, mask, tone=tone, use_reentrant=False)
            else:
                x = block(x, mask, tone=tone)
            x = x[0] if isinstance(x, tuple) else x
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def losses(model: nn.Module, batch: Any) -> Tensor:
    tokens, targets, _ = batch
    return functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten(), reduction="none")


def mean_over_tokens(model: nn.Module, batch: Any) -> Tensor:
    return losses(model, batch).mean()


def weighted_by_token(model: nn.Module, batch: Any) -> Loss:
    weights = batch[2].flatten()
    return Loss((losses(model, batch) * weights).sum(), weight=weights.sum())


def random_tokens(samples: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    tokens = torch.randint(VOCABULARY, (samples, LENGTH), generator=generator)
    targets = torch.randint(VOCABULARY, (samples, LENGTH), generator=generator)
    weights = torch.randint(0, 3, (samples, LENGTH), generator=generator).double()
    return TensorDataset(tokens, targets, weights)


def accuracy(output: Tensor, batch: Any) -> Tensor:
    return (output.argmax(-1) == batch[1]).double().mean()


def trainer_for_case(case: dict[str, Any], parallel: Any, checkpoint: Any) -> Trainer:
    model = Transformer(**case.get("model", {}))
    for name in case.get("frozen", ()):
        model.get_submodule(name).requires_grad_(False)
    make = {
        "adam": lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
        "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.3, momentum=0.9),
    }[case.get("optimizer", "sgd")]
    return Trainer(
        model,
        make,
        weighted_by_token if case.get("weighted") else mean_over_tokens,
        TrainerConfig(
            epochs=case.get("epochs", 2),
            max_steps=case.get("max_steps"),
            **case["sizes"],
            max_grad_norm=case.get("max_grad_norm"),
            log_every_steps=1,
            parallel=parallel,
            checkpoint=checkpoint,
        ),
        metrics={"accuracy": accuracy},
        callbacks=[EMA(0.5)] if case.get("averaged") else [],
    )


def count_bytes_read(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """Bytes that are copied from a checkpoint from now on, by its parts."""
    found: dict[str, int] = {}
    read = TensorFiles.read

    def counting(self: TensorFiles, wanted: Any) -> None:
        for (part, _), places in wanted.items():
            found[part] = found.get(part, 0) + sum(place.memory.nbytes for place in places)
        read(self, wanted)

    monkeypatch.setattr(TensorFiles, "read", counting)
    return found


def held_bytes(parameters: Iterable[Any]) -> int:
    local = [each.to_local() if hasattr(each, "to_local") else each for each in parameters]  # of DTensors
    return sum({each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in local}.values())


def pipeline_results(case: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    read = count_bytes_read(monkeypatch)
    alone = int(os.environ.get("WORLD_SIZE", "1")) == 1
    checkpoint = {"dir": folder, "keep_last": 9, "resume": case.get("resume", "auto"), "every_steps": case.get("every")}
    trainer = trainer_for_case(case, {} if alone else case["parallel"], checkpoint)
    data = random_tokens(case["samples"])
    result = trainer.fit(data, data)
    predicted = trainer.predict(data, lambda model, batch: model(batch[0]))
    newest = checkpoints(folder)[0]
    return {
        "losses": [row.loss for row in result.history],
        "norms": [row.grad_norm for row in result.history],
        "metrics": result.metrics,
        "predicted": predicted.flatten().tolist(),
        "steps": result.steps,
        "saved": str(newest.path),
        "read": read,
        "held": held_bytes(trainer.model.parameters()),
        "held_by_optimizer": held_bytes(each for group in trainer.optimizer.param_groups for each in group["params"]),
        "random": hashlib.sha256(torch.get_rng_state().numpy()).hexdigest(),
        "rank": trainer.world.rank,
    }


if __name__ == "__main__":
    cases, folder = json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2])
    results = []
    for case in cases:
        with pytest.MonkeyPatch.context() as monkeypatch:
            if case.get("little_memory"):  # FSDP then gathers and reduces in each pass
                monkeypatch.setattr("ddp_kit.parallel.fsdp.whole_gradients_fit", lambda *_: False)
            results.append(pipeline_results(case, folder / case["name"], monkeypatch))
    # In a file: the launcher prints a line of more than 256 KiB in parts, and another rank's may come between.
    (folder / f"results-{results[0]['rank']}.json").write_text(json.dumps(results))
