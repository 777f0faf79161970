"""Errors for checkpoints that do not fit this run."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ddp_kit.errors import CheckpointError, DdpKitError

_LONGEST_TEXT = 300


class DoesNotFitError(Exception):
    """The saved state of a part is from a different run."""


@contextmanager
def fitting(path: Path) -> Iterator[None]:
    """Turn any error raised while using a checkpoint's contents into a `CheckpointError`."""
    try:
        yield
    except DdpKitError:
        raise
    except DoesNotFitError as error:
        raise of_another_run(path, str(error)) from None
    except Exception as error:  # a file may contain anything and fail anywhere
        raise CheckpointError(
            f"the checkpoint {path} cannot be used: {type(error).__name__}: {str(error)[:_LONGEST_TEXT]!r}",
            "it may be from another version of ddpkit, or modified: use another checkpoint",
        ) from error


def of_another_run(path: Path, what: str) -> CheckpointError:
    """The error for a checkpoint that does not fit."""
    return CheckpointError(
        f"the checkpoint {path} is of another model, optimizer or scheduler: {what}",
        "set checkpoint.dir to the folder of this run; to start from step 0, use a new folder or "
        "checkpoint.resume=None; to load only weights, call ddp_kit.load_model(path, model, strict=False) before "
        "creating the Trainer",
    )
