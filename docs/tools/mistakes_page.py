"""Write the tables of docs/mistakes.md from tests/programs/mistakes.py, whose messages the tests compare."""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from tests.programs.mistakes import TABLE, Mistake  # noqa: E402

DOCUMENT = ROOT / "docs" / "mistakes.md"
CODE = re.compile(r"[=\"'(]|__|--|\.\w|^ddpkit")  # a mistake with one of these is code, not a description


def code(text: str) -> str:
    """Text in code font; empty for no text."""
    if "`" in text:
        return f"`` {text} ``"
    return f"`{text}`" if text else ""


def row(mistake: Mistake) -> str:
    what = code(mistake.what) if CODE.search(mistake.what) else mistake.what
    return f"| {what} | {code(mistake.message)} | {code(mistake.hint)} |"


def updated(text: str) -> str:
    """The document with the table of each heading as it should be."""
    for heading, mistakes in TABLE.items():
        before, found, rest = text.partition(f"\n## {heading}\n\n")
        after = rest.partition("\n\n")[2]
        assert found, f"docs/mistakes.md has no heading {heading!r}"
        table = "\n".join(["| mistake | message | hint |", "|---|---|---|", *map(row, mistakes)])
        text = f"{before}{found}{table}\n\n{after}"
    return text


if __name__ == "__main__":
    DOCUMENT.write_text(updated(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
