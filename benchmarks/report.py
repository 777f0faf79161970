"""What the benchmarks share: the machine in words, a table, and its place in RESULTS.md."""

import os
import platform
import re
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

RESULTS = Path(__file__).with_name("RESULTS.md")


def installed(package: str) -> str:
    """Its version, or '' where it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def machine(packages: Iterable[str]) -> str:
    """The processor and the versions, in one line; packages that are not installed are left out."""
    found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    cores = len(os.sched_getaffinity(0))
    words = [found[1] if found else platform.machine(), f"{cores} core{'s' * (cores != 1)}"]
    words.append(f"Python {platform.python_version()}")
    words.extend(f"{package} {installed(package)}" for package in packages if installed(package))
    return ", ".join(words)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table whose columns also line up as plain text."""
    lines = [list(header), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    lines.insert(1, ["-" * width for width in widths])
    padded = ([word.ljust(width) for word, width in zip(line, widths, strict=True)] for line in lines)
    return "\n".join(f"| {' | '.join(line)} |" for line in padded)


def write_section(name: str, text: str, path: Path = RESULTS) -> None:
    """Put `text` between the marks `<!-- NAME:begin -->` and `<!-- NAME:end -->`; at the end where there are none."""
    begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
    before = path.read_text() if path.exists() else "# Results\n"
    section = f"{begin}\n{text.strip()}\n{end}"
    marked = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
    if marked.search(before):
        path.write_text(marked.sub(lambda _: section, before))
    else:
        path.write_text(f"{before.rstrip()}\n\n{section}\n")
