"""The workflow files: they call targets of the Makefile, and nothing else, with every supported Python and torch."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests import versions
from tests.support.launching import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TARGETS = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def jobs(workflow: Path) -> Iterator[dict[str, Any]]:
    yield from yaml.safe_load(workflow.read_text())["jobs"].values()


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.name)
def test_each_command_of_a_workflow_is_a_target_of_the_makefile(workflow: Path) -> None:
    commands = [step["run"] for job in jobs(workflow) for step in job["steps"] if "run" in step]
    assert commands
    for command in commands:
        make, target, *_ = command.split()
        assert make == "make"
        assert target in TARGETS, f"{workflow.name}: the Makefile has no target {target}"


def test_workflows_test_every_python_with_the_oldest_and_the_newest_torch() -> None:
    matrices = [job["strategy"]["matrix"] for workflow in WORKFLOWS for job in jobs(workflow)]
    assert all(matrix["python"] == list(versions.PYTHON) for matrix in matrices)
    assert [matrix["torch"] for matrix in matrices if "torch" in matrix] == [[versions.TORCH[0], versions.TORCH[-1]]]
