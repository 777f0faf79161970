"""Log lines through loguru: from rank 0, with the time, without breaking a progress bar."""

import inspect
import sys
from typing import TYPE_CHECKING

from loguru import logger

if TYPE_CHECKING:
    from loguru import Record

_FORMAT = "<green>{time:HH:mm:ss}</green> <level>{level: <7}</level> {message}"
_USERS_FORMAT = inspect.signature(logger.add).parameters["format"].default  # loguru's, or that of LOGURU_FORMAT
_DEFAULT_HANDLER = 0  # loguru's own, which exists until the user configures loguru

# Their lines are those of a rank that waits for the others, rank 0 among them.
_ANY_RANK = ("ddp_kit.trainer.barrier", "ddp_kit.parallel.unit_order")

__all__ = ["logger", "start"]


def start(rank: int, world_size: int) -> None:
    """Let ddpkit's lines through on the main rank alone.

    Where the user has configured loguru, their handlers receive the lines. Where they have not, loguru's default
    handler keeps everything but ours, with the rank where there are several, and ours get a format that suits a
    training log.
    """
    (logger.enable if rank == 0 else logger.disable)("ddp_kit")
    for module in _ANY_RANK:
        logger.enable(module)
    try:
        logger.remove(_DEFAULT_HANDLER)
    except ValueError:
        return
    name, colour = f"rank {rank} | " if world_size > 1 else "", sys.stderr.isatty()
    logger.add(_write, format=_FORMAT, filter="ddp_kit", level="INFO", colorize=colour)
    logger.add(_write, format=f"{name}{_USERS_FORMAT}", filter=_not_ours, colorize=colour)


def _write(message: str) -> None:
    sys.stderr.write(message)  # looked up at each line: a progress bar puts itself in place of sys.stderr


def _not_ours(record: "Record") -> bool:
    return not (record["name"] or "").startswith("ddp_kit")
