"""The argument parser of `ddpkit` and all of its commands."""

import argparse
import re
from typing import NoReturn

from ddp_kit.errors import UsageError


class Parser(argparse.ArgumentParser):
    """An `ArgumentParser` that raises `UsageError` for invalid arguments, instead of printing a message and exiting."""

    @property
    def actions(self) -> list[argparse.Action]:
        """All flags and positional arguments, including those of parent parsers."""
        return self._actions

    def error(self, message: str) -> NoReturn:
        if ambiguous := re.match(r"ambiguous option: (\S+) could match (.+)", message):
            flags = sorted({flag.replace("_", "-") for flag in ambiguous[2].split(", ")})
            name = ambiguous[1].partition("=")[0]
            hint = f"use one of {', '.join(flags)}; `{self.prog} --help` lists all flags"
            raise UsageError(f"the flag {name!r} is ambiguous", hint)
        usage = self.format_usage().strip()
        # argparse also counts the script's arguments, whose name is `...`, as missing.
        raise UsageError(message.removesuffix(", ..."), f"{usage}\n  see `{self.prog} --help`")
