"""Numbers of bytes as text, for the launcher and the Trainer."""

GIB = 1024**3


def size_text(number: float, decimals: int = 1) -> str:
    """A number of bytes in the largest unit that it has one of: `640 bytes`, `3.1 KiB`, `25.0 GiB`."""
    for unit in ("bytes", "KiB", "MiB"):
        if number < 1024:
            return f"{number:.0f} bytes" if unit == "bytes" else f"{number:.{decimals}f} {unit}"
        number /= 1024
    return f"{number:,.{decimals}f} GiB"
