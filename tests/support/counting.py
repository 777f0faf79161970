"""A save that is killed, or fails, at the operation of a given number."""

from collections.abc import Callable
from typing import Any

from ddp_kit.checkpoint.writer import System

OPERATIONS = ("mkdir", "create", "write", "fsync", "rename", "exchange", "remove")
MOST = 60
KILLED = 9


class Counting(System):
    """At the operation of a given number, `instead` happens; before it, the half of a write is done."""

    def __init__(self, fatal: int, instead: Callable[[], None], after: bool = False) -> None:
        self.done = 0
        self.fatal = fatal
        self.instead = instead
        self.after = after

    def __getattribute__(self, name: str) -> Any:
        found = super().__getattribute__(name)
        if name not in OPERATIONS:
            return found

        def operation(*arguments: Any) -> Any:
            self.done += 1
            if self.done == self.fatal and not self.after:
                if name == "write":
                    found(arguments[0], arguments[1][: len(arguments[1]) // 2])
                self.instead()
            try:
                return found(*arguments)
            finally:
                if self.done == self.fatal:
                    self.instead()

        return operation
