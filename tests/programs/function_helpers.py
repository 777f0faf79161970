"""Imported by launches_functions.py, as a module next to the script."""


def twice(x: object) -> object:
    return 2 * x
