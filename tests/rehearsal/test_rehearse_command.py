"""The command line of `ddpkit rehearse`; what it runs and finds: end_to_end/test_rehearsals.py."""

import pytest

from ddp_kit.errors import UsageError
from ddp_kit.rehearsal.command import run
from ddp_kit.terminal import Terminal


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], r"the following arguments are required: script.py(.|\n)*ddpkit rehearse --help"),
        (["nowhere.py"], "there is no script 'nowhere.py'"),
        (["--steps", "2", __file__], "--steps 2 is too few"),
        (["--steps", "many", __file__], "invalid int value: 'many'"),
        (["--ranks", "two", __file__], "--ranks two is not a list of different numbers"),
        (["--ranks", "2,2", __file__], "--ranks 2,2 is not a list of different numbers"),
        (["--step-timeout", "0", __file__], "--step-timeout 0 is no time"),
        (["--step-timeout", "nan", __file__], "--step-timeout nan is no time"),
        (["--nnodes", "2", __file__], "--nnodes 2: a rehearsal runs on one node"),
        (["--cold", __file__], "a rehearsal watches forked workers"),
        (["--no-python", "true"], "a rehearsal watches forked workers"),
        (["--dry-run", __file__], "--dry-run starts nothing"),
        (["--stepz", "3", __file__], "there is no flag '--stepz'"),
    ],
)
def test_rehearse_with_invalid_arguments_names_them(words: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        run(words, Terminal({}))


def test_rehearse_help_lists_its_own_flags_and_those_of_launch(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run(["--help"], Terminal({}))
    assert ended.value.code == 0
    printed = capsys.readouterr().out
    assert "--steps" in printed
    assert "--nproc-per-node" in printed
    assert "ddpkit rehearse [flags] script.py" in printed
