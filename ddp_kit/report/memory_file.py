"""Read `memory_rankR_stepsA-B.json`, which `TrainerConfig(profile=...)` writes on a GPU: peak memory by line of code.

Format: docs/run-record.md. Every value is checked, because another program may have written the file.
"""

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from ddp_kit.errors import UsageError

_MOST_BYTES = 1 << 20
"""Maximum size of a file; ddpkit writes a few kB."""
_MOST_LINES = 100
"""Maximum number of lines read; ddpkit writes 20."""


def _printable(text: str) -> str:
    if not text.isprintable():  # control characters would reach the terminal
        raise ValueError("not printable text")
    return text


_Text = Annotated[str, AfterValidator(_printable)]
_Count = Annotated[int, Field(ge=0, lt=1 << 63)]


@dataclass(frozen=True)
class LineMemory:
    """GPU memory that one line of the user's code held at the peak. `count`: number of tensors.

    `file` is empty for allocations without Python code on the stack.
    """

    file: _Text
    line: _Count
    function: _Text
    bytes: _Count
    count: _Count

    @property
    def place(self) -> str:
        """The code that allocated the memory."""
        if not self.file:
            return "code outside Python, such as the backward pass"
        return f"{self.function} ({self.file}:{self.line})"


@dataclass(frozen=True)
class MemorySummary:
    """The peak of a GPU's memory during the recorded steps.

    `earlier`: bytes that were allocated before the recording. `complete`: False if allocations were dropped because
    there were too many. `lines`: the lines of code with the most bytes.
    """

    format: Literal[1]
    rank: _Count
    steps: tuple[_Count, _Count]
    bytes: _Count
    earlier: _Count
    lines: tuple[LineMemory, ...]
    complete: bool = True

    @property
    def other(self) -> int:
        """Bytes allocated by lines of code that are not in `lines`."""
        return max(0, self.bytes - self.earlier - sum(line.bytes for line in self.lines))


def read_memory(path: Path) -> MemorySummary:
    """Read one memory file. Raises `UsageError` if the file cannot be read or is not a valid memory file."""
    try:
        with path.open("rb") as file:
            raw = file.read(_MOST_BYTES + 1)
        if len(raw) > _MOST_BYTES:
            raise ValueError(f"it is larger than {_MOST_BYTES >> 20} MiB")
        summary = TypeAdapter(MemorySummary).validate_json(raw, strict=True)
        return replace(summary, lines=summary.lines[:_MOST_LINES])
    except OSError as error:
        problem = f"cannot be read: {error.strerror or error}"
    except ValidationError as error:  # a kind of ValueError
        first = error.errors()[0]
        where = "".join(f"`{name}`: " for name in [".".join(map(str, first["loc"]))] if name)
        problem = f"is not a valid memory file: {where}{first['msg']}"
    except ValueError as error:
        problem = f"is not a valid memory file: {error}"
    raise UsageError(
        f"{path} {problem}",
        'on a GPU, TrainerConfig(profile={"steps": [10, 12]}) writes one, such as profile/memory_rank0_steps10-12.json',
    )
