"""Rows of later steps are removed from the end of a file, without reading the rest of it."""

import json
import tracemalloc
from pathlib import Path

import pytest

from ddp_kit import JSONLinesLogger
from ddp_kit.callbacks import rows
from ddp_kit.callbacks.rows import drop_torn_row, lines_backwards


def write(path: Path, steps: list[int], *, padding: int = 100) -> list[str]:
    lines = [json.dumps({"event": "train", "step": step, "text": "x" * padding}) + "\n" for step in steps]
    path.write_text("".join(lines))
    return lines


@pytest.mark.parametrize("block", [1, 7, 64, 1 << 16])
def test_lines_of_a_file_are_read_backwards(block: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "_BLOCK", block)
    content = b"first\n\nsecond line\r\nthird\n torn"
    path = tmp_path / "lines"
    path.write_bytes(content)
    lines = content.splitlines(keepends=True)
    found = [*lines_backwards(path)]
    assert [line for _, line in found] == lines[::-1]
    assert all(content[position:].startswith(line) for position, line in found)
    assert [line for _, line in lines_backwards(path, len(lines[0]))] == lines[:0:-1]
    assert [*lines_backwards(path, len(content))] == []
    drop_torn_row(path)
    assert path.read_bytes() == content.removesuffix(b" torn")


@pytest.mark.parametrize("step", [0, 4, 5, 499, 500])
def test_rows_of_later_steps_are_removed(step: int, tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    lines = write(path, [*range(1, 501)])
    logger = JSONLinesLogger(path)
    logger.load_state_dict({"path": str(path), "begins": 0})
    logger.truncate_after(step)
    assert path.read_text() == "".join(lines[:step])
    assert [*tmp_path.iterdir()] == [path]


def test_row_that_was_written_after_those_of_later_steps_stays(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    lines = write(path, [1, 2, 3, 7, 4, 8, 5, 9])
    logger = JSONLinesLogger(path)
    logger.load_state_dict({"path": str(path), "begins": 0})
    logger.truncate_after(5)
    assert path.read_text() == "".join(lines[index] for index in (0, 1, 2, 4, 6))


def test_rows_of_earlier_runs_and_lines_that_are_no_rows_stay(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    lines = write(path, [7, 8, 9, 1, 2, 3])
    lines[4] = "damaged \xff\n"
    path.write_bytes("".join(lines).encode("latin-1"))
    logger = JSONLinesLogger(path)
    logger.load_state_dict({"path": str(path), "begins": 3})
    logger.truncate_after(0)
    assert path.read_bytes() == "".join([*lines[:3], lines[4]]).encode("latin-1")


def test_resume_reads_no_more_of_a_longer_file(tmp_path: Path) -> None:
    assert max(_parsed_and_memory(tmp_path, count)[0] for count in (1_000, 16_000)) <= 110
    assert _parsed_and_memory(tmp_path, 16_000)[1] < 1e6


def _parsed_and_memory(folder: Path, count: int) -> tuple[int, int]:
    """The lines that are parsed when the last three of `count` rows are removed, and the peak of the memory."""
    path = folder / f"{count}.jsonl"
    write(path, [*range(1, count + 1)])
    parsed = []

    class Counting(JSONLinesLogger):
        def step_of(self, line: str) -> int:
            parsed.append(line)
            return super().step_of(line)

    logger = Counting(path)
    logger.load_state_dict({"path": str(path), "begins": 0})
    tracemalloc.start()
    try:
        logger.truncate_after(count - 3)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    with path.open() as file:
        assert sum(1 for _ in file) == count - 3
    return len(parsed), peak
