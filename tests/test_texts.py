"""Values as text."""

import pytest

from ddp_kit.texts import clock, count_text, distinct_sizes, duration_text, plural


@pytest.mark.parametrize(
    ("sizes", "texts"),
    [
        ((3 << 30, 1 << 30), ("3.0 GiB", "1.0 GiB")),
        ((1 << 30, 1 << 30), ("1.0 GiB", "1.0 GiB")),
        (((1 << 30) + (1 << 25), 1 << 30), ("1.03 GiB", "1.00 GiB")),
        (((1 << 30) + (1 << 12), 1 << 30), ("1.000004 GiB", "1.000000 GiB")),
        (((1 << 30) + 1, 1 << 30), ("1,073,741,825 bytes", "1,073,741,824 bytes")),
        ((7, 8), ("7 bytes", "8 bytes")),
    ],
)
def test_distinct_sizes_have_as_many_decimals_as_show_the_difference(
    sizes: tuple[int, int], texts: tuple[str, str]
) -> None:
    assert distinct_sizes(*sizes) == texts


def test_plural_has_a_number_and_its_noun() -> None:
    assert (plural(1, "rank"), plural(2, "rank"), plural(0, "process", "processes")) == (
        "1 rank",
        "2 ranks",
        "0 processes",
    )


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (0.035, "35 ms"),
        (0.9999, "1 s"),
        (2.4, "2.4 s"),
        (59.7, "1 min 0 s"),
        (250, "4 min 10 s"),
        (3599.6, "1 h 0 min"),
        (11520, "3 h 12 min"),
        (190800, "2 d 5 h"),
    ],
)
def test_duration_text_has_at_most_two_units(seconds: float, text: str) -> None:
    assert duration_text(seconds) == text


def test_clock_has_hours_minutes_and_seconds() -> None:
    assert (clock(3.9), clock(3723), clock(360000)) == ("0:00:03", "1:02:03", "100:00:00")


def test_count_text_is_rounded_from_a_million_on() -> None:
    assert (count_text(812544), count_text(1_540_000), count_text(7 * 10**9)) == (
        "812,544",
        "1.54 million",
        "7 billion",
    )
