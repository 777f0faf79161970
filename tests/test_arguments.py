"""The types of arguments: counts, seconds, durations and sizes."""

import math
from argparse import ArgumentTypeError
from collections.abc import Callable

import pytest

from ddp_kit.arguments import count, duration, seconds, size, whole_number


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (whole_number, "0", 0),
        (count, "12", 12),
        (seconds, "0", 0),
        (seconds, "1.5", 1.5),
        (duration, "90", 90),
        (duration, "90s", 90),
        (duration, "10m", 600),
        (duration, "1.5h", 5400),
        (duration, "2d", 172800),
        (duration, "01:30:00", 5400),
        (duration, "1-00:00:01", 86401),
        (size, "80GiB", 80 * 1024**3),
        (size, "80GB", 80 * 1000**3),
        (size, "80G", 80 * 1000**3),
        (size, "5kb", 5000),
        (size, "1.5 gib", 3 * 1024**3 // 2),
        (size, "512MiB", 512 * 1024**2),
        (size, "2Ti", 2 * 1024**4),
        (size, "85899345920", 85899345920),
        (size, "100B", 100),
    ],
)
def test_argument_is_read(parse: Callable[[str], float], text: str, value: float) -> None:
    assert parse(text) == value


@pytest.mark.parametrize(
    ("parse", "texts", "message"),
    [
        (whole_number, ["-1", "1.0", "", "one"], "is not a whole number of at least 0"),
        (count, ["0", "-1", "1.0", "many"], "is not a whole number of at least 1"),
        (seconds, ["-1", "soon", "", str(math.inf), str(math.nan)], "is not a valid number of seconds"),
        (duration, ["0", "0m", "-1m", "1w", "90 s", "", "1:30", "1-12", "00:00:00", "1e3"], "is not a time"),
        (size, ["eighty", "80GiBs", "-1GiB", "0GiB", "0.5", "GiB", "", "I"], "is not a size"),
    ],
)
def test_other_text_is_refused(parse: Callable[[str], float], texts: list[str], message: str) -> None:
    for text in texts:
        with pytest.raises(ArgumentTypeError, match=message):
            parse(text)
