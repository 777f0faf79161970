"""Reading what several ranks have printed."""

import re

_LABEL = re.compile(r"^\[rank \d+\] ", re.MULTILINE)


def unlabelled(text: str) -> str:
    """`text` without the labels that the launcher puts in front of lines once more than one rank speaks."""
    return _LABEL.sub("", text)
