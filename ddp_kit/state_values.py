"""Checks of values loaded from a checkpoint. Without them, a wrong type would cause an error only much later."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

_MOST = 2**62
_LONGEST_TEXT = 60


def whole_number(value: Any, name: str, least: int = 0) -> int:
    """Return the value if it is an int of at least `least`; else raise `ValueError`."""
    if isinstance(value, int) and not isinstance(value, bool) and least <= value < _MOST:
        return value
    raise _not_a(f"whole number of at least {least}", value, name)


def real_number(value: Any, name: str) -> float:
    """Return the value if it is an int or a float; else raise `ValueError`."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        return value
    raise _not_a("number", value, name)


def flag(value: Any, name: str) -> bool:
    """Return the value if it is a bool; else raise `ValueError`."""
    if isinstance(value, bool):
        return value
    raise _not_a("boolean", value, name)


def check_same_kind(value: Any, own: Any, name: str) -> None:
    """Raise `ValueError` unless `value` is of the same kind (number, list, ...) as `own`, the value that it replaces.

    If `own` is None, any value is accepted; None is accepted in place of a bool or a string.
    """
    if isinstance(own, bool):
        _ = value is None or flag(value, name)
    elif isinstance(own, int | float | Tensor):
        _ = isinstance(value, Tensor) or real_number(value, name)
    elif isinstance(own, str):
        if not isinstance(value, str | None):
            raise _not_a("string", value, name)
    elif isinstance(own, list | tuple):
        if not isinstance(value, list | tuple) or (isinstance(own, tuple) and len(value) != len(own)):
            raise _not_a(f"list of length {len(own)}", value, name)
        for place, each in enumerate(value if own else ()):
            check_same_kind(each, own[min(place, len(own) - 1)], f"{name}[{place}]")
    elif isinstance(own, Mapping):
        if not isinstance(value, Mapping):
            raise _not_a("dict", value, name)
        for key in own.keys() & value.keys():
            check_same_kind(value[key], own[key], f"{name}[{key!r}]")


def _not_a(kind: str, value: Any, name: str) -> ValueError:
    shown = repr(value)
    return ValueError(f"{name} is not a {kind}: {shown[:_LONGEST_TEXT]}{'...' if len(shown) > _LONGEST_TEXT else ''}")
