"""Packing once more: a state whose structure is that of the time before needs its new plain values alone.

    walk the state: structure (kinds, keys, lengths), tensors, leaves (all else)
    as before, and the tensors' types, shapes, devices and aliases too?    put the new leaves into the text of before
    else                                                                    `packing.pack`, and lay the tensors out

Nothing is assumed: all that `pack` looks at is compared, apart from the leaves, each of which is turned into text anew
unless it is one that cannot change. Where anything is unusual, `pack` has the word.
"""

import json
import re
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count
from typing import Any
from uuid import uuid4

from torch import Tensor

from ddp_kit.checkpoint.layout import Layout, lay_out
from ddp_kit.checkpoint.packing import PLAIN, Packed, address, pack
from ddp_kit.errors import CheckpointError

_KEYS = {str, int}
_dumps = json.JSONEncoder(separators=(",", ":")).encode


@dataclass(frozen=True)
class Prepared:
    """A state that is ready to be copied."""

    layout: Layout
    """The same object where names, types and shapes are those of the time before."""
    tensors: list[Tensor]
    """By the numbers that the layout has for them."""
    text: bytes
    """What becomes state.json."""


class Repacker:
    """Prepares one state after another."""

    def __init__(self) -> None:
        self._layout: tuple[Any, Layout] | None = None
        self._like: _Like | None = None
        self._template: _Template | None = None
        self._tried = False

    def prepare(self, state: Mapping[str, Any]) -> Prepared:
        """As `packing.pack` takes it apart, and its tensors laid out. Raises its `CheckpointError`."""
        found = _found(state)
        as_before = found is not None and self._like is not None and found.like == self._like
        if found is not None and as_before and self._template is not None:
            text = self._template.filled(found.leaves)
            if text is not None:
                tensors = [found.tensors[number] for number in self._template.stored]
                return Prepared(self._template.layout, tensors, text)
        packed = pack(state)
        layout = self._laid_out(packed)
        # Not at once: a state that is another one each time has no template made.
        if not as_before:
            self._template, self._tried = None, False
        elif found is not None and not self._tried:
            self._template, self._tried = _template(state, found, packed, layout), True
        self._like = None if found is None else found.like
        return Prepared(layout, [stored.tensor for stored in packed.tensors], _dumps(packed.text).encode())

    def _laid_out(self, packed: Packed) -> Layout:
        aliases = [(part, *names.items()) for part, names in packed.aliases.items()]  # their order is in the header
        key = [stored.key for stored in packed.tensors], aliases
        if self._layout is None or self._layout[0] != key:
            self._layout = key, lay_out(packed.tensors, packed.aliases)
        return self._layout[1]


class _UnusualError(Exception):
    """Left to `pack`."""


# Structure -----------------------------------------------------------------------------------------------------------


_Like = tuple[list[Any], list[Any]]
"""All that a packed state depends on, but the leaves: its structure, and the facts of its tensors."""


@dataclass(frozen=True)
class _Found:
    like: _Like
    tensors: list[Tensor]
    leaves: list[Any]


def _found(state: Mapping[str, Any]) -> _Found | None:
    if type(state) is not dict:
        return None
    structure: list[Any] = []
    tensors: list[Tensor] = []
    leaves: list[Any] = []
    try:
        _walk((state,), structure, tensors, leaves)
        return _Found((structure, _facts(tensors)), tensors, leaves)
    except (_UnusualError, RecursionError, RuntimeError):  # a tensor without an address, or without a shape
        return None


def _walk(values: Iterable[Any], structure: list[Any], tensors: list[Tensor], leaves: list[Any]) -> None:
    """Into `structure`: how many, the type of each, then what each container holds. It can be read in one way only."""
    kinds = [*map(type, values)]
    structure.append(len(kinds))
    structure += kinds
    for kind, value in zip(kinds, values, strict=True):
        if kind is Tensor:
            tensors.append(value)
        elif kind is dict or kind is OrderedDict:
            if not _KEYS.issuperset(map(type, value)):  # 1 == True
                raise _UnusualError
            structure += value
            _walk(value.values(), structure, tensors, leaves)
            if kind is OrderedDict:
                _walk((vars(value),), structure, tensors, leaves)
        elif kind is list or kind is tuple:
            _walk(value, structure, tensors, leaves)
        else:
            leaves.append(value)


def _facts(tensors: list[Tensor]) -> list[Any]:
    """What is written about each tensor, and which of them are the same."""
    facts: list[Any] = [(tensor.dtype, tensor.shape, tensor.device) for tensor in tensors]
    addresses = [address(tensor) for tensor in tensors]
    if len(set(addresses)) < len(addresses):
        first: dict[int, int] = {}
        facts += [
            (first.setdefault(begin, number), tensor.stride(), tensor.is_neg())
            for number, (begin, tensor) in enumerate(zip(addresses, tensors, strict=True))
        ]
    return facts


# Text ----------------------------------------------------------------------------------------------------------------


class _Template:
    """The text of a state, in which the leaves can be exchanged."""

    def __init__(self, pieces: list[str], leaves: list[Any], stored: list[int], layout: Layout) -> None:
        self.layout = layout
        self.stored = stored
        """The numbers of the tensors that are stored, among all."""
        self._pieces = pieces  # a leaf is every second one
        self._leaves = [leaf if type(leaf) in PLAIN else _CHANGES for leaf in leaves]

    def filled(self, leaves: list[Any]) -> bytes | None:
        """The text with these leaves, whose types are those of before; None where `pack` has to look at them."""
        try:
            for number, (leaf, before) in enumerate(zip(leaves, self._leaves, strict=True)):
                if leaf is before or (type(leaf) is int and leaf == before):
                    continue
                self._pieces[2 * number + 1] = _text(leaf)
                self._leaves[number] = leaf if type(leaf) in PLAIN else _CHANGES
        except _UnusualError:
            return None
        return "".join(self._pieces).encode()


_CHANGES = object()  # in the place of a leaf that may be the same object with other content


def _text(leaf: Any) -> str:
    plain = PLAIN.get(type(leaf))
    if plain is not None:
        return _dumps(plain(leaf, ()))
    try:
        packed = pack({"leaf": leaf})
    except CheckpointError:  # `pack` knows its place
        raise _UnusualError from None
    if packed.tensors:
        raise _UnusualError
    return _dumps(packed.text["leaf"])


def _template(state: Mapping[str, Any], found: _Found, packed: Packed, layout: Layout) -> _Template | None:
    """From the text of the same state with a mark in the place of each leaf."""
    numbers = {id(tensor): number for number, tensor in enumerate(found.tensors)}
    stored = [numbers.get(id(one.tensor), -1) for one in packed.tensors]
    if -1 in stored:  # made on the way: another one each time
        return None
    mark = uuid4().hex
    marked = pack(_marked(state, (f"{mark} {number}" for number in count())))
    pieces = re.split(f'"{mark} ([0-9]+)"', _dumps(marked.text))
    assert pieces[1::2] == [str(number) for number in range(len(found.leaves))]
    try:
        pieces[1::2] = [_text(leaf) for leaf in found.leaves]
    except _UnusualError:
        return None
    return _Template(pieces, found.leaves, stored, layout)


def _marked(value: Any, marks: Iterator[str]) -> Any:
    kind = type(value)
    if kind is Tensor:
        return value
    if kind is list or kind is tuple:
        return kind(_marked(one, marks) for one in value)
    if kind is not dict and kind is not OrderedDict:
        return next(marks)
    marked = kind((key, _marked(one, marks)) for key, one in value.items())
    if kind is OrderedDict:
        vars(marked).update(_marked(vars(value), marks))
    return marked
