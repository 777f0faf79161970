"""Log lines through loguru: from rank 0, with the time, without tearing a progress bar."""

import sys
from typing import TYPE_CHECKING

from loguru import logger

if TYPE_CHECKING:
    from loguru import Record

_FORMAT = "<green>{time:HH:mm:ss}</green> <level>{level: <7}</level> {message}"
_DEFAULT_HANDLER = 0  # loguru's own, which exists until the user configures loguru

__all__ = ["logger", "start"]


def start(is_main: bool) -> None:
    """Let ddpkit's lines through on the main rank alone.

    Where the user has configured loguru, their handlers receive the lines. Where they have not, loguru's default
    handler goes on with everything but ours, and ours get a format that suits a training log.
    """
    if not is_main:
        logger.disable("ddp_kit")
        return
    logger.enable("ddp_kit")
    try:
        logger.remove(_DEFAULT_HANDLER)
    except ValueError:
        return
    logger.add(_write, format=_FORMAT, filter="ddp_kit", level="INFO", colorize=sys.stderr.isatty())
    logger.add(_write, filter=_not_ours, colorize=sys.stderr.isatty())


def _write(message: str) -> None:
    sys.stderr.write(message)  # looked up at each line: a progress bar puts itself in place of sys.stderr


def _not_ours(record: "Record") -> bool:
    return not (record["name"] or "").startswith("ddp_kit")
