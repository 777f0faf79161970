"""The charts of a report. Pure functions compute their data from recorded runs; matplotlib draws SVG files."""

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import chain, islice, pairwise
from pathlib import Path
from statistics import fmean, median

from ddp_kit.errors import UsageError
from ddp_kit.report.machine_load import NodeLoad
from ddp_kit.report.run_history import Line, RunHistory
from ddp_kit.texts import GIB

# --- Chart data -------------------------------------------------------------------------------------------------------

_POINTS = 600
"""Maximum number of points per line of a chart; more would not be visible."""
_POINTS_OF_CHART = 2000
"""Maximum number of points in a chart, over all its lines, to keep the page small."""
_LEAST_POINTS = 100
MOST_LINES = 16
"""Maximum number of ranks, GPUs or nodes with a line each; of more, the lowest, median and highest value are drawn."""
_ROW_FIELDS = {
    "event", "step", "attempt", "time", "epoch", "loss", "learning_rate", "grad_norm", "samples_per_second",
    "step_seconds", "slowest_rank", "slowest_factor", "rank_seconds", "rank_memory", "rank_seconds_summary",
    "rank_memory_summary", "compilations",
    "mfu",
}  # fmt: skip
_PHASES = {
    "data": "waiting for data",
    "transfer": "transfer to the device",
    "forward": "forward pass",
    "backward": "backward pass",
    "communication": "waiting for ranks",
    "optimizer": "optimizer",
    "other": "other",
}

Values = list[float | None]


@dataclass(frozen=True)
class Curve:
    """One line of a chart, with one value per point on the x axis."""

    label: str
    values: Values
    low: Values | None = None
    """The lowest of the recorded values that each point averages; `high` has the highest."""
    high: Values | None = None


@dataclass(frozen=True)
class Curves:
    """The lines of a chart that belong to one run. All of them have the same x values."""

    run: int
    x: list[float]
    curves: tuple[Curve, ...]


@dataclass(frozen=True)
class Chart:
    """A chart of one run, or of several runs to compare."""

    name: str
    """The name of the chart in file names, such as seconds-per-rank."""
    title: str
    unit: str
    x: str
    """Unit of the x axis: "step" or "minutes"."""
    groups: tuple[Curves, ...]
    stacked: bool = False

    @property
    def summary(self) -> str:
        """The chart in words: first, last, lowest and highest value of each line."""
        return "; ".join(_in_words(curve, self.unit) for group in self.groups for curve in group.curves)


def comparing_charts(runs: Sequence[RunHistory]) -> list[Chart]:
    """The charts that compare runs; each of these charts shows all runs."""
    builder = _Builder(runs)
    charts = [builder.losses()]
    names_of_evaluations = _names(chain.from_iterable(run.evaluations for run in runs))
    metrics = [name for name in names_of_evaluations if name.startswith("eval_") and name != "eval_loss"]
    charts += [builder.of_evaluations(name) for name in metrics]
    # Values passed to `trainer.log`, and the learning rates of additional parameter groups.
    names_of_rows = _names(chain.from_iterable(run.rows for run in runs))
    own_values = [name for name in names_of_rows if name not in _ROW_FIELDS and not name.startswith("times.")]
    charts += [builder.of_rows(name, name, "", slug=f"value-{name}") for name in own_values]
    charts += [
        builder.of_rows("learning_rate", "Learning rate", ""),
        builder.of_rows("samples_per_second", "Samples per second", ""),
        builder.of_rows("mfu", "Model FLOPs utilisation", "%", 100.0),
        builder.of_rows("step_seconds", "Time per optimizer step", "ms", 1e3),
    ]
    if any(row.get("grad_norm") for run in runs for row in run.rows):  # 0 where it was not measured
        charts.append(builder.of_rows("grad_norm", "Gradient norm", ""))
    return _with_values(charts)


def charts_of_run(runs: Sequence[RunHistory], number: int) -> list[Chart]:
    """The charts that show only run `number`."""
    builder = _Builder(runs)
    charts = [builder.phases(number), builder.ranks(number), builder.memory(number), *builder.machine(number)]
    return _with_values(charts)


class _Builder:
    def __init__(self, runs: Sequence[RunHistory]) -> None:
        self._runs = runs

    def losses(self) -> Chart:
        groups = []
        for number, run in enumerate(self._runs):
            groups.append(self._curves(number, run.rows, {"loss": _field("loss")}, ranges=True))
            groups.append(self._curves(number, run.evaluations, {"evaluation": _field("eval_loss")}))
        return Chart("loss", "Loss", "", "step", tuple(groups))

    def of_evaluations(self, name: str) -> Chart:
        title = name.removeprefix("eval_")
        groups = [self._curves(i, run.evaluations, {title: _field(name)}) for i, run in enumerate(self._runs)]
        return Chart(_slug(f"metric-{title}"), f"{title} (evaluation)", "", "step", tuple(groups))

    def of_rows(self, name: str, title: str, unit: str, scale: float = 1.0, slug: str = "") -> Chart:
        value = _field(name, scale)
        groups = [self._curves(i, run.rows, {title.lower(): value}) for i, run in enumerate(self._runs)]
        return Chart(_slug(slug or title), title, unit, "step", tuple(groups))

    def phases(self, number: int) -> Chart:
        values = {label: _field(f"times.{name}", 1e3) for name, label in _PHASES.items()}
        curves = self._curves(number, self._runs[number].rows, values)
        return Chart("phases", "Where the time of a step goes (main rank)", "ms", "step", (curves,), stacked=True)

    def ranks(self, number: int) -> Chart:
        rows = self._runs[number].rows
        values = _of_ranks("rank_seconds", rows, 1e3)
        if len(values) == 1:
            values = {}
        curves = self._curves(number, rows, values)
        return Chart("ranks", "Time per step that each rank spends on its own work", "ms", "step", (curves,))

    def memory(self, number: int) -> Chart:
        run = self._runs[number]
        values = _of_ranks("rank_memory", run.rows, 1 / GIB)
        planned = run.last.begin.get("planned_memory")
        if values and planned:
            values["planned"] = lambda _: planned / GIB
        return Chart(
            "memory", "Peak memory allocated by torch", "GiB", "step", (self._curves(number, run.rows, values),)
        )

    def machine(self, number: int) -> Iterator[Chart]:
        run = self._runs[number]
        began = run.attempts[0].begin["time"]
        times = run.machines.times
        lines = [{"part": part, "minutes": (time - began) / 60} for part, time in enumerate(times)]
        nodes = run.machines.nodes
        if len(nodes) > MOST_LINES:
            yield from self._machine(number, f" on {len(nodes)} nodes", "all", lines, list(nodes.values()))
            return
        for node, load in nodes.items():
            where = f" on node {node}" if len(nodes) > 1 else ""
            yield from self._machine(number, where, node, lines, [load])

    def _machine(
        self, number: int, where: str, node: str, lines: Sequence[Line], loads: Sequence[NodeLoad]
    ) -> Iterator[Chart]:
        """The charts of one node, or of many nodes together."""
        for field, title, unit, scale in (
            ("load", "Load of the GPUs", "%", 100.0),
            ("memory", "Memory in use on the GPUs", "GiB", 1 / GIB),
            ("power", "Power of the GPUs", "W", 1.0),
            ("temperature", "Temperature of the GPUs", "°C", 1.0),
        ):
            gpus = [_of_part(gpu, scale) for load in loads for gpu in load.gpus[field]]
            values = _each_or_range("GPU", len(gpus), gpus.__getitem__)
            yield self._over_time(f"gpu-{field}-{node}", f"{title}{where}", unit, number, lines, values)
        host: dict[str, _Value] = {}
        for field, label in (("cpu", "processors"), ("memory", "memory")):
            nodes = [_of_part(load.host[field], 100.0) for load in loads]
            if len(nodes) == 1:
                host[label] = nodes[0]
            else:
                ranges = _each_or_range("node", len(nodes), nodes.__getitem__)
                host |= {f"{label}: {name}": value for name, value in ranges.items()}
        yield self._over_time(f"host-{node}", f"Load of the host{where}", "%", number, lines, host)

    def _over_time(
        self, slug: str, title: str, unit: str, number: int, lines: Sequence[Line], values: "Mapping[str, _Value]"
    ) -> Chart:
        return Chart(slug, title, unit, "minutes", (self._curves(number, lines, values, x="minutes"),))

    def _curves(
        self, run: int, lines: Sequence[Line], values: "Mapping[str, _Value]", *, x: str = "step", ranges: bool = False
    ) -> Curves:
        """Divide the lines of the record into buckets, and average the values in each bucket into one point.

        The point gets the x value of the bucket's last line.
        """
        limit = min(_POINTS // len(self._runs), _POINTS_OF_CHART // max(len(values), 1))
        count = min(max(limit, _LEAST_POINTS), len(lines))
        edges = [len(lines) * i // max(count, 1) for i in range(count + 1)]
        buckets = [lines[begin:end] for begin, end in pairwise(edges)]
        curves = []
        for label, value in values.items():
            numbers = [[number for line in bucket if (number := value(line)) is not None] for bucket in buckets]
            curve = Curve(label, _points(fmean, numbers))
            if ranges and len(lines) > count:
                curve = replace(curve, low=_points(min, numbers), high=_points(max, numbers))
            curves.append(curve)
        return Curves(run, [_rounded(bucket[-1][x]) for bucket in buckets], tuple(curves))


_Value = Callable[[Line], float | None]


def _field(name: str, scale: float = 1.0) -> _Value:
    return lambda line: _number(line.get(name), scale)


def _of_ranks(name: str, rows: Sequence[Line], scale: float) -> dict[str, _Value]:
    """The value of each rank, in a list that has one item per rank; of many ranks, a row has a summary instead."""

    def item(field: str, index: int) -> _Value:
        return lambda row: _number(next(islice(row.get(field, ()), index, None), None), scale)

    count = max((len(row.get(name, ())) for row in rows), default=0)
    summary = f"{name}_summary"
    if count == 0 and any(summary in row for row in rows):
        return {"highest": item(summary, 2), "median": item(summary, 1), "lowest": item(summary, 0)}
    return _each_or_range("rank", count, lambda rank: item(name, rank))


def _of_part(values: Sequence[float], scale: float) -> _Value:
    return lambda line: _number(values[line["part"]], scale)


def _points(pick: Callable[[list[float]], float], groups: Iterable[list[float]]) -> Values:
    """One value for each group of numbers, such as its mean; None for an empty group."""
    return [_rounded(pick(numbers)) if numbers else None for numbers in groups]


def _each_or_range(what: str, count: int, value_of: Callable[[int], _Value]) -> dict[str, _Value]:
    """Map a label for each rank or GPU, such as `rank 0`, to a function that reads its value from a line of the record.

    If there are many ranks or GPUs, there are instead three functions, for the lowest, median and highest value.
    """
    if count <= MOST_LINES:
        return {f"{what} {index}": value_of(index) for index in range(count)}
    values = [value_of(index) for index in range(count)]

    def over(pick: Callable[[list[float]], float]) -> _Value:
        def value(line: Line) -> float | None:
            numbers = [number for value_of_one in values if (number := value_of_one(line)) is not None]
            return pick(numbers) if numbers else None

        return value

    return {f"highest of {count}": over(max), "median": over(median), f"lowest of {count}": over(min)}


def _number(value: object, scale: float = 1.0) -> float | None:
    """The scaled value; None if it is not a finite number (NaN is `null` in the record)."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return value * scale


def _rounded(value: float) -> float:
    return float(f"{value:.5g}") if abs(value) < 1e5 else round(value)


def _names(lines: Iterable[Line]) -> list[str]:
    """The names of all values in lines of the record, in the order in which they first appear."""
    return list(dict.fromkeys(chain.from_iterable(lines)))


def _with_values(charts: Iterable[Chart]) -> list[Chart]:
    """Remove lines without values, and then charts without lines."""
    drawable = []
    for chart in charts:
        groups = (
            replace(group, curves=tuple(curve for curve in group.curves if any(v is not None for v in curve.values)))
            for group in chart.groups
        )
        with_curves = tuple(group for group in groups if group.curves)
        if with_curves:
            drawable.append(replace(chart, groups=with_curves))
    return drawable


def _slug(text: str) -> str:
    return re.sub(r"[\W_]", "-", text.lower()).strip("-")


def _in_words(curve: Curve, unit: str) -> str:
    values = [value for value in curve.values if value is not None]
    if not values:
        return f"{curve.label}: no values"
    first, last, low, high = (f"{value:.4g}" for value in (values[0], values[-1], min(values), max(values)))
    last = f"{last} {unit}".rstrip()
    return f"{curve.label}: from {first} to {last}, lowest {low}, highest {high}"


# --- Pictures ---------------------------------------------------------------------------------------------------------


_STYLES = ("-", "--", ":", "-.")
_INCHES = (8.0, 4.5)
_AXES = {"step": "optimizer step", "minutes": "minutes since the start"}


def write_pictures(runs: Sequence[RunHistory], folder: Path) -> list[Path]:
    """Write one SVG file per chart, such as loss.svg, and return the paths.

    Raises `UsageError` if matplotlib is not installed.
    """
    if find_spec("matplotlib") is None:
        raise UsageError("--images needs matplotlib, which is not installed", "pip install 'ddpkit[images]'")
    folder.mkdir(parents=True, exist_ok=True)
    charts = {chart.name: chart for chart in comparing_charts(runs)}
    for number in range(len(runs)):
        suffix = f"-{number + 1}" if len(runs) > 1 else ""
        charts |= {f"{chart.name}{suffix}": chart for chart in charts_of_run(runs, number)}
    paths = {folder / f"{name}.svg": chart for name, chart in charts.items()}
    for path, chart in paths.items():
        _draw(chart, [run.name for run in runs], path)
    return list(paths)


def _draw(chart: Chart, names: Sequence[str], path: Path) -> None:
    from matplotlib.figure import Figure  # not pyplot, which would try to open a display

    figure = Figure(figsize=_INCHES, layout="constrained")
    axes = figure.add_subplot()
    several = len({group.run for group in chart.groups}) > 1
    for index, group in enumerate(chart.groups):
        if chart.stacked:
            values_of_curves = [[value or 0.0 for value in curve.values] for curve in group.curves]
            axes.stackplot(group.x, *values_of_curves, labels=[curve.label for curve in group.curves])
            continue
        for number, curve in enumerate(group.curves):
            label = curve.label
            if several:
                label = f"{names[group.run]}: {label}"
            values = [float("nan") if value is None else value for value in curve.values]
            axes.plot(group.x, values, _STYLES[(index + number) % len(_STYLES)], label=label, linewidth=1.2)
    axes.set_title(chart.title)
    axes.set_xlabel(_AXES[chart.x])
    axes.set_ylabel(chart.unit)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path)
