"""The charts of a report as pictures, by matplotlib."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from ddp_kit.errors import UsageError
from ddp_kit.launcher.report.charts import Chart, Curves, charts_of_run, comparing_charts
from ddp_kit.launcher.report.run_history import RunHistory

_STYLES = ("-", "--", ":", "-.")
_INCHES = (8.0, 4.5)


def write_pictures(runs: Sequence[RunHistory], folder: Path) -> list[Path]:
    """An SVG file per chart, such as loss.svg. Raises `UsageError` without matplotlib."""
    if find_spec("matplotlib") is None:
        raise UsageError("--images needs matplotlib, which is not installed", "pip install 'ddpkit[images]'")
    folder.mkdir(parents=True, exist_ok=True)
    charts = [(chart.name, chart) for chart in comparing_charts(runs)]
    for number in range(len(runs)):
        suffix = f"-{number + 1}" if len(runs) > 1 else ""
        charts += [(f"{chart.name}{suffix}", chart) for chart in charts_of_run(runs, number)]
    paths = [folder / f"{name}.svg" for name, _ in charts]
    for path, (_, chart) in zip(paths, charts, strict=True):
        _draw(chart, [run.name for run in runs], path)
    return paths


def _draw(chart: Chart, names: Sequence[str], path: Path) -> None:
    from matplotlib.figure import Figure  # no pyplot: it would look for a display

    figure = Figure(figsize=_INCHES, layout="constrained")
    axes = figure.add_subplot()
    several = len({group.run for group in chart.groups}) > 1
    for index, group in enumerate(chart.groups):
        if chart.stacked:
            axes.stackplot(group.x, *_stack(group), labels=[curve.label for curve in group.curves])
            continue
        for number, curve in enumerate(group.curves):
            label = f"{names[group.run]}: {curve.label}" if several else curve.label
            values = [float("nan") if value is None else value for value in curve.values]
            axes.plot(group.x, values, _STYLES[(index + number) % len(_STYLES)], label=label, linewidth=1.2)
    axes.set_title(chart.title)
    axes.set_xlabel("optimizer step" if chart.x == "step" else "minutes since the start")
    axes.set_ylabel(chart.unit)
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path)


def _stack(group: Curves) -> list[list[float]]:
    return [[value or 0.0 for value in curve.values] for curve in group.curves]
