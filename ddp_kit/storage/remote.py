"""`RemoteCheckpoint`: a checkpoint in object storage as a reader sees it. Imports no client."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddp_kit.checkpoint.format import StoredCheckpoint


@dataclass(frozen=True)
class RemoteCheckpoint(StoredCheckpoint):
    """A checkpoint in object storage. `path` is a folder of this node, to which its files are fetched when needed."""

    url: str = ""
    fetch: Callable[[str], None] = field(default=lambda _: None, compare=False)
    """A function that fetches one file; its argument is the name of the file."""

    @property
    def place(self) -> str:
        return self.url

    def file(self, name: str) -> Path:
        path = super().file(name)
        if not path.exists():
            self.fetch(name)
        return path


def in_words(holder: Mapping[str, Any]) -> str:
    """The holder of a lock in words."""
    job = f"job {holder['job']!r}, " if holder.get("job") else ""
    return f"{job}process {holder.get('pid')!r} on {holder.get('host')!r}, since {holder.get('since')!r}"
