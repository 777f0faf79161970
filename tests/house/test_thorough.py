"""The two tables of tests: the parts of `make thorough`, and the launches of `make test`."""

from pathlib import Path

from tests import gate, thorough

TESTS = Path(__file__).parents[1]


def test_every_test_file_belongs_to_a_part_of_make_thorough() -> None:
    files = thorough.test_files()
    assert "cli/test_cli.py" in files
    assert not [file for file in files if thorough.part_of(file) is None]
    assert {thorough.part_of(file) for file in files} == set(thorough.PARTS)


def test_every_launch_of_make_test_is_in_a_file_that_exists() -> None:
    """Whether the file has the test is checked in conftest.py, where the tests are collected."""
    assert not [entry for entry in gate.entries() if not (TESTS / entry.partition("::")[0]).is_file()]
