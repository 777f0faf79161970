"""`ddpkit --print-completion`: what it prints, used by a real bash."""

import subprocess
import sys
from pathlib import Path

import pytest

from ddp_kit.launcher import cli

DDPKIT = Path(sys.executable).with_name("ddpkit")
SHELL = """\
set -u
source "$1"
COMP_WORDS=("${@:2}")
COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
COMPREPLY=()
"$(complete -p ddpkit | sed 's/.*-F \\([^ ]*\\).*/\\1/')"
printf '%s\\n' "${COMPREPLY[@]}"
"""


@pytest.mark.slow
def test_bash_completes_commands_flags_values_and_files(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    printed = subprocess.run([DDPKIT, "--print-completion", "bash"], capture_output=True, text=True, check=True).stdout
    (tmp_path / "completion").write_text(printed)

    def completed(*words: str) -> list[str]:
        command = ["bash", "-c", SHELL, "bash", "completion", "ddpkit", *words]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
        return done.stdout.split()

    assert set(cli.COMMANDS) <= {*completed("")}
    assert completed("la") == ["launch"]
    assert completed("launch", "--hang") == ["--hang-timeout"]
    assert completed("launch", "--nproc") == ["--nproc-per-node"], "one spelling"
    assert completed("launch", "tra") == ["train.py"]
    assert completed("submit", "--part") == ["--partition"]


def test_an_unknown_shell_is_named() -> None:
    done = subprocess.run([DDPKIT, "--print-completion", "csh"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "invalid choice: 'csh'" in done.stderr
