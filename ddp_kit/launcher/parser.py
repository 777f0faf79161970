"""An argument parser that raises `UsageError`, so that its messages mask secrets and exit with code 2."""

import argparse
from typing import NoReturn

from ddp_kit.errors import UsageError


class Parser(argparse.ArgumentParser):
    """`argparse.ArgumentParser` that raises `UsageError` instead of printing and exiting."""

    @property
    def actions(self) -> list[argparse.Action]:
        """All flags and positional arguments, including those of parent parsers."""
        return self._actions

    def error(self, message: str) -> NoReturn:
        usage = self.format_usage().strip()
        raise UsageError(message, f"{usage}\n  see `{self.prog} --help`")
