"""Sets of times: sorted spans (start, end) that do not overlap, in any one unit."""

from collections.abc import Iterable

Spans = list[tuple[float, float]]


def merged(spans: Iterable[tuple[float, float]]) -> Spans:
    """The union of spans in any order."""
    found: Spans = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            if end > found[-1][1]:
                found[-1] = (found[-1][0], end)
        elif end > start:
            found.append((start, end))
    return found


def common(one: Spans, other: Spans) -> Spans:
    """The times in both."""
    found: Spans = []
    i = j = 0
    while i < len(one) and j < len(other):
        start, end = max(one[i][0], other[j][0]), min(one[i][1], other[j][1])
        if start < end:
            found.append((start, end))
        if one[i][1] < other[j][1]:
            i += 1
        else:
            j += 1
    return found


def gaps(spans: Spans, start: float, end: float) -> Spans:
    """The times between `start` and `end` that are in none of the spans."""
    found: Spans = []
    for begin, stop in [*spans, (end, end)]:
        if min(begin, end) > start:
            found.append((start, min(begin, end)))
        start = max(start, stop)
    return found


def total(spans: Spans) -> float:
    """How long they are together."""
    return sum(end - start for start, end in spans)
