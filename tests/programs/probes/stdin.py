"""Reads what is given to its standard input."""

import json
import sys

first = input("what? ")
print()
print(
    json.dumps(
        {"first": first, "rest": sys.stdin.read() if not sys.stdin.isatty() else None, "encoding": sys.stdin.encoding}
    )
)
