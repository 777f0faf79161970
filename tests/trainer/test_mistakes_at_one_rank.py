"""Each mistake of the table in tests/mistakes.py gets its message at one rank, without a traceback."""

import sys
from pathlib import Path

import pytest

from ddp_kit import DdpKitError
from ddp_kit.uncaught import show_without_traceback
from tests.programs.mistakes import Mistake, at, told


@pytest.mark.parametrize("mistake", at(1), ids=str)
def test_mistake_gets_its_message(
    mistake: Mistake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DdpKitError) as caught:
        mistake.make()
    # At two ranks, mistakes.py is a program of its own.
    assert tuple(text.replace("tests.programs.mistakes.", "mistakes.") for text in told(caught.value)) == (
        mistake.message,
        mistake.hint,
    )
    capsys.readouterr()
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    show_without_traceback()
    sys.excepthook(caught.type, caught.value, caught.tb)
    shown = capsys.readouterr().err
    assert shown.startswith("ddpkit: error")
    assert str(caught.value) in shown
    assert "Traceback" not in shown
