"""Progress: the bar on a terminal, and the heartbeat, which the launcher reads."""

import io
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ddp_kit import Loss, Trainer, TrainerConfig
from ddp_kit.env import ERROR_FILE
from ddp_kit.heartbeat import ADVICE_WORDS, HeartbeatWriter, Phase, read_heartbeat


@pytest.fixture
def error_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(ERROR_FILE, str(tmp_path / "error.json"))
    return str(tmp_path / "error.json")


def test_heartbeat_phase_lasts_for_its_block(error_file: str) -> None:
    heartbeat = HeartbeatWriter()
    with heartbeat.during(Phase.DATA):
        with heartbeat.during(Phase.EVALUATION):
            assert read_heartbeat(error_file).phase is Phase.EVALUATION
        assert read_heartbeat(error_file).phase is Phase.DATA
    assert read_heartbeat(error_file).phase is Phase.OUTSIDE


def test_heartbeat_phase_after_an_exception_is_failed_until_the_next_phase(error_file: str) -> None:
    heartbeat = HeartbeatWriter()
    with pytest.raises(RuntimeError), heartbeat.during(Phase.BACKWARD):
        raise RuntimeError("lost its peer")
    assert read_heartbeat(error_file).phase is Phase.FAILED
    with heartbeat.during(Phase.EVALUATION), pytest.raises(ValueError), heartbeat.during(Phase.CHECKPOINT):  # noqa: PT011
        raise ValueError("handled inside")
    assert read_heartbeat(error_file).phase is Phase.OUTSIDE


def test_heartbeat_phase_after_system_exit_is_not_failed(error_file: str) -> None:
    with pytest.raises(SystemExit), HeartbeatWriter().during(Phase.DATA):
        raise SystemExit(75)
    assert read_heartbeat(error_file).phase is Phase.OUTSIDE


def test_heartbeat_has_the_values_of_the_last_log_point(error_file: str) -> None:
    assert read_heartbeat(error_file).loss is None
    HeartbeatWriter().log_point(0.1, 0.25, 0.5, 0.4321)
    read = read_heartbeat(error_file)
    assert (read.loss, read.data_share, read.communication_share, read.mfu) == (0.1, 0.25, 0.5, 0.432)
    HeartbeatWriter().log_point(0.0, 0.25, 0.5)
    assert read_heartbeat(error_file).mfu == 0.0
    assert read_heartbeat(error_file).loss == 0.0
    HeartbeatWriter().log_point(float("nan"), 0.25, 0.5)
    assert math.isnan(read_heartbeat(error_file).loss or 0.0)


def test_heartbeat_has_the_total_of_steps_if_it_is_known(error_file: str) -> None:
    with HeartbeatWriter().follow(3, 600):
        assert (read_heartbeat(error_file).step, read_heartbeat(error_file).total) == (3, 600)
    with HeartbeatWriter().follow(3, None):
        assert read_heartbeat(error_file).total is None


def test_heartbeat_has_the_last_advice_cut_to_its_length(error_file: str) -> None:
    heartbeat = HeartbeatWriter()
    assert read_heartbeat(error_file).advice == ""
    for line in ("data 31%: raise data.num_workers (2)", "rank 1"):
        heartbeat.advise(line)
        assert read_heartbeat(error_file).advice == line
    heartbeat.advise("x" * 8 * ADVICE_WORDS + "y")
    assert read_heartbeat(error_file).advice == "x" * 8 * ADVICE_WORDS
    assert read_heartbeat(error_file).phase is Phase.OUTSIDE


def test_heartbeat_without_a_launcher_ignores_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(ERROR_FILE, raising=False)
    HeartbeatWriter().advise("rank 1")


# --- the bar ----------------------------------------------------------------------------------------------------------


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
