"""The reference pages say what the code says: names, settings, exit codes, variables, messages."""

import ast
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from textwrap import indent

import pytest

import ddp_kit
from ddp_kit import env
from ddp_kit.exit_codes import ExitCode
from ddp_kit.launcher import diagnosis
from tests.support.launching import ROOT, tool

DOCS = ROOT / "docs"


def test_api_reference_is_what_its_program_writes() -> None:
    text = (DOCS / "reference" / "api.md").read_text()
    assert tool("api").page() == text, "run `make docs`, or docs/tools/api.py, which writes the page"


def test_api_reference_lists_every_public_name_and_every_event() -> None:
    text = (DOCS / "reference" / "api.md").read_text()
    listed = re.findall(r"^### (\w+)$", text, re.MULTILINE)
    assert sorted(listed) == sorted(set(ddp_kit.__all__) - {"__version__"})
    events = [name for name in vars(ddp_kit.Callback) if name.startswith("on_")]
    assert re.findall(r"^#### Callback\.(on_\w+)$", text, re.MULTILINE) == events


def test_api_reference_with_a_public_name_without_a_section_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    api = tool("api")
    monkeypatch.setitem(api.SECTIONS, "Errors", ())
    with pytest.raises(ValueError, match="CheckpointError, ConfigError"):
        api.page()


def test_api_reference_of_a_docstring_with_an_unknown_argument_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(ROOT / "ddp_kit", tmp_path / "ddp_kit", ignore=shutil.ignore_patterns("__pycache__"))
    trainer = tmp_path / "ddp_kit" / "trainer" / "trainer.py"
    trainer.write_text(
        trainer.read_text().replace("            predict_fn: A function", "            predict: A function")
    )
    api = tool("api")
    monkeypatch.setattr(api, "ROOT", tmp_path)
    with pytest.raises(ValueError, match="Parameter 'predict' does not appear"):
        api.page()


def test_tables_of_settings_equal_the_configuration() -> None:
    text = (DOCS / "configuration.md").read_text()
    assert tool("settings").updated(text) == text, "run `make docs`, which writes the tables"


def test_table_of_recipes_has_their_line_counts() -> None:
    text = (DOCS / "recipes.md").read_text()
    assert tool("recipes").updated(text) == text, "run `make docs`, which writes the table"


def test_recipes_page_shows_code_of_the_recipes() -> None:
    recipes = [path.read_text() for path in (ROOT / "examples" / "recipes").glob("*.py")]
    shown = re.findall(r"^```py\n(.*?)^```$", (DOCS / "recipes.md").read_text(), re.MULTILINE | re.DOTALL)
    assert len(shown) > 8
    for block in shown:
        assert any(block in text or indent(block, "    ") in text for text in recipes), block


def test_tables_of_mistakes_are_those_of_the_tests() -> None:
    text = (DOCS / "mistakes.md").read_text()
    assert tool("mistakes_page").updated(text) == text, "run `make docs`, which writes the tables"


def test_types_of_settings_equal_the_configuration() -> None:
    text = (ROOT / "ddp_kit" / "config" / "types.py").read_text()
    assert tool("settings").types() == text, "run `make docs`, which writes config/types.py"


def test_exit_code_page_lists_the_exit_codes() -> None:
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \|", (DOCS / "reference" / "exit-codes.md").read_text(), re.MULTILINE)
    (broken,) = re.findall(r"\| (\d+) \(`BROKEN`\) \|", (DOCS / "reference" / "exit-codes.md").read_text())
    listed = {name: int(code) for code, name in rows} | {"BROKEN": int(broken)}
    assert listed == {code.name: code.value for code in ExitCode}


def test_environment_page_lists_the_variables() -> None:
    """env.py is the only module that names environment variables."""
    constants = [node.value for node in ast.walk(ast.parse(Path(env.__file__).read_text())) if is_text(node)]
    named = {text for text in constants if re.fullmatch(r"[A-Z][A-Z0-9_]+", text)} - {"SIGRTMAX", "ERROR", "PIL"}
    code_spans = re.findall(r"`([A-Z][A-Z0-9_]+)`", (DOCS / "reference" / "environment.md").read_text())
    assert set(code_spans) - {"INFO"} == named


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


def messages(heading: str) -> list[str]:
    """The first column of the table under a heading of the troubleshooting page."""
    text = (DOCS / "troubleshooting.md").read_text()
    section = text.split(f"\n## {heading}\n")[1].split("\n## ")[0]
    found = re.findall(r"^\| `(.+?)` \|", section, re.MULTILINE)
    assert found
    return found


def texts_of_the_source() -> Iterator[str]:
    """Every string of the package, with a mark in place of what is filled in."""
    for path in (ROOT / "ddp_kit").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                yield "".join(str(part.value) if isinstance(part, ast.Constant) else "\0" for part in node.values)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                yield node.value.replace("{}", "\0")


@pytest.mark.parametrize("heading", ["Messages of the launcher", "Messages of the Trainer", "Messages on clusters"])
def test_messages_of_ddpkit_in_troubleshooting_are_in_its_source(heading: str) -> None:
    texts = list(texts_of_the_source())
    patterns = {text: ".*".join(re.escape(part.strip()) for part in text.split("…")) for text in messages(heading)}
    gone = [
        message
        for message, pattern in patterns.items()
        if not any(re.search(pattern, text, re.DOTALL) for text in texts)
    ]
    assert not gone, "ddp_kit has no such messages any more"


def test_messages_of_others_in_troubleshooting_get_a_hint() -> None:
    quoted = messages("Messages of torch and Python, to which the launcher adds a hint")
    for message in quoted:
        assert diagnosis.hint(message, 1), f"there is no hint for {message!r}"
    advice = {
        next(cause.advice for cause in diagnosis.CAUSES if re.search(cause.pattern, message)) for message in quoted
    }
    missing = {cause.advice for cause in diagnosis.CAUSES} - advice
    assert not missing, f"troubleshooting.md has no row for this advice: {missing}"
