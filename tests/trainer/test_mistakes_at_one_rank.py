"""Each mistake of the table in docs/mistakes.md gets the message that is there, without a traceback."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ddp_kit import DdpKitError
from ddp_kit.uncaught import show_without_traceback
from tests.programs import mistakes
from tests.programs.mistakes import ALONE, documented, of_two_ranks, told

ROWS = documented()


@pytest.mark.parametrize(("what", "make"), ALONE.items(), ids=[*ALONE])
def test_mistake_gets_its_documented_message(
    what: str,
    make: Callable[[], object],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(DdpKitError) as caught:
        make()
    # At two ranks, and in the document, mistakes.py is a program of its own.
    assert tuple(text.replace(f"{mistakes.__name__}.", "mistakes.") for text in told(caught.value)) == ROWS[what]
    capsys.readouterr()
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    show_without_traceback()
    sys.excepthook(caught.type, caught.value, caught.tb)
    shown = capsys.readouterr().err
    assert shown.startswith("ddpkit: error")
    assert str(caught.value) in shown
    assert "Traceback" not in shown


def test_table_of_mistakes_has_exactly_these_mistakes() -> None:
    assert list(ROWS) == [*ALONE, *of_two_ranks(0)]
