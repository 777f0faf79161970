"""The result of a check."""

from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """The severity of a result."""

    OK = "ok"
    WARN = "warn"
    """Training works, but may fail later or be slow."""
    FAIL = "fail"
    """Training does not work, or not as intended."""


@dataclass(frozen=True)
class CheckResult:
    """The result of one check."""

    name: str
    status: Status
    found: str
    fix: str = ""
    """The command that fixes it; empty: nothing to fix."""


def ok(name: str, found: str) -> CheckResult:
    """A check that passed."""
    return CheckResult(name, Status.OK, found)


def warn(name: str, found: str, fix: str) -> CheckResult:
    """A possible problem."""
    return CheckResult(name, Status.WARN, found, fix)


def fail(name: str, found: str, fix: str) -> CheckResult:
    """A check that failed."""
    return CheckResult(name, Status.FAIL, found, fix)
