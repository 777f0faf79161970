"""Values as text, for messages and tables."""

from collections.abc import Sequence


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
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


# --- Sizes as text ----------------------------------------------------------------------------------------------------


GIB = 1024**3


def size_text(number: float, decimals: int = 1) -> str:
    """A number of bytes as text, in the largest unit that does not exceed it: `640 bytes`, `3.1 KiB`, `25.0 GiB`."""
    for unit in ("bytes", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.0f} bytes" if unit == "bytes" else f"{number:.{decimals}f} {unit}"
        number /= 1024
    return f"{number:,.{decimals}f} GiB"


def distinct_sizes(first: int, second: int) -> tuple[str, str]:
    """Two numbers of bytes as text, with as many decimals as show the difference; at least one.

    If the difference is less than a millionth of the largest unit, the texts are the numbers of bytes.
    """
    for decimals in range(1, 7):
        texts = size_text(first, decimals), size_text(second, decimals)
        if first == second or texts[0] != texts[1]:
            return texts
    return f"{first:,} bytes", f"{second:,} bytes"


def plural(number: int, noun: str, plural_noun: str = "") -> str:
    """A number and a noun: `1 rank`, `3 ranks`. `plural_noun`: the plural if it is not the noun and an `s`."""
    return f"{number} {noun if number == 1 else plural_noun or f'{noun}s'}"
