"""Reading what several ranks have printed."""

import re

_LABEL = re.compile(r"^\[rank \d+\] ", re.MULTILINE)
# torch 2.10 has gloo print a line on stdout when a process group is made.
_GLOO_GREETING = re.compile(r"^\[Gloo\] Rank \d+ is connected to .*\n", re.MULTILINE)


def unlabelled(text: str) -> str:
    """`text` without the labels that the launcher puts in front of lines once more than one rank speaks.

    And without what gloo says by itself.
    """
    return _GLOO_GREETING.sub("", _LABEL.sub("", text))
