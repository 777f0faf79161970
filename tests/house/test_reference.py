"""The reference pages say what the code says: names, settings, exit codes, variables, messages."""

import ast
import importlib.util
import re
from pathlib import Path
from types import ModuleType

import ddp_kit
from ddp_kit import env
from ddp_kit.exit_codes import ExitCode

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def tool(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, DOCS / "tools" / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_every_public_name_is_in_the_api_reference() -> None:
    listed = re.findall(r"^::: ddp_kit\.(\w+)$", (DOCS / "reference" / "api.md").read_text(), re.MULTILINE)
    assert sorted(listed) == sorted(set(ddp_kit.__all__) - {"__version__"})


def test_the_tables_of_settings_are_those_of_the_configuration() -> None:
    text = (DOCS / "configuration.md").read_text()
    assert tool("settings").updated(text) == text, "run `make docs`, which writes the tables"


def test_the_exit_codes_are_those_of_the_code() -> None:
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \|", (DOCS / "reference" / "exit-codes.md").read_text(), re.MULTILINE)
    (broken,) = re.findall(r"\| (\d+) \(`BROKEN`\) \|", (DOCS / "reference" / "exit-codes.md").read_text())
    listed = {name: int(code) for code, name in rows} | {"BROKEN": int(broken)}
    assert listed == {code.name: code.value for code in ExitCode}


def test_the_variables_are_those_of_the_code() -> None:
    """env.py is the only module that names environment variables; TMPDIR is read by Python's tempfile."""
    constants = [node.value for node in ast.walk(ast.parse(Path(env.__file__).read_text())) if is_text(node)]
    named = {text for text in constants if re.fullmatch(r"[A-Z][A-Z0-9_]+", text)} - {"SIGRTMAX", "ERROR"}
    code_spans = re.findall(r"`([A-Z][A-Z0-9_]+)`", (DOCS / "reference" / "environment.md").read_text())
    others = {"TMPDIR", "PET_", "INFO"}
    assert set(code_spans) - others == named


def is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and isinstance(node.value, str)
