"""Compares two states: whether they are bitwise identical."""

import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch


def _same(one: Any, other: Any) -> bool:
    """Types, order, values; of floating-point numbers every bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, torch.Tensor):
        return (
            one.dtype == other.dtype
            and one.shape == other.shape
            and one.device == other.device
            and _bits(one) == _bits(other)
        )
    if isinstance(one, np.ndarray | np.generic):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, float):
        return struct.pack("d", one) == struct.pack("d", other)
    if isinstance(one, complex):
        return _same(one.real, other.real) and _same(one.imag, other.imag)
    if isinstance(one, dict):
        attributes = _same(vars(one), vars(other)) if hasattr(one, "__dict__") else True
        factories = getattr(one, "default_factory", None) is getattr(other, "default_factory", None)
        return attributes and factories and _same(list(one.items()), list(other.items()))
    if isinstance(one, set | frozenset):
        return one == other
    if isinstance(one, list | tuple) or hasattr(one, "maxlen"):
        longest = getattr(one, "maxlen", None) == getattr(other, "maxlen", None)
        return longest and len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


def _bits(tensor: torch.Tensor) -> bytes:
    """Of its elements, in their order."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return plain.view(torch.uint8).numpy().tobytes()


@pytest.fixture(scope="session")
def same() -> Callable[[Any, Any], bool]:
    """Types, order, values; of floating-point numbers every bit."""
    return _same
