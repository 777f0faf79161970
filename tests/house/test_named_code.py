"""The developers' pages name files, functions and classes that exist."""

import ast
import re
from collections.abc import Iterator
from functools import cache
from itertools import chain
from pathlib import Path

import pytest

from tests.support.launching import ROOT

PACKAGE = ROOT / "ddp_kit"
PAGES = (ROOT / "CONTRIBUTING.md", ROOT / "docs" / "processes.md")
PAGE = pytest.mark.parametrize("page", PAGES, ids=lambda path: path.name)

FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
SPAN = re.compile(r"`([^`\n]+)`")
FILE = re.compile(r"[\w./-]+\.py")
FOLDER = re.compile(r"[\w./-]+/")
PLACEHOLDER = "NAME"  # as in `clusters/NAME.py`
NAMES = r"`(?P<names>[\w.]+(?:`(?:,| and|, and) `[\w.]+)*)`"
OF_A_FILE = (  # a name with its file
    re.compile(NAMES + r",? (?:both )?(?:in|of) `(?P<file>[\w./-]+\.py)`"),
    re.compile(NAMES + r" \(`(?P<file>[\w./-]+\.py)`[,)]"),
    re.compile(r"`(?P<file>[\w./-]+\.py)`(?:, |: (?:its )?|, in [^`:|]+: )" + NAMES),
)
OWN = re.compile(r"_?[A-Z]\w*[a-z]\w*(\.\w+)?|[a-z]+_\w+|_\w+")  # a class, a method of a class, a function
OTHERS = {"DataLoader", "QueueFeederThread", "TCPStore"}  # of Python and torch
OTHERS |= {"gloo_tcp_loop", "pt_gloo_runloop", "pt_tcpstore_uv", "resource_tracker", "safe_load", "torch_shm_manager"}
OTHERS |= {"step_consensus"}  # a thread


def passages(page: Path) -> Iterator[str]:
    """Table rows, list items and paragraphs."""
    for paragraph in re.split(r"\n\s*\n", FENCED.sub("", page.read_text())):
        for passage in re.split(r"\n(?=\||- |\d+\. )", paragraph):
            yield " ".join(passage.split())


@cache
def defined(path: Path) -> frozenset[str]:
    """Functions, classes, attributes and constants of a file; methods and fields also as `Class.name`."""
    tree = ast.parse(path.read_text())
    names = names_in(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{name}" for name in names_in(node)}
    return frozenset(names)


def names_in(tree: ast.AST) -> set[str]:
    names = set()
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                names.add(name)
            case ast.Name(id=name, ctx=ast.Store()) | ast.Attribute(attr=name, ctx=ast.Store()):
                names.add(name)
    return names


@cache
def known() -> frozenset[str]:
    """What any file of the repository defines, and the names of its modules."""
    files = [path for folder in ("ddp_kit", "tests", "docs/tools") for path in (ROOT / folder).rglob("*.py")]
    return frozenset().union(*map(defined, files), (path.stem for path in files))


def files_of(passage: str) -> dict[str, Path | None]:
    """Path in code font -> file; a file without a folder is in a folder that the passage has named before."""
    folders, found = [PACKAGE, ROOT], dict[str, Path | None]()
    for span in SPAN.findall(passage):
        if PLACEHOLDER in span or not (FILE.fullmatch(span) or FOLDER.fullmatch(span)):
            continue
        path = next((folder / span for folder in reversed(folders) if (folder / span).exists()), None)
        found[span] = path
        if path is not None:
            folders.append(path if path.is_dir() else path.parent)
    return found


@PAGE
def test_files_that_a_page_names_exist(page: Path) -> None:
    found = {span: path for passage in passages(page) for span, path in files_of(passage).items()}
    assert len(found) > 20
    assert not [span for span, path in found.items() if path is None]


def named(match: re.Match[str]) -> list[str]:
    names = match["names"].replace(" and ", " ").replace("ddp_kit.", "")
    return [name for name in re.findall(r"[\w.]+", names) if not FILE.fullmatch(name)]


@PAGE
def test_names_that_a_page_finds_in_a_file_are_defined_there(page: Path) -> None:
    checked = 0
    missing = []
    for passage in passages(page):
        files = files_of(passage)
        for match in chain.from_iterable(pattern.finditer(passage) for pattern in OF_A_FILE):
            path = files.get(match["file"])
            if path is not None:
                checked += len(named(match))
                missing += [f"{name} in {match['file']}" for name in named(match) if name not in defined(path)]
    assert checked > 10
    assert not missing


@PAGE
def test_classes_and_functions_that_a_page_names_exist(page: Path) -> None:
    names = {span for passage in passages(page) for span in SPAN.findall(passage) if OWN.fullmatch(span)}
    assert len(names) > 20
    assert not sorted(names - known() - OTHERS)


def test_drawing_of_the_rooms_has_every_folder() -> None:
    drawing = PAGES[0].read_text().partition("```text\nddp_kit/\n")[2].partition("```")[0]
    folders = [path.parent.name for path in PACKAGE.rglob("__init__.py") if path.parent != PACKAGE]
    assert sorted(re.findall(r"[├└]─ (\w+)/", drawing)) == sorted(folders)
