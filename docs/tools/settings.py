"""Write the tables of docs/configuration.md from the fields of `TrainerConfig`; tests/house compares them."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from ddp_kit.config import TrainerConfig

DOCUMENT = Path(__file__).parents[1] / "configuration.md"


def is_part(field: FieldInfo) -> bool:
    """Whether the field holds settings of its own, such as `data`."""
    return isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)


def table(model: type[BaseModel], prefix: str = "") -> str:
    """One row per setting: name, default, description."""
    rows = [
        f"| `{prefix}{name}` | `{default(field)}` | {meaning(field)} |"
        for name, field in model.model_fields.items()
        if not is_part(field)
    ]
    return "\n".join(["| setting | default | meaning |", "|---|---|---|", *rows])


def default(field: FieldInfo) -> str:
    """The default as it is written in Python."""
    return repr(str(field.default) if isinstance(field.default, Path) else field.default)


def meaning(field: FieldInfo) -> str:
    """The field's description, and the names that it takes."""
    names = [f"`{name}`" for name in choices(field.annotation)]
    values = f" One of {', '.join(names)}." if len(names) > 1 else ""
    return (field.description or "").replace("|", r"\|") + values


def choices(annotation: Any) -> list[Any]:
    """The values of a Literal, also within a union."""
    inner = get_args(annotation)
    return list(inner) if get_origin(annotation) is Literal else [name for part in inner for name in choices(part)]


def tables() -> Iterator[tuple[str, str]]:
    """The name of each table with its text: the Trainer's own settings, then each part's."""
    yield "run", table(TrainerConfig)
    for name, field in TrainerConfig.model_fields.items():
        if is_part(field):
            yield name, table(field.annotation, f"{name}.")  # type: ignore[arg-type]


def updated(text: str) -> str:
    """The document with its tables as they should be, each between its two marks."""
    for name, rows in tables():
        begin, end = f"<!-- {name}:begin -->", f"<!-- {name}:end -->"
        before, rest = text.split(begin)
        after = rest.split(end)[1]
        text = f"{before}{begin}\n\n{rows}\n\n{end}{after}"
    return text


if __name__ == "__main__":
    DOCUMENT.write_text(updated(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
