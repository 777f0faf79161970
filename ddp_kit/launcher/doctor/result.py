"""What a check says."""

from dataclasses import dataclass
from enum import StrEnum


class Status(StrEnum):
    """How bad it is."""

    OK = "ok"
    WARN = "warn"
    """Training works; something may still go wrong, or is slower than it could be."""
    FAIL = "fail"
    """Training does not work, or not as one thinks it does."""


@dataclass(frozen=True)
class CheckResult:
    """What one check has found."""

    name: str
    status: Status
    found: str
    fix: str = ""
    """The command that fixes it; empty where nothing is to be fixed."""


def ok(name: str, found: str) -> CheckResult:
    """All is well."""
    return CheckResult(name, Status.OK, found)


def warn(name: str, found: str, fix: str) -> CheckResult:
    """Something that may go wrong."""
    return CheckResult(name, Status.WARN, found, fix)


def fail(name: str, found: str, fix: str) -> CheckResult:
    """Something that is broken."""
    return CheckResult(name, Status.FAIL, found, fix)
