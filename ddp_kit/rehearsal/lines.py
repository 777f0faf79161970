"""The messages between `ddpkit rehearse` and the watch in its workers: instructions, and one line per optimizer step.

Checksums are strings; two tensors have the same checksum if they are bitwise identical.
"""

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

INSTRUCTIONS_FILE = "instructions.json"
LAUNCHER_FILE = "launcher.pid"
ELSEWHERE_FILE = "elsewhere"
"""Contains the path of a file that the script was about to save in a place that all runs share, or to change."""
DISTURBED_FILE = "disturbed"
"""Exists once the disturbance was sent; not empty if the run's folders contained files at this time."""


@dataclass(frozen=True)
class Instructions:
    """What the watch has to do in one launch of a rehearsal."""

    launch: int
    """Number of launches of this run before this one."""
    steps: int
    """Optimizer steps after which the first attempt of a launch ends."""
    steps_after_restart: int
    """Optimizer steps after which a restarted attempt ends."""
    folders: tuple[str, ...]
    """The folders and files of this run, in which the script may save."""
    began: float = 0.0
    """When the rehearsal began, in seconds since 1970: no file that existed before may be changed."""
    signal: int = 0
    """The disturbance: SIGKILL to the rank itself, SIGTERM to the launcher; 0: none."""
    step: int = 0
    """The optimizer step after which the signal is sent."""
    rank: int = 0
    """The rank that sends the signal."""

    def write(self, folder: Path) -> None:
        """Write the instructions to the folder of the run."""
        (folder / INSTRUCTIONS_FILE).write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, folder: Path) -> "Instructions":
        """Read the instructions from the folder of the run."""
        return cls(**json.loads((folder / INSTRUCTIONS_FILE).read_text()))


@dataclass(frozen=True)
class Line:
    """The state of one rank just before an optimizer step, and what it has done since the previous one."""

    step: int
    """Number of steps of the first optimizer, including this one."""
    optimizer: int = 0
    """Number of the optimizer, in the order of their first steps."""
    parameters: tuple[str, ...] = ()
    """Names of the optimizer's parameters."""
    weights: tuple[str, ...] = ()
    """Checksums of the optimizer's parameters."""
    numel: int = 0
    """Number of values of these parameters on this rank."""
    norm: float = 0.0
    """Euclidean norm of these parameters."""
    state: Mapping[str, str] = field(default_factory=dict)
    """Checksum of the optimizer's state by name, such as `exp_avg`, over all parameters."""
    count: float | None = None
    """Highest step count in the optimizer's state; None: it has none."""
    settings: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Numbers of the optimizer's parameter groups, such as `lr`."""
    scalers: tuple[Mapping[str, float], ...] = ()
    """States of the gradient scalers."""
    losses: tuple[float, ...] = ()
    """Sum of the tensors of each backward pass since the previous line."""
    batches: tuple[tuple[int, int, str], ...] = ()
    """Batches that DataLoaders gave since the previous line: number of samples, sum of their hashes, checksum.

    Two sets of samples have the same sum, in any order and on any number of ranks. Batches that were given while
    gradients are disabled, as in an evaluation, are not listed.
    """
    epochs: tuple[tuple[int, bool, int], ...] = ()
    """Iterations over a DataLoader with a DistributedSampler that began since the previous line: number of `batches`
    before it, whether the sampler shuffles, and its epoch."""
    random: Mapping[str, str] = field(default_factory=dict)
    """Checksums of the states of the global random generators."""
    buffers: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Checksums of the buffers of the modules that are trained."""
    copies: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Checksums of the tensors of other modules, and of dicts with the names of the model's parameters."""
    files: tuple[str, ...] = ()
    """Files of this run that were written since the previous line; on rank 0 only."""


Recording = Mapping[int, list[Line]]
"""The lines of each rank in one attempt."""


def attempt_file(launch: int, restart: int, rank: int) -> str:
    """Name of the file with the lines of one rank in one attempt."""
    return f"{launch}.{restart}.{rank}.jsonl"


def write_line(line: Line) -> str:
    """The line as text. Empty values are omitted."""
    return json.dumps({name: value for name, value in asdict(line).items() if value}) + "\n"


def read_attempts(folder: Path) -> list[Recording]:
    """The recordings of all attempts of a run, in their order. A line that a killed rank wrote in part is ignored."""
    attempts: dict[tuple[int, int], dict[int, list[Line]]] = defaultdict(dict)
    for path in folder.glob("*.jsonl"):
        launch, restart, rank, _ = path.name.split(".")
        texts = path.read_text().split("\n")[:-1]
        attempts[int(launch), int(restart)][int(rank)] = [Line(**_frozen(json.loads(text))) for text in texts]
    return [dict(sorted(ranks.items())) for _, ranks in sorted(attempts.items())]


def _frozen(value: Any) -> Any:
    """Convert lists to tuples, so that lines can be compared."""
    if isinstance(value, list):
        return tuple(map(_frozen, value))
    if isinstance(value, dict):
        return {name: _frozen(part) for name, part in value.items()}
    return value
