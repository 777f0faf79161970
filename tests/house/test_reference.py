"""The reference pages say what the code says: names, settings, exit codes, variables, messages."""

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import ddp_kit

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
