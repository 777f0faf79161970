"""The progress bar on a terminal."""

import io
import sys
from typing import Any

import pytest
import torch
from torch import nn

from ddp_kit import Loss, Trainer, TrainerConfig


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


TEXTS = ["test [/data/b]", "[red]red", ":smile: [link=a]b", "[[/]] \\[x]", "{} {0} {x} %s <red>"]


@pytest.mark.parametrize("text", TEXTS)
def test_bar_shows_any_text_as_it_is(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Names of evaluations, metrics and values, and what the script prints while there is a bar."""
    monkeypatch.setenv("COLUMNS", "300")
    monkeypatch.setenv("TERM", "dumb")
    shown, printed = Terminal(), Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setattr(sys, "stdout", printed)

    def loss_fn(model: nn.Module, batch: Any) -> Any:
        print(f"whole line {text}")
        print(f"flushed {text}", end="", flush=True)
        print(f"to stderr {text}", end="", file=sys.stderr, flush=True)
        trainer.log({f"logged {text}": 1.0})
        return model(batch).square().mean()

    model = nn.Linear(2, 1)
    config = TrainerConfig(max_steps=2, global_batch_size=4, log_every_steps=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    metrics = {f"metric {text}": lambda output, batch: Loss(output.sum(), weight=len(batch))}
    trainer = Trainer(model, optimizer, loss_fn, config, metrics=metrics)
    trainer.fit(torch.ones(8, 2), torch.ones(8, 2))
    trainer.evaluate(torch.ones(8, 2), name=f"named {text}")
    trainer.predict(torch.ones(8, 2), lambda model, batch: model(batch))
    for what in ("whole line", "flushed", "to stderr", "logged", "metric", "named"):
        assert f"{what} {text}" in shown.getvalue() + printed.getvalue(), what
