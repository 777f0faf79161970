"""Values as text, for messages and tables."""

from collections.abc import Sequence
from itertools import groupby


def first_line(error: Exception) -> str:
    """The name of an error's class and the first line of its message, as text."""
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def kind_of(value: object) -> str:
    """A description of a value by its type, for a message: `None`, `the class Linear`, `a list`, `an OrderedDict`."""
    if value is None:
        return "None"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    name = type(value).__name__
    vowels = "AEFHILMNORSX" if name[:2].isupper() else "AEIOUaeiou"  # "an SGD", because its letters are spelled out
    return f"a{'n' * name.startswith(tuple(vowels))} {name}"


def some(names: Sequence[str]) -> str:
    """The first five names, separated by commas, and the number of the remaining names, as in "a, b and 3 more"."""
    text = ", ".join(names[:5])
    if len(names) > 5:
        text += f" and {len(names) - 5} more"
    return text


def ranges(numbers: Sequence[int], separator: str = ",") -> str:
    """Ascending numbers as text, with ranges abbreviated, as in `0,2-7`."""
    runs = [[number for _, number in run] for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0])]
    return separator.join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table with aligned columns. The last column is not padded."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, [*widths[:-1], 0])) for row in rows]


def shortened(text: str, most: int) -> str:
    """The text if it has at most this many characters, else its beginning and `...`."""
    if len(text) <= most:
        return text
    return f"{text[: most - 3]}..."


# --- Sizes as text ----------------------------------------------------------------------------------------------------


MIB = 1024**2
GIB = 1024**3


def size_text(number: float, decimals: int = 1) -> str:
    """A number of bytes as text, in the largest unit that does not exceed it: `640 bytes`, `3.1 KiB`, `25.0 GiB`."""
    if number < 1024:
        return f"{number:.0f} bytes"
    for unit in ("KiB", "MiB"):
        number /= 1024
        if number < 1024:
            return f"{number:.{decimals}f} {unit}"
    return f"{number / 1024:,.{decimals}f} GiB"


def distinct_sizes(first: int, second: int) -> tuple[str, str]:
    """Two numbers of bytes as text, with as many decimals as show the difference; at least one.

    If the difference is less than a millionth of the largest unit, the texts are the numbers of bytes.
    """
    for decimals in range(1, 7):
        texts = size_text(first, decimals), size_text(second, decimals)
        if first == second or texts[0] != texts[1]:
            return texts
    return f"{first:,} bytes", f"{second:,} bytes"


def used_of(used: int, total: int) -> str:
    """Used and total memory in bytes as text: `1.5 of 80 GiB`."""
    return f"{used / GIB:.1f} of {total / GIB:.0f} GiB"


# --- Durations and numbers as text ------------------------------------------------------------------------------------


def duration_text(seconds: float) -> str:
    """A number of seconds as text: `35 ms`, `2.4 s`, `4 min 10 s`, `3 h 12 min`, `2 d 5 h`."""
    if 0 < seconds < 0.9995:
        return f"{seconds * 1000:.3g} ms"
    if seconds < 59.5:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s"
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min"
    days, hours = divmod(hours, 24)
    return f"{days} d {hours} h"


def clock(seconds: float) -> str:
    """A number of seconds as hours, minutes and seconds: `1:02:03`."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"


def count_text(number: int) -> str:
    """A large number as text, rounded if it is at least a million: `812,544`, `1.54 million`, `7 billion`."""
    for unit, name in ((1e9, "billion"), (1e6, "million")):
        if number >= unit:
            return f"{number / unit:.3g} {name}"
    return f"{number:,}"


def resuming_command(*, auto: bool) -> str:
    """The command that resumes a run. `auto`: whether `checkpoint.resume` is "auto"."""
    return "the same command" if auto else 'with checkpoint.resume="auto" the command'


def plural(number: int, noun: str, plural_noun: str = "") -> str:
    """A number and a noun: `1 rank`, `3 ranks`. `plural_noun`: the plural if it is not the noun and an `s`."""
    if number == 1:
        return f"{number} {noun}"
    return f"{number} {plural_noun or f'{noun}s'}"
