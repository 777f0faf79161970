"""Import packages after torch, and print the values that their modules, classes and functions contain, as JSON."""

import importlib
import json
import sys
import types

import torch.distributed
import torch.utils.data  # noqa: F401

ADDRESSES = 1 << 32
sys.setrecursionlimit(10_000)
values: dict[str, str] = {}
seen: set[int] = set()
kept: list[object] = []  # so that no other object gets the same id


def walk(value: object, path: str, depth: int = 0) -> None:
    """Note the numbers and texts in a value, without sets, which have no order, and what has an address as its key."""
    if value is None or isinstance(value, bool | int | float | str | bytes):
        values[path] = repr(value)[:200]
        return
    if id(value) in seen or depth > 8 or isinstance(value, types.ModuleType | set | frozenset):
        return
    seen.add(id(value))
    kept.append(value)
    if type(value) in (dict, types.MappingProxyType):
        for key, item in list(value.items()):
            if isinstance(key, str) or (isinstance(key, int) and key < ADDRESSES):
                walk(item, f"{path}[{key}]", depth + 1)
    elif type(value) in (list, tuple):
        for number, item in enumerate(list(value)):
            walk(item, f"{path}[{number}]", depth + 1)
    elif type(value).__module__ == "random":
        values[path] = f"{type(value).__name__} {value.random()}"  # type: ignore[attr-defined]
    else:
        attributes = value.__defaults__ if isinstance(value, types.FunctionType) else getattr(value, "__dict__", None)
        walk(attributes, f"{path}.", depth + 1)


torch_has = set(sys.modules)
for name in sys.argv[1:]:
    importlib.import_module(name)
for name in sorted(name for name in set(sys.modules) - torch_has if not name.startswith("torch.")):
    for attribute, content in list(vars(sys.modules[name]).items()):
        if not attribute.startswith("__"):
            walk(content, f"{name}:{attribute}")
json.dump(values, sys.stdout)
