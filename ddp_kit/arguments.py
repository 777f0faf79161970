"""The argument parser of `ddpkit` and all of its commands, and the types of their arguments."""

import argparse
import math
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


# --- Types of arguments -----------------------------------------------------------------------------------------------


def whole_number(text: str, least: int = 0) -> int:
    """A whole number of at least `least`."""
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least {least}")
    return int(text)


def count(text: str) -> int:
    """A whole number of at least 1."""
    return whole_number(text, least=1)


def seconds(text: str) -> float:
    """A finite number of seconds of at least 0."""
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a valid number of seconds: use a number of at least 0")
    return number


_TIME_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}


def duration(text: str) -> float:
    """The seconds of a time greater than 0, such as `90`, `90s`, `10m`, `1.5h`, `2d`, `24:00:00` or `1-12:00:00`."""
    total = 0.0
    if match := re.fullmatch(r"(\d{1,9}(?:\.\d+)?)([smhd]?)", text):
        total = float(match[1]) * _TIME_UNITS[match[2] or "s"]
    elif match := re.fullmatch(r"(?:(\d+)-)?(\d+):(\d\d):(\d\d)", text):
        days, hours, minutes, rest = (int(part or 0) for part in match.groups())
        total = ((days * 24.0 + hours) * 60 + minutes) * 60 + rest
    if not total:
        raise argparse.ArgumentTypeError(f"{text!r} is not a time: use such as 90s, 10m, 2h, 2d or 1-12:00:00")
    return total


def size(text: str) -> int:
    """The bytes of a size of at least 1 byte, such as `80GiB`, `80GB`, `500M` or `85899345920`."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(?:([KMGT])(I?))?B?", text.strip().upper())
    total = 0
    if match:
        number, prefix, binary = match.groups(default="")
        total = int(float(number) * (1024 if binary else 1000) ** " KMGT".index(prefix or " "))
    if total < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: use such as 80GiB, 80GB or a number of bytes")
    return total
