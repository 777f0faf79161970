"""A package that is run with -m; it says which of its parts were imported."""

IMPORTED = [__name__]
