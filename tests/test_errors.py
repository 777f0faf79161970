"""A mistake of the user is one message on one rank, without a traceback; nothing is lost."""

import pickle
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_kit import errors

RAISE = """
from ddp_kit import errors
errors.ConfigError.hold_back_seconds = 0.0
errors.speak_plainly(rank={rank})
raise {what}
"""


def ended(rank: int, what: str, tmp_path: Path) -> "subprocess.CompletedProcess[str]":
    script = tmp_path / "user.py"
    script.write_text(RAISE.format(rank=rank, what=what))
    return subprocess.run([sys.executable, str(script)], capture_output=True, text=True)


def test_every_error_carries_what_to_do_now() -> None:
    error = errors.WorldError("asked for 4 GPUs, found 2", "type --gpus 2")
    assert str(error) == "asked for 4 GPUs, found 2\n  hint: type --gpus 2"


def test_a_mistake_is_shown_with_its_place_and_without_a_traceback(tmp_path: Path) -> None:
    run = ended(0, "errors.DataError('the dataset is empty', 'check the path')", tmp_path)
    assert run.stderr == "ddpkit: error at user.py:5: the dataset is empty\n  hint: check the path\n"
    assert run.returncode == 1


def test_a_rank_that_is_still_there_speaks_for_itself(tmp_path: Path) -> None:
    run = ended(2, "errors.ConfigError('no', 'yes')", tmp_path)
    assert run.stderr.startswith("ddpkit: error (rank 2) at user.py:5: no\n")


def test_another_exception_keeps_its_traceback(tmp_path: Path) -> None:
    run = ended(0, "KeyError('x')", tmp_path)
    assert "Traceback" in run.stderr
    assert "KeyError: 'x'" in run.stderr


def test_an_error_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(errors.ConfigError("message", "hint", ("one", "two"))))
    assert (error.message, error.hint, error.problems) == ("message", "hint", ("one", "two"))


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    drawn = errors.__doc__ or ""
    assert {kind.__name__ for kind in kinds} == {word for word in drawn.split() if word.endswith("Error")} - {
        "ValueError"
    }


@pytest.mark.parametrize(("typed", "found"), [("precison", "precision"), ("xyz", None)])
def test_the_nearest_name(typed: str, found: str | None) -> None:
    assert errors.nearest(typed, ["precision", "epochs"]) == found
