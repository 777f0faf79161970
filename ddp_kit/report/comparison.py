"""How runs differ: their settings; and the first step at which two runs differ, and in what."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import PurePath
from typing import Any

from ddp_kit.env import VARIABLES_OF_ONE_RUN
from ddp_kit.report.run_history import RunHistory

# --- Settings ---------------------------------------------------------------------------------------------------------

_PARTS = (
    "command", "model", "optimizer", "devices", "ranks", "nodes", "host", "config", "versions", "git", "environment",
)  # fmt: skip


def settings(run: RunHistory) -> dict[str, str]:
    """The settings that the last attempt was started with, by name."""
    settings_by_name: dict[str, str] = {}
    for part in _PARTS:
        settings_by_name.update(_flat(part, run.last.begin.get(part)))
    return settings_by_name


def differences(runs: Sequence[RunHistory]) -> list[tuple[str, tuple[str, ...]]]:
    """The settings that differ between runs, as pairs: the name, and the values in all runs (empty where not set)."""
    all_settings = [_arguments(run.last.begin.get("command", ())) | settings(run) for run in runs]
    names = dict.fromkeys(chain.from_iterable(all_settings))
    table = [(name, tuple(settings_of_run.get(name, "") for settings_of_run in all_settings)) for name in names]
    differs_anyway = ("command", *(f"environment.{prefix}" for prefix in VARIABLES_OF_ONE_RUN))
    return [
        (name, values)
        for name, values in table
        if len(set(values)) > 1 and not name.startswith(differs_anyway) and not _names_the_folders(values, runs)
    ]


def _arguments(command: Sequence[str]) -> dict[str, str]:
    """The arguments of a script by name: `--lr 0.1` and `--lr=0.1` are `--lr`; others are named by their position."""
    arguments: dict[str, str] = {}
    flag = ""
    for position, word in enumerate(command):
        name, equals, value = word.partition("=")
        if word.startswith("--") and equals:
            arguments[name] = value
            flag = ""
        elif word.startswith("--"):
            arguments[name] = "yes"
            flag = name
        elif flag:
            arguments[flag] = word
            flag = ""
        else:
            arguments[f"argument {position}" if position else "script"] = word
    return arguments


def _names_the_folders(values: Sequence[str], runs: Sequence[RunHistory]) -> bool:
    """Whether the value of each run is a path that ends like its own folder, which says nothing about the run."""
    named = [(PurePath(run.name).parts, value) for run, value in zip(runs, values, strict=True)]
    # Without a slash, the value may be what the folder is named after: runs/0.1 for --lr 0.1.
    return all("/" in value and PurePath(value).parts[-len(name) :] == name for name, value in named)


def _flat(name: str, value: Any) -> dict[str, str]:
    if isinstance(value, Mapping):
        flat: dict[str, str] = {}
        for key, part in value.items():
            flat.update(_flat(f"{name}.{key}", part))
        return flat
    if value is None:
        return {}
    if isinstance(value, list):
        value = " ".join(map(str, value))
    return {name: str(value)}


# --- First differences ------------------------------------------------------------------------------------------------


WITHOUT_EFFECT = (
    *(f"config.checkpoint.{name}" for name in ("dir", "every_steps", "every_seconds", "keep_last", "save")),
    *(f"config.data.{name}" for name in ("compare_items", "pin_memory", "timeout")),
    *(f"config.profile.{name}" for name in ("steps", "ranks", "dir")),
    *(f"config.{name}" for name in ("log_every_steps", "mfu", "sanity_check", "verify_ranks")),
    "host",
)
"""Settings that cannot change the results of a run."""
_DIGITS = 8  # of the checksum of one step's samples
_APART = ("ranks", "nodes", "devices", "versions.", "git.", "environment.")


@dataclass(frozen=True)
class Course:
    """How far two runs are equal in one respect, over the steps that both have recorded."""

    equal: int
    """The last step up to which they are equal; 0 if there is none."""
    differs: int | None
    """The first step at which they differ; None if they do not."""

    @property
    def text(self) -> str:
        """The last step up to which they are equal, if any, and the step at which they differ, if they do."""
        steps = []
        if self.equal:
            steps.append(f"equal up to step {self.equal:,}")
        if self.differs is not None:
            steps.append(f"different at step {self.differs:,}")
        return ", ".join(steps) or "no step in common"


def course(old: Mapping[int, Any], new: Mapping[int, Any]) -> Course:
    """Compare the values of two runs by step."""
    equal = 0
    for step in sorted(old.keys() & new.keys()):
        if old[step] != new[step]:
            return Course(equal, step)
        equal = step
    return Course(equal, None)


def first_differences(old: RunHistory, new: RunHistory) -> list[str]:
    """Lines of text about where two runs first differ: a summary, the settings, then the results by step."""
    old_values = _values(old)
    new_values = _values(new)
    problems: dict[str, str] = {}
    if _division(old, old_values["weights"]) != _division(new, new_values["weights"]):
        problems["weights"] = "not comparable, because the runs divide them in different ways among their ranks"
    for name in old_values:
        silent = [run.name for run, values in ((old, old_values), (new, new_values)) if not values[name]]
        if silent:
            problems[name] = f"not recorded by {' and '.join(silent)}"
    if "weights" in problems:
        old_values["weights"].clear()
    # The mean loss of a row can only be compared if its interval began at the same step: a resume shortens it.
    same_interval = _begins(old).items() & _begins(new).items()
    old_values["loss"] = {step: old_values["loss"][step] for step, _ in same_interval}
    courses = {name: course(values, new_values[name]) for name, values in old_values.items()}
    lines = [_summary(f"{old.name} and {new.name}", courses), *_setting_lines(old, new)]
    for name, found in courses.items():
        line = f"{name}: {problems.get(name, found.text)}"
        if name in ("learning rate", "loss") and name not in problems and found.differs is not None:
            line += _change(old_values[name][found.differs], new_values[name][found.differs])
        lines.append(line)
    return lines


def _summary(runs: str, courses: Mapping[str, Course]) -> str:
    differing = {name: found for name, found in courses.items() if found.differs is not None}
    if not differing:
        last = courses["learning rate"].equal  # every row has one
        if not last:
            return f"{runs} have no log point in common"
        text = f"{runs} are equal up to step {last:,}, the last that both have"
        if not courses["samples"].equal == courses["weights"].equal == last:
            text += ", as far as is known"
        return text
    first = min(found.differs for found in differing.values() if found.differs is not None)
    names = [name for name, found in differing.items() if found.differs == first]
    equal = min((differing[name].equal for name in names if differing[name].equal), default=0)
    where = f"first differ in steps {equal + 1:,} to {first:,}"  # a resumed run may not know the samples of all steps
    if equal + 1 == first:
        where = f"first differ at step {first:,}"
    elif not equal and "samples" in names:  # perhaps even before the first step
        where = f"differ at the first step whose samples both have, step {first:,}"
    elif not equal:
        where = f"differ at their first common log point, step {first:,}"
    return f"{runs} {where}: {', '.join(names)}"


def _setting_lines(old: RunHistory, new: RunHistory) -> list[str]:
    """A line for each setting that differs and can change results, and one for versions and machine."""
    dirs = tuple(settings(run).get("config.checkpoint.dir") for run in (old, new))
    lines = []
    apart = []
    for name, values in differences((old, new)):
        text = f"{name.removeprefix('config.')}: {' -> '.join(value or 'not set' for value in values)}"
        if name.startswith(_APART):
            apart.append(text)
        elif name not in WITHOUT_EFFECT and values != dirs:  # an argument may name the folder
            lines.append(f"settings: {text}")
    if apart:
        lines.append(f"versions and machine: {'; '.join(apart)}")
    return lines


def _values(run: RunHistory) -> dict[str, dict[int, Any]]:
    """The results of a run, by name and step. Of several rows of one step, the last counts: a resume repeats steps."""
    samples: dict[int, str] = {}
    rows = run.rows
    for step, digits in zip(rows.steps, rows.values("samples_checksums"), strict=True):
        checksums = [digits[begin : begin + _DIGITS] for begin in range(0, len(digits or ""), _DIGITS)]
        samples |= zip(range(step - len(checksums) + 1, step + 1), checksums, strict=True)
    rates = [rows.values(name) for name in rows.names if name.startswith("learning_rate")]
    return {
        "samples": samples,
        "weights": {step: sums for step, sums in zip(rows.steps, rows.values("weights_checksum"), strict=True) if sums},
        "learning rate": {
            step: [column[number] for column in rates if column[number] is not None]
            for number, step in enumerate(rows.steps)
        },
        "loss": {step: [loss] for step, loss in zip(rows.steps, rows.values("loss"), strict=True)},
    }


def _division(run: RunHistory, weights: Mapping[int, str]) -> tuple[set[str], dict[str, str]] | None:
    """What determines how the weights of a run are divided among its ranks; None if each rank has all of them."""
    parts = {checksum.partition("/")[2] for checksum in weights.values()}
    parallel = {name: value for name, value in settings(run).items() if name.startswith("config.parallel.")}
    return (parts, parallel) if parts - {""} else None


def _begins(run: RunHistory) -> dict[int, int]:
    """The step after which the interval of each row began, by the row's own step."""
    begins_of_attempts = {attempt.name: attempt.begin["step"] for attempt in run.attempts}
    begins = {}
    before = 0
    for step, attempt in zip(run.rows.steps, run.rows.attempts, strict=True):
        if before >= step:  # a resumed attempt repeats steps
            before = 0
        begins[step] = max(begins_of_attempts.get(attempt, 0), before)
        before = step
    return begins


def _change(old: Sequence[Any], new: Sequence[Any]) -> str:
    """The first values that differ, in full precision, as text."""
    return next((f": {before!r} -> {after!r}" for before, after in zip(old, new, strict=False) if before != after), "")
