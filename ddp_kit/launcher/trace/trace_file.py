"""Reads the file of a trace: the Chrome trace format, as torch.profiler (Kineto) writes it.

Source of the format: torch/profiler/_chrome_trace_export.py and Kineto's output_json.cpp.
"""

import gc
import gzip
import json
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ddp_kit.errors import UsageError, kind_of

HOST = {"cpu_op", "user_annotation", "python_function", "cuda_runtime", "cuda_driver"}
GPU = {"kernel", "gpu_memcpy", "gpu_memset"}
_NO_ARGUMENTS: Mapping[str, Any] = {}


class Event(NamedTuple):
    """One operator, Python function, call of CUDA or kernel. `thread` is a stream for the GPU's. Seconds."""

    kind: str
    name: str
    thread: tuple[Any, Any]
    start: float
    end: float
    args: Mapping[str, Any]


@dataclass(frozen=True)
class TraceFile:
    """The events of HOST and GPU in a file, in its order, and everything else that it says of the recording."""

    path: Path
    facts: Mapping[str, Any]
    events: list[Event]


def load(path: Path) -> TraceFile:
    """Read a trace, gzipped or not.

    Raises `UsageError` if the file cannot be read, is cut off, or is not a trace of torch.profiler.
    """
    with _no_garbage_collection():  # it would look through all objects again and again, and find none
        return _loaded(path)


def _loaded(path: Path) -> TraceFile:
    found = _json(path, _text(path))
    listed = found.get("traceEvents") if isinstance(found, dict) else None
    if not isinstance(listed, list):
        what = f"its keys are {sorted(found)[:5]}" if isinstance(found, dict) else f"it has {kind_of(found)}"
        raise _not_a_trace(path, f"is JSON, but no trace of torch.profiler: {what}")
    origin = next((entry["ts"] for entry in listed if _is_event(entry)), 0)  # of large numbers, digits are lost
    events = [_event(entry, origin) for entry in listed if _is_event(entry)]
    if not events:
        raise _not_a_trace(path, f"has no operators or kernels among its {len(listed)} entries")
    facts = {name: value for name, value in found.items() if name != "traceEvents"}
    return TraceFile(path, facts, events)


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _text(path: Path) -> str:
    try:
        raw = path.read_bytes()
        if raw[:2] == b"\x1f\x8b":
            raw = gzip.decompress(raw)
    except EOFError:
        raise _cut_off(path) from None
    except zlib.error as error:
        raise _not_a_trace(path, f"is a damaged gzip file: {error}") from None
    except OSError as error:
        raise _not_a_trace(path, f"cannot be read: {error.strerror or error}") from None
    # Names of functions may be damaged: github.com/pytorch/pytorch/issues/121219
    return raw.decode(errors="replace")


def _json(path: Path, text: str) -> Any:
    try:
        return json.loads(text, strict=False)
    except json.JSONDecodeError as error:
        begun, written = text.lstrip()[:1] in ("{", "["), text.rstrip()
        if begun and (error.pos >= len(written) or not written.endswith(("}", "]"))):
            raise _cut_off(path) from None
        raise _not_a_trace(path, f"is not JSON: {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise _not_a_trace(path, "is JSON, but too deeply nested for a trace") from None


def _is_event(entry: Any) -> bool:
    return (
        isinstance(entry, dict)
        and entry.get("ph") == "X"
        and (entry.get("cat") in HOST or entry.get("cat") in GPU)
        and isinstance(entry.get("ts"), int | float)
        and isinstance(entry.get("dur"), int | float)
    )


def _event(entry: dict[str, Any], origin: float) -> Event:
    args = entry.get("args")
    start = entry["ts"] - origin
    return Event(
        entry["cat"],
        str(entry.get("name", "")),
        (entry.get("pid"), entry.get("tid")),
        start / 1e6,
        (start + entry["dur"]) / 1e6,
        args if isinstance(args, dict) else _NO_ARGUMENTS,
    )


def _cut_off(path: Path) -> UsageError:
    return UsageError(
        f"{path} ends in the middle: the trace was not written completely",
        "give the trace of another rank, or record again: `ls -l` shows whether the disk was full",
    )


def _not_a_trace(path: Path, what: str) -> UsageError:
    return UsageError(
        f"{path} {what}",
        'give a file that Trainer(profile={"steps": [10, 12]}) wrote, such as profile/rank0_steps10-12.json.gz',
    )
