"""The rows of a run by column: numbers in arrays, because a million rows would take 2 GB as dicts."""

from array import array
from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import chain, zip_longest
from math import isnan, nan
from sys import intern
from types import NoneType
from typing import Any, TypeAlias

from ddp_kit.report.machine_load import is_number

_Name = str | tuple[str, int]  # of a list, such as `rank_seconds`, each item has a column
_Column: TypeAlias = "array[float] | list[Any]"  # an array as long as all values are floats; NaN: the row has no value
_OF_EACH = ("event", "step", "time", "attempt")  # not kept as named columns


class Rows:
    """Lines of the record with the same event. The n-th item of each column belongs to the n-th line."""

    def __init__(self) -> None:
        self.steps = array("q")
        self.times = array("d")
        self.attempts: list[str] = []
        self._columns: dict[_Name, _Column] = {}

    def __len__(self) -> int:
        return len(self.steps)

    def extend(self, lines: Sequence[Mapping[str, Any]]) -> None:
        """Add lines, whose `step`, `time` and `attempt` are valid; many at a time, as that is several times faster."""
        for name in dict.fromkeys(chain.from_iterable(lines)):
            if name in _OF_EACH:
                continue
            values = [line.get(name) for line in lines]
            if list not in set(map(type, values)):
                self._extend(name, values)
                continue
            lists = [value if isinstance(value, list) else [] for value in values]
            for index, items in enumerate(zip_longest(*lists)):
                self._extend((name, index), [float(item) if type(item) is int else item for item in items])
        self.times.extend(line["time"] for line in lines)
        self.attempts += [intern(line["attempt"]) for line in lines]
        self.steps.extend(line["step"] for line in lines)

    @property
    def names(self) -> list[str]:
        """The names of all values but lists, in the order in which they first appear."""
        return [name for name in self._columns if isinstance(name, str)]

    @cached_property
    def by_attempt(self) -> Mapping[str, Sequence[int]]:
        """The numbers of the rows of each attempt."""
        numbers: dict[str, array[int]] = {}
        for number, attempt in enumerate(self.attempts):
            numbers.setdefault(attempt, array("q")).append(number)
        return numbers

    def values(self, name: str) -> Sequence[Any]:
        """A column; None where a row has no value, or one that is not finite."""
        column = self._column(name)
        return column if isinstance(column, list) else [None if isnan(value) else value for value in column]

    def numbers(self, name: _Name) -> Sequence[float]:
        """A column; NaN where a row has no number."""
        column = self._column(name)
        if isinstance(column, list):
            column = array("d", (value if is_number(value) else nan for value in column))
        return column

    def items(self, name: str) -> list[Sequence[float]]:
        """The columns of the items of a list, as `numbers`: as many as the longest list has items."""
        return [self.numbers(key) for key in self._columns if isinstance(key, tuple) and key[0] == name]

    def _extend(self, name: _Name, values: Sequence[Any]) -> None:
        column = self._column(name)
        if not isinstance(column, list) and not {float, NoneType}.issuperset(map(type, values)):
            column = [None if isnan(value) else value for value in column]
        if isinstance(column, list):
            column += values
        else:
            column.extend(nan if value is None else value for value in values)
        self._columns[name] = column

    def _column(self, name: _Name) -> _Column:
        """A column that is as long as all others, even if the last rows do not have its value."""
        column = self._columns.get(name, array("d"))
        missing = len(self) - len(column)
        if isinstance(column, list):
            column += [None] * missing
        else:
            column.extend([nan] * missing)
        return column
