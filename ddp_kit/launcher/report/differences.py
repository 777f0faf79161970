"""What is set differently in runs."""

from collections.abc import Mapping, Sequence
from typing import Any

from ddp_kit.env import LOCAL_RANK, RANK, WORLD_SIZE
from ddp_kit.launcher.report.run_history import RunHistory

_PARTS = ("command", "model", "devices", "ranks", "nodes", "host", "config", "versions", "git", "environment")
_OF_EACH_RUN = (
    "TORCHELASTIC_",
    "GROUP_",
    "ROLE_",
    "DDPKIT_",
    "SLURM_",
    "PET_",
    "MASTER_",
    RANK,
    LOCAL_RANK,
    WORLD_SIZE,
)
"""Variables that the launcher or an engine sets, and that differ anyway."""


def settings(run: RunHistory) -> dict[str, str]:
    """All that the last attempt was started with, by name."""
    found: dict[str, str] = {}
    for part in _PARTS:
        found.update(_flat(part, run.last.begin.get(part)))
    return found


def differences(runs: Sequence[RunHistory]) -> list[tuple[str, tuple[str, ...]]]:
    """The names of what differs, and the value in each run; an empty text where a run has none."""
    all_settings = [settings(run) for run in runs]
    names = dict.fromkeys(name for each in all_settings for name in each)
    table = [(name, tuple(each.get(name, "") for each in all_settings)) for name in names]
    return [(name, values) for name, values in table if len(set(values)) > 1 and not _differs_anyway(name)]


def _flat(name: str, value: Any) -> dict[str, str]:
    if isinstance(value, Mapping):
        found: dict[str, str] = {}
        for key, part in value.items():
            found.update(_flat(f"{name}.{key}", part))
        return found
    if isinstance(value, list):
        return {name: " ".join(str(each) for each in value)}
    return {} if value is None else {name: str(value)}


def _differs_anyway(name: str) -> bool:
    return name.startswith(tuple(f"environment.{prefix}" for prefix in _OF_EACH_RUN))
