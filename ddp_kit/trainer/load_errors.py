"""Errors for checkpoints that do not fit this run."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ddp_kit.errors import CheckpointError, DdpKitError

_LONGEST_TEXT = 300


class StateMismatchError(Exception):
    """The saved state of a part does not match this run's model, optimizer or scheduler."""


@contextmanager
def explained_load_errors(path: Path) -> Iterator[None]:
    """A context that converts any error raised while using a checkpoint's content into a `CheckpointError`."""
    try:
        yield
    except DdpKitError:
        raise
    except StateMismatchError as error:
        raise mismatch_error(path, str(error)) from None
    except Exception as error:  # a damaged file may cause any error
        raise CheckpointError(
            f"the checkpoint {path} cannot be used: {type(error).__name__}: {str(error)[:_LONGEST_TEXT]!r}",
            "it may be from another version of ddpkit, or modified: use another checkpoint",
        ) from error


def mismatch_error(path: Path, what: str) -> CheckpointError:
    """The error for a checkpoint that does not match this run. `what`: the difference."""
    return CheckpointError(
        f"the checkpoint {path} does not match the model, optimizer or scheduler of this run: {what}",
        "set checkpoint.dir to the folder of this run; to start from step 0, use a new folder or "
        "checkpoint.resume=None; to load only weights, call ddp_kit.load_model(path, model, strict=False) before "
        "creating the Trainer",
    )
