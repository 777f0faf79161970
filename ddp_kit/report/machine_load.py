"""The load of a run's machines over time, from the samples in its record, in as many points as a chart can show."""

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import nan
from typing import Any

_PARTS = 16_000
"""Maximum number of parts of all nodes together; a node has at least `_LEAST_PARTS`."""
_MOST_PARTS = 1200
_LEAST_PARTS = 200
GPU_FIELDS = ("load", "memory", "power", "temperature")

_Key = tuple[str, int]  # a field, and the index of the GPU; -1: the host


@dataclass(frozen=True)
class NodeLoad:
    """The load of one node's machine. Each array has a value per part of the run, NaN where none is known."""

    host: Mapping[str, Sequence[float]]
    """`cpu` and `memory`: the load of the cores and the used share of the memory, from 0 to 1."""
    gpus: Mapping[str, tuple[Sequence[float], ...]]
    """The array of each GPU, by field, such as `load`."""
    fullest: float
    """The largest share of the host memory that was in use at any time."""
    last: float
    """Time of the last sample."""
    seconds: float
    """The largest number of seconds that a sample is about."""


@dataclass(frozen=True)
class MachineLoad:
    """The load of all machines of a run: the means of each part of it. All parts have the same length."""

    times: tuple[float, ...]
    """The time of the last sample of each part."""
    nodes: Mapping[str, NodeLoad]
    """By node number."""


def machine_load(samples: Mapping[str, Iterable[Mapping[str, Any]]]) -> MachineLoad:
    """Reduce the samples of all nodes, one after the other, to a number of values that does not depend on theirs."""
    most = max(_LEAST_PARTS, min(_MOST_PARTS, _PARTS // max(len(samples), 1)))
    means = {node: _Means(of_node, most) for node, of_node in samples.items()}
    width = max((each.width for each in means.values()), default=1)
    times: dict[int, float] = {}
    for each in means.values():
        each.widen(width)
        for part, time in each.times.items():
            times[part] = max(time, times.get(part, 0.0))
    parts = sorted(times)
    nodes = {node: each.load(parts) for node, each in means.items() if each.times}
    return MachineLoad(tuple(times[part] for part in parts), nodes)


class _Means:
    """Means of one node's samples over parts of equal length, which are as short as their maximum number allows."""

    def __init__(self, samples: Iterable[Mapping[str, Any]], most: int) -> None:
        self.width = 1
        """Seconds per part."""
        self.times: dict[int, float] = {}
        """The time of the last sample, by the number of the part since 1970."""
        self._sums: dict[_Key, dict[int, tuple[float, float]]] = {}  # sum and weight of the values, by part
        self._fullest = 0.0
        self._last = 0.0
        self._seconds = 1.0
        for sample in samples:
            self._add(sample)
            while len(self.times) > most:
                self.widen(2 * self.width)

    def widen(self, width: int) -> None:
        """Join parts, so that each has `width` seconds, a multiple of their present length."""
        factor = width // self.width
        self.width = width
        self.times = {part // factor: time for part, time in sorted(self.times.items())}
        for key, sums in self._sums.items():
            joined: dict[int, tuple[float, float]] = {}
            for part, (total, weight) in sums.items():
                total_before, weight_before = joined.get(part // factor, (0.0, 0.0))
                joined[part // factor] = (total_before + total, weight_before + weight)
            self._sums[key] = joined

    def load(self, parts: Iterable[int]) -> NodeLoad:
        """The means of all parts in `parts`."""
        host: dict[str, Sequence[float]] = {}
        gpus: dict[str, tuple[Sequence[float], ...]] = {}
        count = max((index for _, index in self._sums), default=-1) + 1
        empty: dict[int, tuple[float, float]] = {}
        for field in ("cpu", "memory"):
            host[field] = _means(self._sums.get((field, -1), empty), parts)
        for field in GPU_FIELDS:
            gpus[field] = tuple(_means(self._sums.get((field, index), empty), parts) for index in range(count))
        return NodeLoad(host, gpus, self._fullest, self._last, self._seconds)

    def _add(self, sample: Mapping[str, Any]) -> None:
        time = sample["time"]
        weight = float(sample.get("seconds", 1))
        part = int(time // self.width)
        self.times[part] = self._last = time
        self._seconds = max(self._seconds, weight)
        self._fullest = max(self._fullest, _share(sample, "memory_peak"), _share(sample, "memory"))
        for key, value in _values(sample):
            sums = self._sums.setdefault(key, {})
            total_before, weight_before = sums.get(part, (0.0, 0.0))
            sums[part] = (total_before + weight * value, weight_before + weight)


def _values(sample: Mapping[str, Any]) -> Iterator[tuple[_Key, float]]:
    """The numbers of a sample."""
    if is_number(sample.get("cpu")):
        yield ("cpu", -1), sample["cpu"]
    if share := _share(sample, "memory"):
        yield ("memory", -1), share
    for index, gpu in enumerate(sample.get("gpus", ())):
        for field in GPU_FIELDS:
            if is_number(value := gpu.get(field)):
                yield (field, index), value


def _share(sample: Mapping[str, Any], used: str) -> float:
    """The share of the host memory; 0 if it is not known."""
    known = is_number(sample.get(used)) and is_number(sample.get("memory_total"))
    return float(sample[used] / sample["memory_total"]) if known and sample["memory_total"] else 0.0


def _means(sums: Mapping[int, tuple[float, float]], parts: Iterable[int]) -> Sequence[float]:
    pairs = (sums.get(part) for part in parts)
    return array("d", (nan if pair is None else pair[0] / pair[1] for pair in pairs))


def is_number(value: object) -> bool:
    """Whether a value of the record is a number."""
    return isinstance(value, int | float) and not isinstance(value, bool)
