"""docs/clusters.md: every cell of the table of outcomes names a test that exists."""

import ast

import pytest

from tests.support.launching import ROOT

PAGE = (ROOT / "docs" / "clusters.md").read_text()


def table(heading: str) -> tuple[list[str], list[list[str]]]:
    """The header and the rows of the table whose header begins with `heading`."""
    first = PAGE.index(f"\n{heading}") + 1
    lines = PAGE[first:].partition("\n\n")[0].splitlines()
    header, _, *rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return header, rows


(_, *ENGINES), OUTCOMES = table("| | Slurm |")
TESTS = {outcome: test.strip("`") for outcome, test in table("| outcome | test")[1]}
FILES = {engine: file.strip("`") for engine, file, _ in table("| engine | file")[1]}


def test_tables_of_outcomes_have_every_outcome_and_engine() -> None:
    assert list(TESTS) == [outcome for outcome, *_ in OUTCOMES]
    assert list(FILES) == ENGINES
    assert all(len(cells) == len(ENGINES) for _, *cells in OUTCOMES)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("outcome", TESTS)
def test_cell_of_the_table_of_outcomes_names_a_test(outcome: str, engine: str) -> None:
    source = (ROOT / "tests" / "rigs" / FILES[engine]).read_text()
    tests = {each.name for each in ast.parse(source).body if isinstance(each, ast.FunctionDef)}
    assert TESTS[outcome] in tests
    engines = {each.value for each in ast.walk(ast.parse(source)) if isinstance(each, ast.Constant)}
    submitted = set(engine.lower().split(", ")) <= engines
    assert submitted, f"{FILES[engine]} does not submit with --on {engine.lower()}"
