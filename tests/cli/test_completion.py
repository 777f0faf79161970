"""`ddpkit --print-completion`: what it prints, used by a real bash."""

from pathlib import Path

import pytest

from ddp_kit.cli.commands import COMMANDS
from tests.support.launching import DDPKIT, run

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
def test_bash_completion_offers_commands_flags_values_and_files(tmp_path: Path) -> None:
    (tmp_path / "train.py").touch()
    printed = run(DDPKIT, "--print-completion", "bash")
    assert printed.returncode == 0, printed.stderr
    (tmp_path / "completion").write_text(printed.stdout)

    def completed(*words: str) -> list[str]:
        return run("bash", "-c", SHELL, "bash", "completion", "ddpkit", *words, cwd=tmp_path).stdout.split()

    assert set(COMMANDS) <= {*completed("")}
    assert completed("la") == ["launch"]
    assert completed("launch", "--hang") == ["--hang-timeout"]
    assert completed("launch", "--nproc") == ["--nproc-per-node"], "one spelling"
    assert completed("launch", "tra") == ["train.py"]
    assert completed("submit", "--part") == ["--partition"]


def test_completion_for_an_unknown_shell_is_refused() -> None:
    done = run(DDPKIT, "--print-completion", "csh")
    assert done.returncode == 2
    assert "invalid choice: 'csh'" in done.stderr
