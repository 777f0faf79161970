"""The charts of a report. Pure functions compute their data from recorded runs; matplotlib draws SVG files."""

import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.util import find_spec
from itertools import chain, pairwise
from math import isnan, nan
from pathlib import Path
from statistics import fmean, median

from ddp_kit.errors import UsageError
from ddp_kit.report.machine_load import NodeLoad
from ddp_kit.report.rows import Rows
from ddp_kit.report.run_history import RunHistory
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
    "epoch", "loss", "learning_rate", "grad_norm", "samples_per_second",
    "step_seconds", "slowest_rank", "slowest_factor", "compilations", "weights_checksum", "samples_checksums", "mfu",
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
    names_of_evaluations = dict.fromkeys(chain.from_iterable(run.evaluations.names for run in runs))
    metrics = [name for name in names_of_evaluations if name.startswith("eval_") and name != "eval_loss"]
    charts += [builder.of_evaluations(name) for name in metrics]
    # Values passed to `trainer.log`, and the learning rates of additional parameter groups.
    names_of_rows = dict.fromkeys(chain.from_iterable(run.rows.names for run in runs))
    own_values = [name for name in names_of_rows if name not in _ROW_FIELDS and not name.startswith("times.")]
    charts += [builder.of_rows(name, name, "", slug=f"value-{name}") for name in own_values]
    charts += [
        builder.of_rows("learning_rate", "Learning rate", ""),
        builder.of_rows("samples_per_second", "Samples per second", ""),
        builder.of_rows("mfu", "Model FLOPs utilisation", "%", 100.0),
        builder.of_rows("step_seconds", "Time per optimizer step", "ms", 1e3),
    ]
    if any(any(run.rows.values("grad_norm")) for run in runs):  # 0 where it was not measured
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
            groups.append(self._curves(number, run.rows.steps, {"loss": run.rows.numbers("loss")}, ranges=True))
            evaluations = {"evaluation": run.evaluations.numbers("eval_loss")}
            groups.append(self._curves(number, run.evaluations.steps, evaluations))
        return Chart("loss", "Loss", "", "step", tuple(groups))

    def of_evaluations(self, name: str) -> Chart:
        title = name.removeprefix("eval_")
        groups = [
            self._curves(i, run.evaluations.steps, {title: run.evaluations.numbers(name)})
            for i, run in enumerate(self._runs)
        ]
        return Chart(_slug(f"metric-{title}"), f"{title} (evaluation)", "", "step", tuple(groups))

    def of_rows(self, name: str, title: str, unit: str, scale: float = 1.0, slug: str = "") -> Chart:
        groups = [
            self._curves(i, run.rows.steps, {title.lower(): run.rows.numbers(name)}, scale)
            for i, run in enumerate(self._runs)
        ]
        return Chart(_slug(slug or title), title, unit, "step", tuple(groups))

    def phases(self, number: int) -> Chart:
        rows = self._runs[number].rows
        columns = {label: rows.numbers(f"times.{name}") for name, label in _PHASES.items()}
        curves = self._curves(number, rows.steps, columns, 1e3)
        return Chart("phases", "Where the time of a step goes (main rank)", "ms", "step", (curves,), stacked=True)

    def ranks(self, number: int) -> Chart:
        rows = self._runs[number].rows
        columns = _of_ranks("rank_seconds", rows)
        if len(columns) == 1:
            columns = {}
        curves = self._curves(number, rows.steps, columns, 1e3)
        return Chart("ranks", "Time per step that each rank spends on its own work", "ms", "step", (curves,))

    def memory(self, number: int) -> Chart:
        run = self._runs[number]
        columns = _of_ranks("rank_memory", run.rows)
        planned = run.last.begin.get("planned_memory")
        if columns and planned:
            columns["planned"] = array("d", [planned]) * len(run.rows)
        curves = self._curves(number, run.rows.steps, columns, 1 / GIB)
        return Chart("memory", "Peak memory allocated by torch", "GiB", "step", (curves,))

    def machine(self, number: int) -> Iterator[Chart]:
        run = self._runs[number]
        began = run.attempts[0].begin["time"]
        minutes = [(time - began) / 60 for time in run.machines.times]
        nodes = run.machines.nodes
        if len(nodes) > MOST_LINES:
            yield from self._machine(number, f" on {len(nodes)} nodes", "all", minutes, list(nodes.values()))
            return
        for node, load in nodes.items():
            where = f" on node {node}" if len(nodes) > 1 else ""
            yield from self._machine(number, where, node, minutes, [load])

    def _machine(
        self, number: int, where: str, node: str, minutes: Sequence[float], loads: Sequence[NodeLoad]
    ) -> Iterator[Chart]:
        """The charts of one node, or of many nodes together."""
        for field, title, unit, scale in (
            ("load", "Load of the GPUs", "%", 100.0),
            ("memory", "Memory in use on the GPUs", "GiB", 1 / GIB),
            ("power", "Power of the GPUs", "W", 1.0),
            ("temperature", "Temperature of the GPUs", "°C", 1.0),
        ):
            columns = _each_or_range("GPU", [gpu for load in loads for gpu in load.gpus[field]])
            curves = self._curves(number, minutes, columns, scale)
            yield Chart(f"gpu-{field}-{node}", f"{title}{where}", unit, "minutes", (curves,))
        host: dict[str, Sequence[float]] = {}
        for field, label in (("cpu", "processors"), ("memory", "memory")):
            nodes = [load.host[field] for load in loads]
            if len(nodes) == 1:
                host[label] = nodes[0]
            else:
                ranges = _each_or_range("node", nodes)
                host |= {f"{label}: {name}": column for name, column in ranges.items()}
        curves = self._curves(number, minutes, host, 100.0)
        yield Chart(f"host-{node}", f"Load of the host{where}", "%", "minutes", (curves,))

    def _curves(
        self,
        run: int,
        x: Sequence[float],
        columns: Mapping[str, Sequence[float]],
        scale: float = 1.0,
        *,
        ranges: bool = False,
    ) -> Curves:
        """Divide columns of the record into buckets, and average the values in each bucket into one point.

        The point gets the bucket's last x value. A value that is NaN does not count.
        """
        limit = min(_POINTS // len(self._runs), _POINTS_OF_CHART // max(len(columns), 1))
        count = min(max(limit, _LEAST_POINTS), len(x))
        edges = [len(x) * i // max(count, 1) for i in range(count + 1)]
        curves = []
        for label, column in columns.items():
            buckets = (column[begin:end] for begin, end in pairwise(edges))
            numbers = [[value * scale for value in bucket if not isnan(value)] for bucket in buckets]
            curve = Curve(label, _points(fmean, numbers))
            if ranges and len(x) > count:
                curve = replace(curve, low=_points(min, numbers), high=_points(max, numbers))
            curves.append(curve)
        return Curves(run, [_rounded(x[end - 1]) for end in edges[1:]], tuple(curves))


def _of_ranks(name: str, rows: Rows) -> dict[str, Sequence[float]]:
    """The values of each rank, in lists that have one item per rank; of many ranks, a row has a summary instead."""
    columns = rows.items(name)
    summary = rows.items(f"{name}_summary")
    if summary and not columns:
        return dict(zip(("highest", "median", "lowest"), reversed(summary), strict=False))
    return _each_or_range("rank", columns)


def _points(pick: Callable[[list[float]], float], groups: Iterable[list[float]]) -> Values:
    """One value for each group of numbers, such as its mean; None for an empty group."""
    return [_rounded(pick(numbers)) if numbers else None for numbers in groups]


def _each_or_range(what: str, columns: Sequence[Sequence[float]]) -> dict[str, Sequence[float]]:
    """Map a label for each rank or GPU, such as `rank 0`, to its column.

    If there are many ranks or GPUs, there are instead three columns: the lowest, median and highest value.
    """
    count = len(columns)
    if count <= MOST_LINES:
        return {f"{what} {index}": column for index, column in enumerate(columns)}

    def over(pick: Callable[[list[float]], float]) -> Sequence[float]:
        lines = ([value for value in line if not isnan(value)] for line in zip(*columns, strict=True))
        return array("d", (pick(numbers) if numbers else nan for numbers in lines))

    return {f"highest of {count}": over(max), "median": over(median), f"lowest of {count}": over(min)}


def _rounded(value: float) -> float:
    return float(f"{value:.5g}") if abs(value) < 1e5 else round(value)


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
