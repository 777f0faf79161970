"""Comparison of recordings: where a resumed attempt begins in the undisturbed run, and what differs from which step on.

Pure functions over the lines of `lines.py`.
"""

import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import isnan
from typing import Any

from ddp_kit.rehearsal.lines import Line, Recording


@dataclass(frozen=True)
class Difference:
    """The first difference of one kind between a run and the undisturbed run."""

    kind: str
    """A name in `CAUSES`."""
    step: int
    text: str
    ranks: tuple[int, ...] = ()
    """The ranks that have this difference; empty: all."""

    @property
    def description(self) -> str:
        """The difference, with its ranks."""
        if not self.ranks:
            return self.text
        word = "rank" if len(self.ranks) == 1 else "ranks"
        return f"{self.text} ({word} {', '.join(map(str, self.ranks))})"


CAUSES = {
    "start": "the script finds no checkpoint when it starts again, or does not load it",
    "global batch": "the batch size of each rank is fixed, so the global batch grows with the number of ranks",
    "weights": "the weights were saved at another moment than the step count, are not loaded, or a rank loads another "
    "file",
    "optimizer": "the optimizer's state_dict is not in the checkpoint, or is loaded into another optimizer",
    "learning rate": "the scheduler's state_dict is not in the checkpoint, or the scheduler is made after the state of "
    "the optimizer is loaded",
    "settings": "the options of the optimizer's parameter groups are not those of the checkpoint",
    "scaler": "the state_dict of the gradient scaler is not in the checkpoint",
    "passes": "a counter of micro-batches starts again, or the checkpoint was saved between accumulated micro-batches",
    "samples": "the position in the data is not in the checkpoint: the epoch, and the batches of it that are done",
    "random": "the random states of Python, NumPy and torch are not in the checkpoint, or something draws from them "
    "after they are restored",
    "buffers": "buffers are not in the checkpoint, or those of one rank are restored on all, although BatchNorm's "
    "statistics differ between ranks",
    "copies": "a copy of the weights, such as an exponential moving average, is not in the checkpoint",
    "loss": "an operation that is not deterministic, or state of the script that is not in the checkpoint",
    "mean loss": "each rank draws its own random numbers, as for dropout, or normalises its own batch, as BatchNorm "
    "does, so the loss depends on the number of ranks; or state of the script is not in the checkpoint",
    "epochs": "DistributedSampler.set_epoch(epoch) is not called before each epoch",
}
"""What usually causes a difference, by its kind, in the order in which one causes the others."""


# --- Where a resumed attempt begins -----------------------------------------------------------------------------------


def begins_at(reference: Recording, resumed: Recording) -> int | None:
    """Index of the line of the undisturbed run with which a resumed attempt begins; None: nothing shows where.

    The weights show it. If the optimizer's state, the samples, the learning rate and the random state agree on another
    step, that one counts: the weights may have been saved at another moment, or not been loaded.
    """
    evidence = {name: _matching(reference, resumed, value) for name, value in _EVIDENCE.items()}
    weights = evidence.pop("weights")

    def score(index: int) -> tuple[int, int]:
        """How much evidence besides the weights there is for a line; of several, the latest one counts."""
        return sum(index in matching for matching in evidence.values()), index

    best = max(weights or evidence["optimizer"] or set().union(*evidence.values()), key=score, default=None)
    if best is None or not weights:
        return best
    others = (best, best + 1, *evidence["optimizer"])
    return max(others, key=lambda index: (score(index)[0], index == best))


_EVIDENCE: Mapping[str, Callable[[Line], Any]] = {
    "weights": lambda line: line.weights,
    "optimizer": lambda line: line.state,
    "count": lambda line: line.count,
    "learning rate": lambda line: line.settings.get("lr"),
    "samples": lambda line: line.batches[-1:],
    "random": lambda line: line.random.get("torch"),
    "loss": lambda line: line.losses,
}


def _matching(reference: Recording, resumed: Recording, value: Callable[[Line], Any]) -> set[int]:
    """Indices of the lines of the undisturbed run that most ranks' first lines are equal to, in one value."""
    votes: Counter[int] = Counter()
    for rank, lines in resumed.items():
        if lines and (first := value(lines[0])):
            votes.update(index for index, line in enumerate(reference.get(rank, ())) if value(line) == first)
    most = max(votes.values(), default=0)
    return {index for index, count in votes.items() if count == most}


# --- Kinds of differences ---------------------------------------------------------------------------------------------


_RATES = ("lr", "initial_lr")


@dataclass(frozen=True)
class _Change:
    """A step whose facts of one kind are not those of the undisturbed run."""

    facts: Mapping[Any, tuple[Any, Any]]
    """The values that differ, in the undisturbed run and now, by name."""
    expected: Line
    line: Line
    undisturbed: Sequence[Line]
    """All steps of the undisturbed run."""


def _change_text(before: Any, now: Any) -> str:
    """Two numbers, or the first ones that differ in two sequences, as text."""
    if isinstance(before, Sequence):
        pairs = [(a, b) for a, b in zip(before, now, strict=False) if a != b]
        before, now = pairs[0] if pairs else (len(before), len(now))
    text = f"{before:g} -> {now:g}"
    return text if f"{before:g}" != f"{now:g}" else f"{before!r} -> {now!r}"


def _named_changes(change: _Change) -> str:
    return ", ".join(f"{name} {_change_text(before, now)}" for name, (before, now) in change.facts.items())


def _weights(change: _Change) -> str:
    lines = [line for line in change.undisturbed if line.optimizer == change.expected.optimizer]
    weights = change.line.weights
    for line in lines:
        if line.weights == weights and line.step == 1:
            return "the weights are the initial ones"
        if line.weights == weights:
            return f"the weights are those of step {line.step}"
    if len(weights) != len(change.expected.weights):
        return f"the optimizer has {len(weights)} tensors instead of {len(change.expected.weights)}"
    names = dict(enumerate(lines[0].parameters))
    text = f"the weights: {len(change.facts)} of {len(weights)} tensors"
    if first := names.get(min(change.facts)):
        text += f", first {first}"
    return text


def _optimizer(change: _Change) -> str:
    if not change.line.state:
        return f"the optimizer's state is empty ({', '.join(change.facts)} missing)"
    return f"the optimizer's state ({', '.join(change.facts)})"


def _scalers(line: Line) -> dict[tuple[int, str], float]:
    """The states of the gradient scalers by number and name."""
    return {(number, name): value for number, scaler in enumerate(line.scalers) for name, value in scaler.items()}


def _scaler(change: _Change) -> str:
    (_, name), values = next(iter(change.facts.items()))
    return f"gradient scaler: {name.strip('_').replace('_', ' ')} {_change_text(*values)}"


def _samples(change: _Change) -> str:
    ((before, now),) = change.facts.values()
    for line in change.undisturbed:
        if now and now[0] in _checksums(line) and line.step != change.expected.step:
            if line.step == 1:
                return "the samples start again, with those of step 1"
            return f"the samples are those of step {line.step}" + ", where the epoch begins" * bool(line.epochs)
    if len(before) != len(now):
        return f"batches per step {len(before)} -> {len(now)}"
    return "the samples are other ones"


def _checksums(line: Line) -> list[str]:
    return [whole for _, _, whole in line.batches]


def _random(change: _Change) -> str:
    return f"the random state of {' and '.join(change.facts)}"


def _buffers(change: _Change) -> str:
    first, *others = change.facts
    return f"buffers {first} and {len(others)} more" if others else f"buffer {first}"


def _copies(change: _Change) -> str:
    first, *others = change.facts
    text = f"copy of the model: {first}"
    return f"{text} and {len(others)} more tensors" if others else text


def _has_lost(before: Sequence[str], now: Sequence[str]) -> bool:
    """Whether tensors of the undisturbed run are missing among those with this name."""
    return bool(Counter(before) - Counter(now))


def _losses_differ(before: Sequence[float], now: Sequence[float]) -> bool:
    """Whether two equally long sequences differ. NaN is equal to NaN."""
    pairs = zip(before, now, strict=False)
    return len(before) == len(now) and any(a != b and (a == a or b == b) for a, b in pairs)


@dataclass(frozen=True)
class _Kind:
    """How one kind of difference is found and described."""

    facts: Callable[[Line], Mapping[Any, Any]]
    """Values of a step that are compared, by name."""
    sentence: Callable[[_Change], str] = _named_changes
    differ: Callable[[Any, Any], bool] = operator.ne
    in_both: bool = False
    """Whether only values that both runs have are compared."""
    lasts: bool = False
    """Whether a value has to differ in the next step too."""

    def changed(self, expected: Line, line: Line) -> dict[Any, tuple[Any, Any]]:
        """The values that differ, in the undisturbed run and now, by name."""
        before = self.facts(expected)
        now = self.facts(line)
        names = [name for name in before if name in now] if self.in_both else {**before, **now}
        pairs = {name: (before.get(name, ()), now.get(name, ())) for name in names}
        return {name: pair for name, pair in pairs.items() if self.differ(*pair)}


_KINDS = {
    "weights": _Kind(lambda line: dict(enumerate(line.weights)), _weights),
    "optimizer": _Kind(lambda line: line.state, _optimizer),
    "learning rate": _Kind(lambda line: {"learning rate": line.settings.get("lr", ())}),
    "settings": _Kind(lambda line: {name: line.settings[name] for name in line.settings if name not in _RATES}),
    "scaler": _Kind(_scalers, _scaler, in_both=True),
    "passes": _Kind(lambda line: {"backward passes per step": len(line.losses)}),
    "samples": _Kind(lambda line: {"batches": _checksums(line)}, _samples),
    "random": _Kind(lambda line: line.random, _random, in_both=True),
    "buffers": _Kind(lambda line: line.buffers, _buffers, _has_lost, in_both=True),
    # A dict that is there for a moment, such as a checkpoint that was loaded, is not a part of the run.
    "copies": _Kind(lambda line: line.copies, _copies, _has_lost, in_both=True, lasts=True),
    "loss": _Kind(lambda line: {"loss": line.losses}, differ=_losses_differ),
}


_FOLLOWS_FROM = {
    "samples": {"passes"},
    "random": {"passes"},
    "buffers": {"weights", "passes", "samples", "random"},
    "copies": {"weights"},
    "loss": CAUSES.keys() - {"loss"},
    "mean loss": CAUSES.keys() - {"mean loss"},
}
"""Kinds that follow at once from others."""


def origins(found: Sequence[Difference]) -> list[Difference]:
    """The differences at the first step, without those that follow from others."""
    now = [each for each in found if each.step == found[0].step]
    kinds = {each.kind for each in now}
    return [each for each in now if kinds.isdisjoint(_FOLLOWS_FROM.get(each.kind, ()))]


def described(found: Sequence[Difference]) -> str:
    """The differences at the first step, as text."""
    return "; ".join(each.description for each in origins(found))


# --- What differs -----------------------------------------------------------------------------------------------------


def differences(
    reference: Recording, resumed: Recording, begin: int = 0, ignored: frozenset[str] = frozenset()
) -> list[Difference]:
    """The first difference of each kind between a run and the undisturbed run, in the order of their steps.

    `begin`: the result of `begins_at`; `ignored`: kinds that differ between two undisturbed runs.
    """
    found = []
    for name in _KINDS.keys() - ignored:
        kind = _KINDS[name]
        by_rank = {rank: _first_change(kind, reference.get(rank, ()), begin, lines) for rank, lines in resumed.items()}
        changes = {rank: change for rank, change in by_rank.items() if change is not None}
        if changes:
            earliest = min(changes.values(), key=lambda change: change.expected.step)
            step = earliest.expected.step
            ranks = tuple(rank for rank, change in changes.items() if change.expected.step == step)
            if len(ranks) == len(resumed):
                ranks = ()
            found.append(Difference(name, step, kind.sentence(earliest), ranks))
    return _in_order(found)


def _first_change(kind: _Kind, undisturbed: Sequence[Line], begin: int, lines: Sequence[Line]) -> _Change | None:
    """The first change of one kind on one rank."""
    pairs = list(zip(undisturbed[begin:], lines, strict=False))
    if pairs:
        pairs[0] = _without_skipped(*pairs[0])
    for pair, next_pair in zip(pairs, [*pairs[1:], *pairs[-1:]], strict=True):
        changed = kind.changed(*pair)
        if changed and kind.lasts:
            later = kind.changed(*next_pair)
            changed = {name: values for name, values in changed.items() if name in later}
        if changed:
            return _Change(changed, *pair, undisturbed)
    return None


def _without_skipped(expected: Line, line: Line) -> tuple[Line, Line]:
    """The first step of an attempt and the expected one, with the last batches that both have.

    A resumed script may first draw the batches that are done, draw one batch ahead, or make trial passes.
    """
    size = min(len(expected.batches), len(line.batches))
    losses = line.losses[-len(expected.losses) :]
    batches = line.batches[len(line.batches) - size :]
    expected_batches = expected.batches[len(expected.batches) - size :]
    return replace(expected, batches=expected_batches), replace(line, batches=batches, losses=losses)


def _in_order(found: Iterable[Difference]) -> list[Difference]:
    """Differences by step; at one step, those that cause others come first."""
    order = list(CAUSES)
    return sorted(found, key=lambda each: (each.step, order.index(each.kind)))


Noise = Mapping[str, set[str]]
"""Names of values that differ between two undisturbed runs, by the field of `Line`."""


def noise(first: Recording, second: Recording) -> Noise:
    """The random generators, buffers, copies, states and settings that differ between two undisturbed runs."""
    names: dict[str, set[str]] = {field: set() for field in ("random", "buffers", "copies", "state", "settings")}
    for rank, lines in first.items():
        for line, other in zip(lines, second.get(rank, ()), strict=False):
            for field, found in names.items():
                before = getattr(line, field)
                now = getattr(other, field)
                found.update(name for name in before if name in now and before[name] != now[name])
    return names


def without(recording: Recording, names: Noise) -> Recording:
    """A recording without the values with these names."""
    return {rank: [_line_without(line, names) for line in lines] for rank, lines in recording.items()}


def _line_without(line: Line, names: Noise) -> Line:
    values: dict[str, Any] = {
        field: {name: value for name, value in getattr(line, field).items() if name not in omitted}
        for field, omitted in names.items()
    }
    return replace(line, **values)


def compared_steps(reference: Recording, resumed: Recording, begin: int = 0) -> tuple[int, int] | None:
    """The first and the last step that both runs have; None: none."""
    counts = [min(len(lines), len(reference.get(rank, ())) - begin) for rank, lines in resumed.items()]
    count = min(counts, default=0)
    if count < 1:
        return None
    lines = reference[min(resumed)]
    return lines[begin].step, lines[begin + count - 1].step


def is_harmless(found: Sequence[Difference]) -> bool:
    """Whether only random states or the number of backward passes differ, so that neither has changed a weight.

    After a step that a gradient scaler skips, the next line has the passes of both.
    """
    return {each.kind for each in found} <= {"random", "passes"}


def repeated_epoch(run: Recording) -> Difference | None:
    """The first epoch for which a shuffling DistributedSampler gave the samples of the previous one, in this order."""
    for lines in run.values():
        epochs: list[tuple[int, int, list[str]]] = []  # the step at which an epoch begins, its number, its batches
        for line in lines:
            begins = {position: number for position, shuffles, number in line.epochs if shuffles}
            for position, (_, _, whole) in enumerate(line.batches):
                if position in begins:
                    epochs.append((line.step, begins[position], []))
                if epochs:
                    epochs[-1][2].append(whole)
        for (_, number, batches), (step, next_number, next_batches) in pairwise(epochs):
            size = min(len(batches), len(next_batches))
            if number == next_number and size > 1 and batches[:size] == next_batches[:size]:
                text = "the epoch that begins here has the samples of the previous one, in the same order"
                return Difference("epochs", step, text)
    return None


# --- Another number of ranks ------------------------------------------------------------------------------------------

LOSS_TOLERANCE = 1e-3
"""Relative difference of the mean loss that rounding at another number of ranks may cause within a rehearsal."""
NORM_TOLERANCE = 1e-4
"""Relative difference of the norm of the weights that it may cause."""


def begins_at_step(reference: Recording, resumed: Recording) -> int | None:
    """The step of the undisturbed run with which an attempt at another number of ranks begins, by the closest weights.

    The weights of rank 0 are bitwise identical if no rank holds a shard of them.
    """
    if not reference or not resumed.get(0):
        return None
    lines = reference[0]
    first = resumed[0][0]
    exact = [index for index, line in enumerate(lines) if line.weights == first.weights]
    by_count = [index for index, line in enumerate(lines) if first.count is not None and line.count == first.count]
    return min(exact or by_count, default=None)


def differences_in_total(reference: Recording, resumed: Recording, begin: int, noise: float = 0.0) -> list[Difference]:
    """The first difference of each kind over all ranks together, between runs at different numbers of ranks.

    Learning rates and the samples of each step must be equal; the mean loss and the norm of the weights within their
    tolerance, or within ten times the distance between two undisturbed runs (`noise`).
    """
    found: dict[str, Difference] = {}
    attempt = {rank: _without_first_skipped(lines) for rank, lines in resumed.items()}
    for expected, lines in zip(_by_line(reference, begin), _by_line(attempt), strict=False):
        for kind, text in _differences_in_step(expected, lines, noise):
            found.setdefault(kind, Difference(kind, expected[0].step, text))
    return _in_order(found.values())


def _differences_in_step(expected: Sequence[Line], lines: Sequence[Line], noise: float) -> Iterator[tuple[str, str]]:
    """Kind and text of each difference between the lines of all ranks in one step."""
    first = expected[0]
    line = lines[0]
    rates = first.settings.get("lr", ())
    rates_now = line.settings.get("lr", ())
    if rates != rates_now:
        yield "learning rate", f"learning rate {_change_text(rates, rates_now)}"
    if first.state and not line.state:
        yield "optimizer", f"the optimizer's state is empty ({', '.join(first.state)} missing)"
    batches = [batch for each in expected for batch in each.batches]
    batches_now = [batch for each in lines for batch in each.batches]
    size, hashes = _total(batches)
    size_now, hashes_now = _total(batches_now)
    if batches and batches_now and size != size_now:
        yield "global batch", f"the global batch has {size_now} samples instead of {size}"
    elif batches and batches_now and hashes != hashes_now:
        yield "samples", "the samples of all ranks together are other ones"
    loss = _mean_loss(expected)
    loss_now = _mean_loss(lines)
    if loss is not None and loss_now is not None and _distance(loss, loss_now) > max(LOSS_TOLERANCE, 10 * noise):
        yield "mean loss", f"mean loss {_change_text(loss, loss_now)}"
    same_size = first.numel == line.numel
    if same_size and _distance(first.norm, line.norm) > max(NORM_TOLERANCE, 10 * noise):
        yield "weights", f"the norm of the weights {_change_text(first.norm, line.norm)}"


def loss_distance(first: Recording, second: Recording) -> float:
    """The largest relative difference of the mean losses of two runs."""
    pairs = zip(_by_line(first), _by_line(second), strict=False)
    losses = [(_mean_loss(a), _mean_loss(b)) for a, b in pairs]
    return max((_distance(a, b) for a, b in losses if a is not None and b is not None), default=0.0)


def _by_line(recording: Recording, begin: int = 0) -> Iterator[tuple[Line, ...]]:
    """The lines of all ranks for each step."""
    return zip(*(lines[begin:] for lines in recording.values()), strict=False)


def _without_first_skipped(lines: list[Line]) -> list[Line]:
    """An attempt whose first line has no more batches and losses than the second one.

    A resumed script may first draw the batches that are done, draw one batch ahead, or make trial passes.
    """
    if len(lines) < 2:
        return lines
    first, second, *_ = lines
    batches = first.batches[-len(second.batches) :]
    return [replace(first, batches=batches, losses=first.losses[-len(second.losses) :]), *lines[1:]]


def _total(batches: Iterable[tuple[int, int, str]]) -> tuple[int, int]:
    """Number of samples in several batches, and the sum of their hashes."""
    numbers = [(size, hashes) for size, hashes, _ in batches]
    return sum(size for size, _ in numbers), sum(hashes for _, hashes in numbers) % 2**64


def _mean_loss(lines: Sequence[Line]) -> float | None:
    losses = [loss for line in lines for loss in line.losses]
    return sum(losses) / len(losses) if losses else None


def _distance(a: float, b: float) -> float:
    """The relative difference of two numbers. NaN is equal to NaN."""
    if isnan(a) or isnan(b):
        return float(isnan(a) != isnan(b))
    return abs(a - b) / max(abs(a), abs(b), 1e-12)


# --- When the script saves --------------------------------------------------------------------------------------------


def first_save(run: Recording) -> int | None:
    """The first step before which the script wrote a file, other than those that it writes in most steps, such as logs.

    None: it wrote none.
    """
    lines = [line for line in run.get(0, []) if line.optimizer == 0]
    counts = Counter(name for line in lines for name in line.files)
    logs = {name for name, count in counts.items() if count > len(lines) / 2}
    if counts.keys() == logs:
        logs = set()  # the script saves in each step
    return next((line.step - 1 for line in lines if line.step > 1 and set(line.files) - logs), None)
