"""Values as text."""

import pytest

from ddp_kit.texts import distinct_sizes, plural


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
