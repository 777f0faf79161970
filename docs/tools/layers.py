"""The layers of the package, and the table of them in CONTRIBUTING.md; tests/house/test_architecture.py checks both.

A module imports only from lower layers of its own side, and from the ground. Modules of the ground may import each
other.
"""

from pathlib import Path

DOCUMENT = Path(__file__).parents[2] / "CONTRIBUTING.md"
GROUND = [
    *("errors", "texts", "env", "exit_codes", "masking", "heartbeat", "uncaught", "arguments", "terminal"),
    *("control_groups", "memory_folder", "child_program", "config", "storage"),
    *("checkpoint.format", "checkpoint.weight_files", "checkpoint.writer"),
]
WORKER = [
    row.split()
    for row in (
        "torch_internals log records structures state_values metrics",
        "distributed",
        "data model callbacks",
        "parallel",
        "memory",
        "checkpoint",
        "trainer",
    )
]
"""Rooms and modules that run in the workers, from the lowest layer to the highest."""
LAUNCHER = [
    row.split()
    for row in (
        "clusters devices launcher.processes launcher.program launcher.wire launcher.diagnosis launcher.verdict "
        "launcher.function",
        "launcher.spec launcher.job launcher.output health",
        "launcher.rendezvous launcher.record launcher.warm",
        "launcher.plan",
        "launcher.agent",
        "report watching rehearsal doctor",
        "cli",
    )
]
"""Rooms and modules of the launcher and the commands, from the lowest layer to the highest."""
_HEAD = "| layer | the launcher and the commands | the workers |\n|---|---|---|\n"


def table() -> str:
    """The layers as a table in Markdown, the highest first."""
    rows = [
        f"| {number} | {_cell(LAUNCHER[number - 1])} | {_cell(WORKER[number - 1])} |\n"
        for number in range(len(WORKER), 0, -1)
    ]
    return _HEAD + "".join(rows) + f"| 0: no torch | {_cell(GROUND)} | the same |\n"


def _cell(names: list[str]) -> str:
    return " ".join(f"`{name}`" for name in names)


def with_table(document: str) -> str:
    """The document with the table in place of the one it has."""
    begin = document.index(_HEAD)
    end = document.index("\n\n", begin)
    return document[:begin] + table().rstrip("\n") + document[end:]


if __name__ == "__main__":
    DOCUMENT.write_text(with_table(DOCUMENT.read_text()))
