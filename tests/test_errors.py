"""Every error says what to do now, and stands in the tree of the docstring."""

import errno
import pickle

import pytest

from ddp_kit import errors


def test_error_text_includes_its_hint() -> None:
    error = errors.WorldError("asked for 4 GPUs, found 2", "use --gpus 2")
    assert str(error) == "asked for 4 GPUs, found 2\n  hint: use --gpus 2"


def test_error_survives_pickling() -> None:
    error = pickle.loads(pickle.dumps(errors.ConfigError("message", "hint", ("one", "two"))))
    assert (error.message, error.hint, error.problems) == ("message", "hint", ("one", "two"))


def test_error_tree_in_the_docstring_is_complete() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, Exception)]
    drawn = errors.__doc__ or ""
    assert {kind.__name__ for kind in kinds} == {word for word in drawn.split() if word.endswith("Error")} - {
        "ValueError"
    }


@pytest.mark.parametrize(
    ("code", "advice"),
    [
        (errno.EMFILE, "`ulimit -n 65536`"),
        (errno.ENFILE, "`ulimit -n 65536`"),
        (errno.ENOSPC, "`df -i`"),
        (errno.EDQUOT, "a quota is full"),
        (errno.EACCES, "choose another folder"),
        (None, "choose another folder"),
    ],
)
def test_advice_for_an_os_error_depends_on_its_number(code: int | None, advice: str) -> None:
    error = ValueError("no folder") if code is None else OSError(code, "")
    assert advice in errors.advice_for(error, "choose another folder")


@pytest.mark.parametrize(("typed", "found"), [("precison", "precision"), ("xyz", None)])
def test_nearest_returns_the_nearest_name(typed: str, found: str | None) -> None:
    assert errors.nearest(typed, ["precision", "epochs"]) == found
