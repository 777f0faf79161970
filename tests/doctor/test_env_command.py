"""`ddpkit env`: what belongs into a bug report."""

import json
import platform
from collections.abc import Callable
from typing import Any

import pytest
import torch

import ddp_kit


@pytest.mark.slow
def test_env_command_prints_versions_machine_and_variables_without_secrets(ddpkit: Callable[..., Any]) -> None:
    variables = {
        "NCCL_DEBUG": "INFO",
        "DDPKIT_TOKEN": "abcdefgh",
        "EDITOR": "vi",
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NODELIST": "n1",
    }
    done = ddpkit("env", "--json", env=variables)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["ddpkit"].startswith(f"{ddp_kit.__version__}, ")
    assert found["Python"].startswith(platform.python_version())
    assert found["torch"].startswith(torch.__version__)
    assert found["packages"]["pydantic"]
    assert found["variables"]["SLURM_JOB_ID"] == "7"
    assert found["cluster"].startswith("this looks like Slurm, but its variable SLURM_")
    assert (found["variables"]["NCCL_DEBUG"], found["variables"]["DDPKIT_TOKEN"]) == ("INFO", "****")
    assert "EDITOR" not in found["variables"]
    assert "abcdefgh" not in done.stdout
    lines = ddpkit("env", env=variables).stdout.splitlines()
    assert lines[0] == f"ddpkit:      {found['ddpkit']}"
    assert "  NCCL_DEBUG=INFO" in lines
    assert "  DDPKIT_TOKEN=****" in lines
