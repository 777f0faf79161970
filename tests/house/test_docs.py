"""What the documents say is done: their commands run, their scripts run, their links lead somewhere."""

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest

from ddp_kit.config.settings import TrainerConfig
from ddp_kit.devices.gpus import gpus
from ddp_kit.records import LogRow
from tests.support import launching

ROOT = launching.ROOT
DOCUMENTS = [
    path
    for path in sorted(ROOT.rglob("*.md"))
    if not any(part.startswith(".") for part in path.relative_to(ROOT).parts)
]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
SCRIPTS = "scripts"  # a folder with the scripts of the documents alone
SCRIPT_NAME = re.compile(r"# ([\w/]+\.py)\n")


@dataclass(frozen=True)
class Command:
    document: Path
    line: str

    @property
    def needs_gpus(self) -> bool:
        return "--gpus" in self.line.split() and " plan " not in self.line

    def __str__(self) -> str:
        return f"{self.document.relative_to(ROOT)}: {self.line}"


def blocks(document: Path, language: str) -> Iterator[str]:
    yield from (text for found, text in BLOCK.findall(document.read_text()) if found == language)


def commands() -> list[Command]:
    """The lines of `bash` blocks. What a test of its own runs, such as the recipes, is in `sh` blocks."""
    lines = [
        Command(document, line.split("  #")[0].strip())
        for document in DOCUMENTS
        for block in blocks(document, "bash")
        for line in block.splitlines()
    ]
    return list({command.line: command for command in lines if command.line}.values())


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project's files and the scripts of its documents, where commands may write."""
    return copied(tmp_path_factory.mktemp("clone"))


def copied(folder: Path) -> Path:
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in listed.stdout.splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    for document in DOCUMENTS:
        for block in blocks(document, "python"):
            name = SCRIPT_NAME.match(block)
            assert name, f"a python block in {document.name} does not begin with its file's name"
            for place in (folder, folder / SCRIPTS):
                (place / name[1]).parent.mkdir(parents=True, exist_ok=True)
                (place / name[1]).write_text(block)
    return folder


def by_document() -> list[Any]:
    """The commands of each document, in order: later ones use what earlier ones wrote."""
    found: dict[Path, list[Command]] = {}
    for command in commands():
        found.setdefault(command.document, []).append(command)
    return [pytest.param(its, id=str(document.relative_to(ROOT))) for document, its in found.items()]


def run(command: Command, clone: Path) -> None:
    words = command.line.split()
    folder = clone
    if words[:2] == ["make", "demo"]:
        folder = ROOT  # it makes its environment next to the Makefile
        if Path(sys.prefix) != ROOT / ".venv":
            return  # needs to run in the environment that the Makefile makes
    elif words[0] == "make":
        words.insert(1, "--dry-run")  # these are what is running this test
    elif words[1:2] == ["rehearse"]:
        folder = clone / SCRIPTS  # next to a package called ddp_kit, workers are not forked
    elif words[:2] == ["pip", "install"]:
        words.insert(2, "--dry-run")  # the tests' own environment stays as it is
    done = started(words, folder)
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    if words[:2] == ["make", "demo"]:
        assert "test accuracy" in done.stdout


def started(words: list[str], folder: Path) -> "subprocess.CompletedProcess[str]":
    return launching.run(*words, cwd=folder, env={"PATH": f"{launching.BIN}:{os.environ['PATH']}"}, timeout=280)


@pytest.mark.slow
@pytest.mark.parametrize("its", by_document())
def test_documented_commands_run(its: list[Command], clone: Path) -> None:
    for command in its:
        if not command.needs_gpus:
            run(command, clone)


@pytest.mark.slow
@pytest.mark.parametrize("command", [each for each in commands() if each.needs_gpus], ids=str)
def test_documented_commands_for_gpus_run(command: Command, clone: Path) -> None:
    if not gpus():
        pytest.skip("needs GPUs; there are none on this machine")
    run(command, clone)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_in_documents_lead_to_files(document: Path) -> None:
    words = re.sub(r"^```.*?^```$|`[^`\n]+`", "", document.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)#]+)", words):
        if "://" not in target:
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_table_of_log_rows_has_every_field() -> None:
    table = (ROOT / "docs" / "evaluation.md").read_text().partition("| `LogRow` |")[2].partition("\n\n")[0]
    listed = [
        name for line in table.splitlines() for name in re.findall(r"`(\w+)`", line.partition("|")[2].partition("|")[0])
    ]
    assert sorted(listed) == sorted(each.name for each in fields(LogRow))


FIGURES = {  # row of README.md -> beginnings of the rows of RESULTS.md that have its figures
    "first launch": ("first all_reduce, s | 8 |",),
    "second launch": ("torch | first all_reduce, s |",),
    "restart": ("restart, s | 8 |",),
    "a small step": ("step, ms | tiny MLP | 1 | 1 |",),
    "a step on a GPU": ("train | GPT, 1 rank, by hand", "| GPT, 1 rank,"),
    "a save": ("| 2000 MB, ddpkit", "| 2000 MB, torch.save"),
}


def test_measured_figures_of_the_readme_are_those_of_the_results() -> None:
    text = re.sub(" +", " ", (ROOT / "benchmarks" / "RESULTS.md").read_text())
    table = (ROOT / "README.md").read_text().partition("| measured |")[2].partition("\n\n")[0].splitlines()[2:]
    assert len(table) == len(FIGURES)
    for line, (label, beginnings) in zip(table, FIGURES.items(), strict=True):
        assert line.startswith(f"| {label}")
        measured = [row for row in text.splitlines() if row.startswith(tuple(f"| {each}" for each in beginnings))]
        figures = re.findall(r"\d+\.\d+|\d+ to \d+", line)
        assert len(figures) > 1
        assert not set(figures) - set(re.findall(r"\d+\.\d+|\d+ to \d+", " ".join(measured))), line


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_python_blocks_that_are_only_shown_are_valid(document: Path) -> None:
    """A block of ```py is not run: code for other libraries, or a part of a script."""
    for block in blocks(document, "py"):
        ast.parse(block)


def test_table_of_settings_names_every_setting() -> None:
    table = (ROOT / "docs" / "configuration.md").read_text()
    for name in TrainerConfig.model_fields:
        assert f"`{name}`" in table, f"docs/configuration.md does not have {name}"


def test_dependency_table_has_every_dependency() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    listed = re.search(r"^dependencies = \[(.*?)\]", text, re.MULTILINE | re.DOTALL)
    assert listed
    contributing = (ROOT / "CONTRIBUTING.md").read_text()
    for name in re.findall(r'"([\w-]+)', listed[1]):
        assert f"| {name} |" in contributing
