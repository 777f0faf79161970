"""Write what follows from the fields of `TrainerConfig`; tests/house compares it.

It writes the tables of docs/configuration.md, and ddp_kit/config/types.py: what type checkers accept for each setting.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from ddp_kit.config.settings import TrainerConfig

DOCUMENT = Path(__file__).parents[1] / "configuration.md"
TYPES = Path(__file__).parents[2] / "ddp_kit" / "config" / "types.py"
_TYPES_HEAD = '''\
"""What may be given for each setting, for type checkers and completion: `TrainerConfig(data={"num_workers": 4})`.

Written by docs/tools/settings.py (`make docs`) from the fields of settings.py; not by hand.
"""
# fmt: off
# ruff: noqa: E501

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, TypedDict

from ddp_kit.config.settings import PARTS
'''


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


def types() -> str:
    """types.py: one TypedDict for each part and one for the whole."""
    parts = [field.annotation for field in TrainerConfig.model_fields.values() if is_part(field)]
    names = ", ".join(sorted(part.__name__ for part in parts))  # type: ignore[union-attr]
    return _TYPES_HEAD.replace("PARTS", names) + "".join(map(typed_dict, [*parts, TrainerConfig]))


def typed_dict(model: Any) -> str:
    """The class `DataSettings` for the model `DataConfig`: each setting with its input type and its description."""
    name = model.__name__.replace("Config", "Settings")
    text = f'\n\nclass {name}(TypedDict, total=False):\n    """The settings of `{model.__name__}`."""\n\n'
    validators = model.__pydantic_decorators__.field_validators.values()
    inputs = {
        field: each.info.json_schema_input_type
        for each in validators
        for field in each.info.fields
        if "Undefined" not in repr(each.info.json_schema_input_type)
    }
    for setting, field in model.model_fields.items():
        text += f"    {setting}: {' | '.join(dict.fromkeys(inputs_of(inputs.get(setting, field.annotation))))}\n"
        if field.description:
            text += f'    """{field.description.replace(chr(92), chr(92) * 2)}"""\n'
    return text


def inputs_of(kind: Any) -> Iterator[str]:
    """The types, as Python source, of what pydantic accepts for a field of this type."""
    origin, inner = get_origin(kind), get_args(kind)
    if origin is Annotated:
        yield from inputs_of(inner[0])
    elif origin in (Union, UnionType):
        for each in inner:
            yield from inputs_of(each)
    elif origin is Literal:
        yield f"Literal[{', '.join(map(quoted, inner))}]"
    elif origin is tuple:
        items = [" | ".join(inputs_of(each)) for each in inner if each is not Ellipsis]
        yield f"tuple[{', '.join(items)}{', ...' * (Ellipsis in inner)}]"
        yield f"list[{items[0]}]"
    elif origin is dict:
        # A dict in a variable of its own has plain strings for a type checker, whatever is in it.
        values = "str" if get_origin(inner[1]) is Literal else " | ".join(inputs_of(inner[1]))
        yield f"Mapping[str, {values}]"
    elif origin is Callable:
        yield "Callable[[Any], Any]"
    elif kind is Path:
        yield from ("str", "Path")
    elif issubclass(kind, BaseModel):
        yield from (kind.__name__, kind.__name__.replace("Config", "Settings"))
    else:
        yield "None" if kind is NoneType else kind.__name__


def quoted(value: object) -> str:
    return f'"{value}"' if isinstance(value, str) else repr(value)


if __name__ == "__main__":
    TYPES.write_text(types(), encoding="utf-8")
    DOCUMENT.write_text(updated(DOCUMENT.read_text(encoding="utf-8")), encoding="utf-8")
