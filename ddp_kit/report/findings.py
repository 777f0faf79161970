"""The findings of a report as text: findings about the profiles of a run, and about the run itself."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from math import isnan
from pathlib import Path
from statistics import fmean, median

from ddp_kit.errors import UsageError
from ddp_kit.report.charts import MOST_LINES
from ddp_kit.report.machine_load import is_number
from ddp_kit.report.run_history import Attempt, RunHistory
from ddp_kit.report.trace_analysis import Operation, lines, read_trace
from ddp_kit.texts import duration_text, plural, size_text

# --- Profiles ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Profile:
    """One trace: its findings as text, and the data for its table in the report."""

    title: str
    lines: tuple[str, ...]
    operations: tuple[Operation, ...] = ()
    """The most expensive operations."""


def profiles_of(run: RunHistory) -> tuple[Profile, ...]:
    """One `Profile` per file. If a file cannot be read, its profile contains only the error message."""
    return tuple(map(_profile, run.traces))


def _profile(path: Path) -> Profile:
    try:
        summary = read_trace(path)
    except UsageError as error:
        return Profile(f"Profile {path.name}", (str(error),))
    title = "Profile"
    if summary.rank is not None:
        title += f" of rank {summary.rank}"
    if summary.steps is not None:
        title += f", steps {summary.steps[0]} to {summary.steps[1]}"
    found = tuple(lines(summary)) or ("Nothing stands out.",)
    return Profile(f"{title} ({path.name})", found, summary.operations)


# --- Findings about a run ---------------------------------------------------------------------------------------------
# How the run ended, the advice given during the run, and problems that only the record of the whole run shows.


_ENOUGH_ROWS = 8
"""Minimum number of rows from which a trend is judged."""
_RISEN = 1.05
"""Multiple of the lowest evaluation loss, above which a later loss counts as risen."""
_SLOWER = 0.8
"""Fraction of the earlier throughput, below which a later throughput counts as slower."""
_OFF_PLAN = 0.10
_IDLE_GPU = 0.5
_COMPILED_AGAIN = 3
"""Minimum number of late compilations to report; a smaller last batch and the first evaluation cause one each."""
_FULL_HOST = 0.95
_WORTH_SAYING = 0.05
"""Seconds lost to failed attempts from which they are reported."""


@dataclass(frozen=True)
class Finding:
    """One finding, and whether it is a problem."""

    text: str
    is_problem: bool


def findings(run: RunHistory) -> list[Finding]:
    """Findings about a run, the most important first."""
    return [
        *_endings(run),
        *_advice(run),
        *_loss(run),
        *_compilation(run),
        *_throughput(run),
        *_memory(run),
        *_machine(run),
        *_record(run),
    ]


def state(run: RunHistory) -> str:
    """Progress or outcome of a run in a few words."""
    codes = [end["exit_code"] for end in run.last.ends]
    if run.is_live:
        outcome = "running"
    elif any(codes):
        outcome = f"exit code {codes[0]}"
    elif codes or run.last.done:
        outcome = "finished"
    else:
        outcome = "stopped" if run.last.stop else "no end recorded"
    steps = f"{run.steps:,}"
    total = run.last.begin.get("total_steps")
    if isinstance(total, int) and total >= run.steps:
        steps += f" of {total:,}"
    return f"{outcome}, {steps} steps in {duration_text(run.seconds)}"


def _endings(run: RunHistory) -> Iterator[Finding]:
    for number, attempt in enumerate(run.attempts, 1):
        for text in dict.fromkeys(end.get("text", "") for end in attempt.ends if end["exit_code"]):
            which = f"Attempt {number} of {len(run.attempts)}"
            yield Finding(f"{which}: {text}", is_problem=attempt.failed)
    lost = 0.0
    repeats = ""
    for before, after, (_, end) in zip(run.attempts, run.attempts[1:], run.periods, strict=False):
        if before.failed:
            saved = _time_of_step(before, after.begin["step"], run)
            lost += max(0.0, end - saved)
            if saved < min(end["time"] for end in before.ends):
                repeats = ", including repeated steps"
    if lost >= _WORTH_SAYING:
        yield Finding(f"Failed attempts cost {duration_text(lost)}{repeats}", is_problem=True)
    last = run.last
    if not last.ends and last.done is None and last.stop is None and not run.is_live:
        yield Finding(
            "The last attempt has no recorded end: it is still running, was killed, or was started without the "
            f"launcher; last step: {run.steps:,}",
            is_problem=False,
        )


def _time_of_step(attempt: Attempt, step: int, run: RunHistory) -> float:
    """Time until which an attempt did work up to a step: its end, if that was its last step, or an estimate.

    The estimate is between the attempt's last row up to this step, and its end if the step of the end is known.
    """
    if latest := [end["time"] for end in attempt.ends if end.get("step") == step]:
        return float(max(latest))
    rows = run.rows
    points = [(rows.steps[number], rows.times[number]) for number in rows.by_attempt.get(attempt.name, ())]
    points = [(attempt.begin["step"], attempt.begin["time"]), *(point for point in points if point[0] <= step)]
    before = max(points, key=lambda point: point[0])
    ends = [end for end in attempt.ends if (end.get("step") or 0) >= step]
    after = before
    if step and ends:
        after = min(((end["step"], end["time"]) for end in ends), key=lambda point: point[0])
    share = (step - before[0]) / max(after[0] - before[0], 1)
    return float(before[1] + min(share, 1.0) * max(after[1] - before[1], 0.0))


def _advice(run: RunHistory) -> Iterator[Finding]:
    """The Trainer's advice from the latest attempt in which it gave any."""
    for attempt in reversed(run.attempts):
        if attempt.advice:
            for line in attempt.advice:
                yield Finding(f"{line['text']} (at step {line.get('step', 0):,})", is_problem=True)
            return


def _loss(run: RunHistory) -> Iterator[Finding]:
    lost = [step for step, loss in zip(run.rows.steps, run.rows.values("loss"), strict=True) if loss is None]
    if lost:
        yield Finding(
            f"The loss was not finite at {plural(len(lost), 'log point')}, first at step {lost[0]:,}: "
            "lower the learning rate, or set max_grad_norm",
            is_problem=True,
        )
    losses = zip(run.evaluations.values("eval_loss"), run.evaluations.steps, strict=True)
    evaluated = [(loss, step) for loss, step in losses if is_number(loss)]
    if len(evaluated) > 2:
        lowest, step = min(evaluated)
        last = evaluated[-1][0]
        if lowest > 0 and last > _RISEN * lowest:
            yield Finding(
                f"The evaluation loss was lowest at step {step:,} ({lowest:.4g}) and has risen to {last:.4g}: "
                'the model may be overfitting; checkpoint={"best_metric": "loss"} keeps the best checkpoint',
                is_problem=True,
            )


def _compilation(run: RunHistory) -> Iterator[Finding]:
    compilations = run.rows.values("compilations")
    numbers = run.rows.by_attempt.get(run.last.name, ())
    counts = [(compilations[i], run.rows.steps[i]) for i in numbers if isinstance(compilations[i], int)]
    if len(counts) < _ENOUGH_ROWS:
        return
    early = counts[len(counts) // 4][0]
    count, _ = counts[-1]
    if count - early >= _COMPILED_AGAIN:
        step = next(step for number, step in counts if number == count)
        yield Finding(
            f"torch.compile compiled {count - early} graphs after the first quarter of the run ({count} in total), "
            f"the last one by step {step:,}: if batch shapes vary, pad the batches to a few sizes",
            is_problem=True,
        )


def _throughput(run: RunHistory) -> Iterator[Finding]:
    all_rates = run.rows.numbers("samples_per_second")
    numbers = run.rows.by_attempt.get(run.last.name, ())
    rates = [all_rates[i] for i in numbers if not isnan(all_rates[i])][1:]  # the first interval includes the warm-up
    if len(rates) < 2 * _ENOUGH_ROWS:
        return
    quarter = len(rates) // 4
    early = median(rates[:quarter])
    late = median(rates[-quarter:])
    if late < _SLOWER * early:
        yield Finding(
            f"Throughput fell from {early:,.0f} to {late:,.0f} samples/s during the last attempt: the report "
            "shows each rank's time and the machine's load",
            is_problem=True,
        )


def _memory(run: RunHistory) -> Iterator[Finding]:
    memory = chain(run.rows.items("rank_memory"), run.rows.items("rank_memory_summary"))
    peak = max((value for value in chain.from_iterable(memory) if not isnan(value)), default=None)
    planned = run.last.begin.get("planned_memory")
    if peak is not None and is_number(planned) and planned:
        share = peak / planned - 1
        if abs(share) > _OFF_PLAN:
            yield Finding(
                f"A rank used {size_text(peak)} of GPU memory; estimated: {size_text(planned)} ({share:+.0%})",
                is_problem=share > 0,
            )


def _machine(run: RunHistory) -> Iterator[Finding]:
    idle = {}
    full = {}
    ranks, nodes = (run.last.begin.get(name) or 1 for name in ("ranks", "nodes"))
    for node, load in run.machines.nodes.items():
        loads = [[value for value in values if not isnan(value)] for values in load.gpus["load"]]
        used = [of_gpu for of_gpu in loads if of_gpu and max(of_gpu) > 0]
        shared = len(used) > ranks // nodes  # with other jobs, which may cause the load
        busy = fmean([*chain.from_iterable(used)] or [1.0])
        if busy < _IDLE_GPU and not shared:
            idle[node] = busy
        if load.fullest > _FULL_HOST:
            full[node] = load.fullest
    for where, busy in _of_nodes(idle, min, run):
        yield Finding(
            f"The GPUs of {where} were busy for {busy:.0%} of the time: the report shows where the time of a step goes",
            is_problem=True,
        )
    for where, share in _of_nodes(full, max, run):
        yield Finding(
            f"The host memory of {where} was {share:.0%} full; when it runs out, the kernel kills a process: "
            "use fewer DataLoader workers, or smaller samples",
            is_problem=True,
        )


def _of_nodes(
    values: Mapping[str, float], pick: Callable[[Iterable[float]], float], run: RunHistory
) -> Iterator[tuple[str, float]]:
    """Names of nodes, each with its value; of many nodes, only the one that `pick` chooses."""
    if len(run.machines.nodes) == 1:
        yield from (("the machine", value) for value in values.values())
    elif len(values) <= MOST_LINES:
        yield from ((f"node {node}", value) for node, value in values.items())
    else:
        extreme = pick(values.values())
        node = next(node for node, value in values.items() if value == extreme)
        yield f"node {node}, and of {plural(len(values) - 1, 'other node')} that are alike,", extreme


def _record(run: RunHistory) -> Iterator[Finding]:
    if run.unreadable:
        lines = plural(run.unreadable, "line")
        yield Finding(f"{lines} of the record cannot be read and are ignored", is_problem=True)
