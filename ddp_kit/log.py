"""Logging through loguru, on rank 0 only. Lines begin with the time, and appear above the progress bar, if any."""

import inspect
import os
import sys
import textwrap
from typing import TYPE_CHECKING

from loguru import logger

if TYPE_CHECKING:
    from loguru import Message, Record

_FORMAT = "<green>{time:HH:mm:ss}</green> <level>{level: <7}</level> {message}"
_USERS_FORMAT = inspect.signature(logger.add).parameters["format"].default  # LOGURU_FORMAT, or loguru's default
_INDENT = len("12:34:56 INFO    ")
"""Columns before a message."""
_NARROW = 60
"""On terminals with fewer columns, only the first line of a message is indented by `_INDENT`."""
_NO_BREAK = "\u00a0"
_DEFAULT_HANDLER = 0  # the id of loguru's own handler, which exists until the user configures loguru

# Modules that may log on any rank: they report ranks that are late, and rank 0 may be one of these ranks.
_ANY_RANK = ("ddp_kit.distributed.barrier", "ddp_kit.parallel.fsdp")

__all__ = ["logger", "start"]


def start(rank: int, world_size: int) -> None:
    """Enable ddpkit's log lines on the main rank only, and set their format.

    If the user has configured loguru, the user's handlers receive ddpkit's lines. Otherwise, ddpkit's lines get a
    handler with a short format, and the lines of other code keep loguru's default format, with the rank if there are
    several ranks.
    """
    if rank == 0:
        logger.enable("ddp_kit")
    else:
        logger.disable("ddp_kit")
    for module in _ANY_RANK:
        logger.enable(module)
    try:
        logger.remove(_DEFAULT_HANDLER)
    except ValueError:
        return
    colour = sys.stderr.isatty()
    name = ""
    label = 0
    if world_size > 1:
        name = f"rank {rank} | "
        label = len(f"[rank {rank}] ")  # which the launcher may write before each line

    def write(message: "Message") -> None:
        _write(_wrapped(message, label))

    def is_of_other_code(record: "Record") -> bool:
        return not (record["name"] or "").startswith("ddp_kit")

    logger.add(write, format=_FORMAT, filter="ddp_kit", level="INFO", colorize=colour)
    logger.add(_write, format=f"{name}{_USERS_FORMAT}", filter=is_of_other_code, colorize=colour)


def _write(message: str) -> None:
    sys.stderr.write(message)  # looked up each time, because a progress bar replaces sys.stderr


def _wrapped(message: "Message", label: int) -> str:
    """The message, wrapped between words if standard error is a terminal.

    `label`: the number of columns to leave free for a label that the launcher may write.
    """
    text = message.record["message"]
    try:
        columns = os.get_terminal_size(sys.stderr.fileno()).columns
    except (OSError, ValueError, AttributeError):  # no terminal, or a replacement without a descriptor
        return message
    room = columns - label
    if "\n" in text or _INDENT + len(text) <= room or room < _INDENT:
        return message
    later = " " * (_INDENT if columns >= _NARROW else 2)
    figures = text.split("  ")
    if len(figures) > 1 and max(map(len, figures)) <= room - _INDENT:  # keep each number with its name
        figures = [figure.replace(" ", _NO_BREAK) for figure in figures]
    lines = textwrap.wrap(
        " " * _INDENT + "  ".join(figures),
        room,
        subsequent_indent=later,
        break_long_words=False,
        break_on_hyphens=False,
    )
    return message.replace(text, "\n".join(lines).lstrip().replace(_NO_BREAK, " "), 1)
