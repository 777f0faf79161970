"""What the package's parts import from their own folder."""


def facts(names: dict[str, object]) -> dict[str, object]:
    """What the module that is run, whose globals are `names`, sees of itself."""
    spec = names["__spec__"]
    return {
        "names": {name: type(value).__name__ for name, value in names.items() if name.startswith("__")},
        "__name__": names["__name__"],
        "__file__": names["__file__"],
        "__package__": names["__package__"],
        "__cached__": names["__cached__"],
        "__loader__": [type(names["__loader__"]).__name__, getattr(names["__loader__"], "name", None)],
        "__spec__": spec and [getattr(spec, name) for name in ("name", "origin", "parent", "cached", "has_location")],
        "spec's loader": spec and getattr(spec, "loader", None) is names["__loader__"],
    }
