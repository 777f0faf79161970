"""Build the report as one HTML page."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from html import escape
from importlib.resources import files
from itertools import accumulate
from typing import Any

from ddp_kit import __version__
from ddp_kit.report.charts import Chart, charts_of_run, comparing_charts
from ddp_kit.report.comparison import differences, first_differences, settings
from ddp_kit.report.findings import Finding, Profile, findings, state
from ddp_kit.report.run_history import Attempt, RunHistory
from ddp_kit.texts import duration_text

# The page is self-contained: it loads nothing from the network.

MARK = '<meta name="generator" content="ddpkit report'
"""Tag by which `ddpkit report` recognises its own files."""
_UPLOT = "uplot-1.6.32.min"
_OPEN_RUNS = 2
"""Maximum number of runs whose own sections are open at first."""
_CLOCK_POINTS = 100
"""Number of points by which the page converts steps to minutes."""
_LONGEST_NAME = 100
"""Maximum number of characters shown of a kernel's name; names of C++ templates can fill a screen."""


def page(runs: Sequence[RunHistory], profiles: Mapping[str, Sequence[Profile]]) -> str:
    """The HTML text of the report. `profiles`: the profiles of each run, by run name."""
    title = runs[0].name if len(runs) == 1 else f"{len(runs)} runs"
    charts: list[Chart] = []
    body = "".join(_body(runs, profiles, charts))
    data = {"runs": [_run_data(run) for run in runs], "charts": [_chart_data(chart) for chart in charts]}
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
{MARK} {escape(__version__)}">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)} - ddpkit report</title>
<style>{_asset(f"{_UPLOT}.css")}{_asset("page.css")}</style>
</head>
<body>
<header>
<h1>{escape(title)}</h1>
</header>
<main>
{body}</main>
<footer><p class="quiet">ddpkit {escape(__version__)}, {_utc(runs[0].read_at)}. Charts by uPlot (MIT licence, Leon
Sorokin).</p></footer>
<script type="application/json" id="data">{_json(data)}</script>
<script>{_asset(f"{_UPLOT}.js")}</script>
<script>{_asset("page.js")}</script>
</body>
</html>
"""


def _body(runs: Sequence[RunHistory], profiles: Mapping[str, Sequence[Profile]], charts: list[Chart]) -> Iterator[str]:
    several = len(runs) > 1
    yield _overview(runs)
    if not several:
        yield f"<section><h2>Findings</h2>\n{_findings(findings(runs[0]))}</section>\n"
    yield f"<section><h2>Training</h2>\n<noscript><p>The charts need JavaScript.</p></noscript>\n{_controls(runs)}"
    yield f"{_figures(comparing_charts(runs), charts)}</section>\n"
    if several:
        yield f"<section><h2>Findings</h2>\n{_all_findings(runs)}</section>\n"
        if len(runs) == 2:
            lines = "".join(f"<li>{escape(line)}</li>\n" for line in first_differences(*runs))
            yield f"<section><h2>Where they first differ</h2>\n<ul>{lines}</ul></section>\n"
        yield f"<section><h2>What differs</h2>\n{_differences(runs)}</section>\n"
    for number, run in enumerate(runs):
        yield f'<section id="run-{number}">'
        if several:
            is_open = " open" * (len(runs) <= _OPEN_RUNS)
            yield f"<details{is_open}><summary><h2>{escape(run.name)}</h2></summary>\n{_findings(findings(run))}"
        else:
            yield "<h2>Ranks and machine</h2>\n"
        yield _figures(charts_of_run(runs, number), charts, number)
        for profile in profiles.get(run.name, ()):
            yield _profile(profile)
        yield _attempts(run)
        yield _settings(run)
        yield f"{'</details>' * several}</section>\n"


def _overview(runs: Sequence[RunHistory]) -> str:
    if len(runs) == 1:
        begin = runs[0].last.begin
        where = f"{begin.get('ranks', '?')} ranks on {begin.get('host', '?')}, {' '.join(begin.get('devices', ()))}"
        about = f"{where}; {_recorded_text(begin.get('model'))}"
        return f"<p>{_state(runs[0])}</p>\n<p class=quiet>{escape(about)}</p>\n"
    rows = []
    for number, run in enumerate(runs):
        box = f'<label><input type=checkbox class=control data-run="{number}" checked> {escape(run.name)}</label>'
        evaluated = run.evaluations.values("eval_loss")
        cells = (
            _number_text(run.rows.values("loss")), _number_text(evaluated),
            _number_text(run.rows.values("samples_per_second")),
            _recorded_text(run.last.begin.get("ranks")), str(len(run.attempts)),
        )  # fmt: skip
        rows.append(f'<tr data-run="{number}"><th scope=row>{box}</th><td>{_state(run)}</td>{_cells(cells)}</tr>\n')
    columns = ("run", "state", "loss", "evaluation loss", "samples/s", "ranks", "attempts")
    return f"<div class=runs>{_html_table('Runs', rows, columns)}</div>\n"


def _state(run: RunHistory) -> str:
    return f"<span{' class=live' * run.is_live}>{escape(state(run))}</span>"


def _controls(runs: Sequence[RunHistory]) -> str:
    """Form that selects the x axis of the charts, the smoothing of the curves and, if there are several, the runs."""
    if not any(run.rows for run in runs):
        return ""
    ways = {"step": "step", "minutes": "running time"}
    if all(map(_batch, runs)):
        ways["samples"] = "samples"
    options = "".join(f"<option value={value}>{text}</option>" for value, text in ways.items())
    filtering = ""
    if len(runs) > 1:
        filtering = "<label>filter runs <input type=search id=filter></label>\n"
    return (
        f"<form class=control>{filtering}<label>x axis <select id=axis>{options}</select></label>\n"
        "<label>smoothing <input type=range id=smoothing min=0 max=0.98 step=0.02 value=0></label></form>\n"
    )


def _batch(run: RunHistory) -> int | None:
    """Samples per optimizer step; None if the configuration has no valid number."""
    size = run.last.begin.get("config", {}).get("global_batch_size")
    return size if isinstance(size, int) and size > 0 else None


def _findings(items: Sequence[Finding]) -> str:
    lines = "".join(f"<li{' class=problem' * finding.is_problem}>{escape(finding.text)}</li>\n" for finding in items)
    return f"<ul>{lines or '<li>Nothing stands out.</li>'}</ul>\n"


def _all_findings(runs: Sequence[RunHistory]) -> str:
    """HTML table of the problems of each run. A problem that all runs have, with other numbers, is shown once."""
    problems = [{_kind(finding): finding for finding in findings(run) if finding.is_problem} for run in runs]
    shared = [kind for kind in problems[0] if len(runs) > 2 and all(kind in kinds for kinds in problems)]
    rows = []
    if shared:
        findings_of_all = _findings([problems[0][kind] for kind in shared])
        rows.append(f"<tr><th scope=row>all runs</th><td>{findings_of_all}</td></tr>\n")
    for number, (run, problems_of_run) in enumerate(zip(runs, problems, strict=True)):
        further = [finding for kind, finding in problems_of_run.items() if kind not in shared]
        if further:
            head = f'<tr data-run="{number}"><th scope=row>{escape(run.name)}</th>'
            rows.append(f"{head}<td>{_findings(further)}</td></tr>\n")
    if not rows:
        return "<p>Nothing stands out in any run.</p>\n"
    return _html_table("Findings", rows, ("run", "findings"))


def _kind(finding: Finding) -> str:
    return re.sub(r"\d[\d,.]*", "0", finding.text)


def _differences(runs: Sequence[RunHistory]) -> str:
    table = differences(runs)
    if not table:
        return "<p>Nothing.</p>\n"
    rows = []
    for number, run in enumerate(runs):
        cells = _cells(values[number] for _, values in table)
        rows.append(f'<tr data-run="{number}"><th scope=row>{escape(run.name)}</th>{cells}</tr>\n')
    return _html_table("Differences", rows, ("run", *(name.removeprefix("config.") for name, _ in table)))


def _figures(shown: Sequence[Chart], charts: list[Chart], run: int | None = None) -> str:
    """HTML for the charts in `shown`. They are also appended to `charts`, the list of all charts on the page."""
    if not shown:
        return "<p>No log point has been recorded yet.</p>\n"
    figures = []
    for chart in shown:
        caption = f"<h3>{escape(chart.title)}</h3>"
        if chart.unit:
            caption += f"<p class=quiet>{escape(chart.unit)}</p>"
        if chart.name == "loss":
            caption += "<label class=control><input type=checkbox data-logarithmic> logarithmic</label>"
        name = chart.name
        of_run = ""
        if run is not None:
            name += f"-{run}"
            of_run = f' data-run="{run}"'
        figures.append(
            f'<figure id="{name}"><figcaption>{caption}</figcaption>'
            f'<div class=plot role=img aria-label="{escape(f"{chart.title}. {chart.summary}")}"'
            f' data-chart="{len(charts)}"{of_run}></div></figure>\n'
        )
        charts.append(chart)
    return f"<div class=charts>{''.join(figures)}</div>\n"


def _profile(profile: Profile) -> str:
    items = "".join(f"<li>{escape(line)}</li>\n" for line in profile.lines)
    rows = []
    for operation in profile.operations:
        milliseconds = f"{operation.seconds * 1e3:,.4g}"
        cells = _cells((operation.operator or "", f"{operation.calls:,}", milliseconds, f"{operation.share:.1%}"))
        rows.append(f"<tr><th scope=row>{escape(operation.name[:_LONGEST_NAME])}</th>{cells}</tr>\n")
    columns = ("most expensive operations", "launched by", "calls", "ms", "share")
    html = f"<h3>{escape(profile.title)}</h3>\n<ul>{items}</ul>\n"
    if rows:
        html += _html_table("Operations", rows, columns)
    return html


def _attempts(run: RunHistory) -> str:
    rows = []
    for number, attempt in enumerate(run.attempts, 1):
        began = _utc(attempt.begin["time"])
        codes = sorted({str(end["exit_code"]) for end in attempt.ends})
        cells = (began, f"{attempt.begin['step']:,}", ", ".join(codes) or "none recorded")
        verdict = f"<td>{escape(_verdict(attempt))}{_stacks(attempt)}</td>"
        rows.append(f"<tr><th scope=row>{number}</th>{_cells(cells)}{verdict}</tr>\n")
    table = _html_table("Attempts", rows, ("attempt", "began", "from step", "exit code", "verdict"))
    return f"<h3>Attempts</h3>\n{table}"


def _verdict(attempt: Attempt) -> str:
    """The verdict of the launcher, or how long `fit` took; empty if neither is known."""
    text = " ".join(dict.fromkeys(_recorded_text(end.get("text")) for end in attempt.ends))
    seconds = (attempt.done or {}).get("seconds")
    if not text and isinstance(seconds, int | float):
        text = f"fit ended after {duration_text(seconds)}"
    return text


def _stacks(attempt: Attempt) -> str:
    stacks = {rank: text for end in attempt.ends for rank, text in (end.get("stacks") or {}).items()}
    if not stacks:
        return ""
    parts = (
        f"<p>rank {escape(str(rank))}</p><pre tabindex=0>{escape(str(text))}</pre>" for rank, text in stacks.items()
    )
    return f"<details><summary>Stacks of {len(stacks)} ranks</summary>{''.join(parts)}</details>"


def _settings(run: RunHistory) -> str:
    rows = [f"<tr><th scope=row>{escape(name)}</th>{_cells((value,))}</tr>\n" for name, value in settings(run).items()]
    table = _html_table("Configuration", rows, ("setting", "value"))
    return (
        f"<details><summary>Configuration, versions and environment of the last attempt</summary>\n{table}</details>\n"
    )


def _html_table(label: str, rows: Sequence[str], columns: Sequence[str]) -> str:
    """An HTML table that can be scrolled on its own if it is wider than the page."""
    head = "".join(f"<th scope=col>{escape(name)}</th>" for name in columns)
    return (
        f'<div class=wide tabindex=0 role=group aria-label="{label}"><table><thead><tr>{head}</tr></thead>\n'
        f"<tbody>{''.join(rows)}</tbody></table></div>\n"
    )


def _cells(texts: Iterable[str]) -> str:
    return "".join(f"<td>{escape(text)}</td>" for text in texts)


def _recorded_text(value: object) -> str:
    """A value of the record as text; empty if there is none."""
    return "" if value is None else str(value)


def _utc(time: float) -> str:
    return datetime.fromtimestamp(time, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")


def _number_text(values: Sequence[object]) -> str:
    """The last of the values."""
    value = next(reversed(values), None)
    if not isinstance(value, int | float):
        return ""
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.4g}"


def _run_data(run: RunHistory) -> dict[str, Any]:
    """The run's name, the steps from which it resumed, and what converts a step to minutes and to samples."""
    begin = run.attempts[0].begin
    every = max(len(run.rows) // _CLOCK_POINTS, 1)
    points = [(begin["step"], begin["time"])]
    for part in (slice(None, None, every), slice(-1, None)):
        points += zip(run.rows.steps[part], run.rows.times[part], strict=True)
    points.sort(key=lambda point: point[0])
    clock = {step: round(run.running_seconds(time) / 60, 3) for step, time in points}
    restarts = [attempt.begin["step"] for attempt in run.attempts[1:] if attempt.begin["step"]]
    minutes = list(accumulate(clock.values(), max))
    return {"name": run.name, "restarts": restarts, "steps": list(clock), "minutes": minutes, "batch": _batch(run)}


def _chart_data(chart: Chart) -> dict[str, Any]:
    groups = [
        {
            "run": group.run,
            "x": group.x,
            "curves": [
                {name: value for name, value in asdict(curve).items() if value is not None} for curve in group.curves
            ],
        }
        for group in chart.groups
    ]
    return {"unit": chart.unit, "x": chart.x, "stacked": chart.stacked, "groups": groups}


def _json(data: object) -> str:
    """Convert data to JSON, escaped so that it cannot close the script element around it."""
    return json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")


def _asset(name: str) -> str:
    return (files(__package__) / "assets" / name).read_text(encoding="utf-8")
