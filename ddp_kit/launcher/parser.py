"""A parser of command lines whose complaints are errors like all others: secrets masked, exit code 2."""

import argparse
from typing import NoReturn

from ddp_kit.errors import UsageError


class Parser(argparse.ArgumentParser):
    """argparse's own, which raises `UsageError` where that one prints and exits."""

    @property
    def actions(self) -> list[argparse.Action]:
        """All flags and words, those of its parents too."""
        return self._actions

    def error(self, message: str) -> NoReturn:
        usage = self.format_usage().strip()
        raise UsageError(message, f"{usage}\n  `{self.prog} --help` says more")
