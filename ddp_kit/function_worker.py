"""One rank of `ddp_kit.launch`: calls the function and writes its result or exception for the calling process."""

import os
import pickle
import sys
import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import cloudpickle

from ddp_kit.env import rank_for_messages
from ddp_kit.errors import LaunchError
from ddp_kit.function_launch import CALL, ERROR, RESULT
from ddp_kit.uncaught import folded_traceback, leave_note


def main(folder: str, path: Sequence[str]) -> None:
    """Run the pickled call in `folder`, and write its result or exception to the same folder.

    `path`: sys.path of the calling process. If the call raises an exception, this process exits with code 1.
    """
    place = Path(folder)
    sys.path[:] = path
    try:
        function, args = pickle.loads((place / CALL).read_bytes())  # noqa: S301  # from the process that started us
        result = function(*args)
        if rank_for_messages() == 0:
            _write(place / RESULT, _pickled_result(result))
    except Exception as error:
        own = error.__traceback__.tb_next if error.__traceback__ is not None else None
        text = folded_traceback(error.with_traceback(own), own)
        _write(place / ERROR, _pickled_error(error, text))
        leave_note(traceback.format_exception_only(error)[-1].strip(), {})  # the caller shows the traceback
        sys.exit(1)


def _pickled_result(result: object) -> bytes:
    try:
        return bytes(cloudpickle.dumps(result))
    except Exception as error:
        raise LaunchError(
            f"the function's return value cannot be sent back: {error}",
            "return numbers, strings, tensors on the CPU, or lists and dicts of these",
        ) from None


def _pickled_error(error: Exception, text: str) -> bytes:
    """The pickled exception and traceback text; an exception that cannot be pickled becomes a `LaunchError`."""
    with suppress(Exception):
        content = bytes(cloudpickle.dumps((error.with_traceback(None), text)))
        pickle.loads(content)  # noqa: S301  # some exceptions can be pickled but not unpickled
        return content
    return bytes(
        cloudpickle.dumps(
            (LaunchError(f"{type(error).__name__}: {error}", "see the traceback of the failed rank"), text)
        )
    )


def _write(path: Path, content: bytes) -> None:
    """Create the file atomically, unless it exists, so that only the first error is kept if several ranks fail."""
    part = path.with_name(f"{path.name}.{os.getpid()}")
    part.write_bytes(content)
    with suppress(FileExistsError):
        os.link(part, path)
    part.unlink()
