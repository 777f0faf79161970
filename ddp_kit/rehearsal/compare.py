"""Comparison of recordings: where a resumed attempt begins in the undisturbed run, and what differs from which step on.

Pure functions over the lines of `lines.py`.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
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
        return f"{self.text} (rank{'s' * (len(self.ranks) > 1)} {', '.join(map(str, self.ranks))})"


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

    def score(index: int) -> tuple[int, int]:
        """How much evidence besides the weights there is for a line; of several, the latest one counts."""
        return sum(index in matching for name, matching in evidence.items() if name != "weights"), index

    matching = evidence["weights"] or evidence["optimizer"] or {index for found in evidence.values() for index in found}
    best = max(matching, key=score, default=None)
    if best is None or not evidence["weights"]:
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
        first = value(lines[0]) if lines else None
        if first:
            votes.update(index for index, line in enumerate(reference.get(rank, ())) if value(line) == first)
    most = max(votes.values(), default=0)
    return {index for index, count in votes.items() if count == most}


# --- What differs -----------------------------------------------------------------------------------------------------


def differences(
    reference: Recording, resumed: Recording, begin: int = 0, ignored: frozenset[str] = frozenset()
) -> list[Difference]:
    """The first difference of each kind between a run and the undisturbed run, in the order of their steps.

    `begin`: the result of `begins_at`; `ignored`: kinds that differ between two undisturbed runs.
    """
    found: dict[str, Difference] = {}
    for rank, lines in resumed.items():
        expected = reference.get(rank, [])
        for index in range(begin, min(len(expected), begin + len(lines))):
            pair, step = _Pair(expected, index, lines, index - begin), expected[index].step
            for kind in _KINDS.keys() - ignored:
                if not (text := _KINDS[kind](pair)):
                    continue
                earlier = found.get(kind)
                if earlier is None or step < earlier.step:
                    found[kind] = Difference(kind, step, text, (rank,))
                elif step == earlier.step and rank not in earlier.ranks:
                    found[kind] = replace(earlier, ranks=(*earlier.ranks, rank))
    everyone = tuple(sorted(resumed))
    return _in_order(replace(each, ranks=() if each.ranks == everyone else each.ranks) for each in found.values())


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
                before, now = getattr(line, field), getattr(other, field)
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


@dataclass(frozen=True)
class _Pair:
    """A line of a run, and the line of the undisturbed run that it should be equal to."""

    expected_lines: Sequence[Line]
    index: int
    lines: Sequence[Line]
    """The lines of the attempt."""
    number: int = 0
    """Index of the line in the attempt."""

    @property
    def expected(self) -> Line:
        return self.expected_lines[self.index]

    @property
    def line(self) -> Line:
        return self.lines[self.number]


def _weights(pair: _Pair) -> str:
    before, now = pair.expected.weights, pair.line.weights
    if before == now:
        return ""
    for line in pair.expected_lines:
        if line.weights == now and line.optimizer == pair.expected.optimizer:
            return f"the weights are those of step {line.step}" if line.step > 1 else "the weights are the initial ones"
    names = next((line.parameters for line in pair.expected_lines if line.optimizer == pair.expected.optimizer), ())
    numbers = [number for number, (a, b) in enumerate(zip(before, now, strict=False)) if a != b]
    first = names[numbers[0]] if numbers and numbers[0] < len(names) else ""
    if len(before) != len(now) or not numbers:
        return f"the optimizer has {len(now)} tensors instead of {len(before)}"
    return f"the weights: {len(numbers)} of {len(now)} tensors" + (f", first {first}" if first else "")


def _optimizer(pair: _Pair) -> str:
    before, now = pair.expected.state, pair.line.state
    if before == now:
        return ""
    if not now:
        return f"the optimizer's state is empty ({', '.join(before)} missing)"
    names = [name for name in {**before, **now} if before.get(name) != now.get(name)]
    return f"the optimizer's state ({', '.join(names)})"


def _changes(before: Sequence[float], now: Sequence[float]) -> str:
    a, b = next(((a, b) for a, b in zip(before, now, strict=False) if a != b), (len(before), len(now)))
    short_a, short_b = f"{a:g}", f"{b:g}"
    return f"{short_a} -> {short_b}" if short_a != short_b else f"{a!r} -> {b!r}"


def _learning_rate(pair: _Pair) -> str:
    before, now = pair.expected.settings.get("lr", ()), pair.line.settings.get("lr", ())
    return f"learning rate {_changes(before, now)}" if before != now else ""


def _settings(pair: _Pair) -> str:
    before, now = pair.expected.settings, pair.line.settings
    texts = [
        f"{name} {_changes(before.get(name, ()), now.get(name, ()))}"
        for name in {**before, **now}
        if name not in ("lr", "initial_lr") and before.get(name) != now.get(name)
    ]
    return ", ".join(texts)


def _scaler(pair: _Pair) -> str:
    for before, now in zip(pair.expected.scalers, pair.line.scalers, strict=False):
        for name in before:
            if before[name] != now.get(name):
                what = name.strip("_").replace("_", " ")
                return f"gradient scaler: {what} {_changes([before[name]], [now.get(name, 0.0)])}"
    return ""


def _passes(pair: _Pair) -> str:
    before, now = len(pair.expected.losses), len(_losses(pair))
    return f"backward passes per step {before} -> {now}" if before != now else ""


def _losses(pair: _Pair) -> Sequence[float]:
    """The losses of an attempt's step, without those of trial passes that a script makes when it starts."""
    count = len(pair.expected.losses)
    return pair.line.losses[-count:] if pair.number == 0 and count else pair.line.losses


def _samples(pair: _Pair) -> str:
    before = [whole for _, _, whole in pair.expected.batches]
    now = [whole for _, _, whole in pair.line.batches]
    if pair.number == 0:
        # A resumed script may first draw the batches that are done, or one batch ahead.
        size = min(len(before), len(now))
        before, now = before[len(before) - size :], now[len(now) - size :]
    if before == now:
        return ""
    for line in pair.expected_lines:
        if now and now[0] in [whole for _, _, whole in line.batches] and line.step != pair.expected.step:
            if line.step == 1:
                return "the samples start again, with those of step 1"
            return f"the samples are those of step {line.step}" + ", where the epoch begins" * bool(line.epochs)
    if len(before) != len(now):
        return f"batches per step {len(before)} -> {len(now)}"
    return "the samples are other ones"


def _random(pair: _Pair) -> str:
    before, now = pair.expected.random, pair.line.random
    names = [name for name in before if name in now and before[name] != now[name]]
    return f"the random state of {' and '.join(names)}" if names else ""


def _named(before: Mapping[str, Sequence[str]], now: Mapping[str, Sequence[str]]) -> list[str]:
    """Names of the tensors that both runs have, with other values."""
    return [name for name in before if name in now and Counter(before[name]) - Counter(now[name])]


def _buffers(pair: _Pair) -> str:
    names = _named(pair.expected.buffers, pair.line.buffers)
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    return f"buffer{'s' * (len(names) > 1)} {names[0]}{more}" if names else ""


def _copies(pair: _Pair) -> str:
    # A dict that is there for a moment, such as a checkpoint that was loaded, is not a part of the run.
    both = list(zip(pair.expected_lines[pair.index :], pair.lines[pair.number :], strict=False))[:2]
    differing = [set(_named(expected.copies, line.copies)) for expected, line in both]
    names = [name for name in pair.expected.copies if all(name in each for each in differing)]
    if not names:
        return ""
    more = f" and {len(names) - 1} more tensors" if len(names) > 1 else ""
    return f"copy of the model: {names[0]}{more}"


def _loss(pair: _Pair) -> str:
    before, now = pair.expected.losses, _losses(pair)
    if len(before) != len(now) or all(a == b or (a != a and b != b) for a, b in zip(before, now, strict=True)):
        return ""
    return f"loss {_changes(before, now)}"


_KINDS: Mapping[str, Callable[[_Pair], str]] = {
    "weights": _weights,
    "optimizer": _optimizer,
    "learning rate": _learning_rate,
    "settings": _settings,
    "scaler": _scaler,
    "passes": _passes,
    "samples": _samples,
    "random": _random,
    "buffers": _buffers,
    "copies": _copies,
    "loss": _loss,
}


_FOLLOWS_FROM = {
    "samples": {"passes"},
    "random": {"passes"},
    "buffers": {"weights", "passes", "samples", "random"},
    "copies": {"weights"},
    "loss": set(CAUSES) - {"loss"},
    "mean loss": set(CAUSES) - {"mean loss"},
}
"""Kinds that follow at once from others."""


def origins(found: Sequence[Difference]) -> list[Difference]:
    """The differences at the first step, without those that follow from others."""
    now = [each for each in found if each.step == found[0].step]
    kinds = {each.kind for each in now}
    return [each for each in now if not _FOLLOWS_FROM.get(each.kind, set()) & kinds]


def described(found: Sequence[Difference]) -> str:
    """The differences at the first step, as text."""
    return "; ".join(each.description for each in origins(found))


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
    lines, first = reference[0], resumed[0][0]
    exact = [index for index, line in enumerate(lines) if line.weights == first.weights]
    if exact:
        return exact[0]
    by_count = [index for index, line in enumerate(lines) if first.count is not None and line.count == first.count]
    return by_count[0] if by_count else None


def differences_in_total(reference: Recording, resumed: Recording, begin: int, noise: float = 0.0) -> list[Difference]:
    """The first difference of each kind over all ranks together, between runs at different numbers of ranks.

    Learning rates and the samples of each step must be equal; the mean loss and the norm of the weights within their
    tolerance, or within ten times the distance between two undisturbed runs (`noise`).
    """
    found: dict[str, Difference] = {}
    for expected, lines in zip(_by_line(reference, begin), _by_line(_without_skipped(resumed)), strict=False):
        first, line = expected[0], lines[0]
        texts = {
            "learning rate": _learning_rate(_Pair([first], 0, [line])),
            "optimizer": f"the optimizer's state is empty ({', '.join(first.state)} missing)"
            if first.state and not line.state
            else "",
            **_samples_in_total(expected, lines),
        }
        before, now = _mean_loss(expected), _mean_loss(lines)
        if before is not None and now is not None and _distance(before, now) > max(LOSS_TOLERANCE, 10 * noise):
            texts["mean loss"] = f"mean loss {_changes([before], [now])}"
        same_size = first.numel == line.numel
        if same_size and _distance(first.norm, line.norm) > max(NORM_TOLERANCE, 10 * noise):
            texts["weights"] = f"the norm of the weights {_changes([first.norm], [line.norm])}"
        for kind, text in texts.items():
            if text and kind not in found:
                found[kind] = Difference(kind, first.step, text)
    return _in_order(found.values())


def loss_distance(first: Recording, second: Recording) -> float:
    """The largest relative difference of the mean losses of two runs."""
    pairs = zip(_by_line(first), _by_line(second), strict=False)
    losses = [(_mean_loss(a), _mean_loss(b)) for a, b in pairs]
    return max((_distance(a, b) for a, b in losses if a is not None and b is not None), default=0.0)


def _by_line(recording: Recording, begin: int = 0) -> Iterator[list[Line]]:
    """The lines of all ranks for each step."""
    for lines in zip(*(lines[begin:] for lines in recording.values()), strict=False):
        yield list(lines)


def _without_skipped(resumed: Recording) -> Recording:
    """An attempt whose first lines have no more batches and losses than the second ones.

    A resumed script may first draw the batches that are done, draw one batch ahead, or make trial passes.
    """
    return {
        rank: [
            replace(
                lines[0],
                batches=lines[0].batches[-len(lines[1].batches) :] if lines[1].batches else lines[0].batches,
                losses=lines[0].losses[-len(lines[1].losses) :],
            ),
            *lines[1:],
        ]
        if len(lines) > 1
        else lines
        for rank, lines in resumed.items()
    }


def _samples_in_total(expected: Sequence[Line], lines: Sequence[Line]) -> dict[str, str]:
    """The difference between the samples of a step over all ranks."""
    batches, expected_batches = ([batch for line in each for batch in line.batches] for each in (lines, expected))
    if not batches or not expected_batches:
        return {}
    size, expected_size = (sum(number for number, _, _ in each) for each in (batches, expected_batches))
    if size != expected_size:
        return {"global batch": f"the global batch has {size} samples instead of {expected_size}"}
    total, expected_total = (sum(hashes for _, hashes, _ in each) % 2**64 for each in (batches, expected_batches))
    return {} if total == expected_total else {"samples": "the samples of all ranks together are other ones"}


def _mean_loss(lines: Sequence[Line]) -> float | None:
    losses = [loss for line in lines for loss in line.losses]
    return sum(losses) / len(losses) if losses else None


def _distance(a: float, b: float) -> float:
    return abs(a - b) / max(abs(a), abs(b), 1e-12) if a == a and b == b else float(a == a or b == b)


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
