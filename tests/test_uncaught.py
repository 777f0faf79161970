"""A mistake of the user is one message on one rank, without a traceback; nothing is lost."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from ddp_kit import Trainer, TrainerConfig
from ddp_kit.checkpoint.format import checkpoints
from ddp_kit.env import ERROR_FILE, NOTE_PRINTED, NOTE_SECONDARY
from ddp_kit.uncaught import folded_traceback, leave_note, read_error_file, show_without_traceback
from tests.support.launching import PROGRAMS, clean_environment, seconds

RAISE = """
from ddp_kit import errors
from ddp_kit.uncaught import show_without_traceback
show_without_traceback(rank={rank})
{what}
"""
MISTAKE = "raise errors.ConfigError('no', 'yes')"


def started_rank(rank: int, what: str, tmp_path: Path, attempt: int | None = None) -> "subprocess.Popen[str]":
    """A rank of a launcher's attempt; None: without a launcher."""
    script = tmp_path / f"user{rank}.py"
    script.write_text(RAISE.format(rank=rank, what=what))
    error_file = None if attempt is None else str(folder_of(rank, tmp_path, attempt) / "error.json")
    env = clean_environment({ERROR_FILE: error_file})
    return subprocess.Popen([sys.executable, str(script)], stderr=subprocess.PIPE, text=True, env=env)


def folder_of(rank: int, tmp_path: Path, attempt: int) -> Path:
    folder = tmp_path / f"attempt_{attempt}" / str(rank)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def errors_of(process: "subprocess.Popen[str]") -> str:
    try:
        _, errors = process.communicate(timeout=seconds(120))
    finally:
        process.kill()
    assert process.returncode == 1
    return errors


def errors_of_rank(rank: int, what: str, tmp_path: Path, attempt: int | None = None) -> str:
    return errors_of(started_rank(rank, what, tmp_path, attempt))


def note_of(rank: int, tmp_path: Path, attempt: int = 0) -> tuple[str, bool, bool]:
    """The message, whether the cause is another rank's, and whether the console has it."""
    note = json.loads((folder_of(rank, tmp_path, attempt) / "error.json").read_text())["message"]
    return note["message"], note["extraInfo"][NOTE_SECONDARY], note["extraInfo"][NOTE_PRINTED]


def test_uncaught_mistake_is_shown_with_its_place_and_without_a_traceback(tmp_path: Path) -> None:
    errors = errors_of_rank(0, "raise errors.DataError('the dataset is empty', 'check the path')", tmp_path)
    assert errors == "ddpkit: error at user0.py:5: the dataset is empty\n  hint: check the path\n"


def test_uncaught_mistake_without_a_launcher_is_shown_by_each_rank(tmp_path: Path) -> None:
    assert errors_of_rank(2, MISTAKE, tmp_path).startswith("ddpkit: error (rank 2) at user2.py:5: no\n")


def test_uncaught_exception_of_the_user_keeps_its_traceback(tmp_path: Path) -> None:
    errors = errors_of_rank(0, "raise KeyError('x')", tmp_path)
    assert "Traceback" in errors
    assert "KeyError: 'x'" in errors


@pytest.mark.slow
def test_uncaught_mistake_of_several_ranks_is_printed_once_per_attempt(tmp_path: Path) -> None:
    for attempt in range(2):
        processes = [started_rank(rank, MISTAKE, tmp_path, attempt) for rank in range(4)]
        assert [text.count("ddpkit: error") for text in sorted(map(errors_of, processes))] == [0, 0, 0, 1]
        assert [note_of(rank, tmp_path, attempt) for rank in range(4)] == [("ConfigError: no", False, True)] * 4


FOUND_BY_ANOTHER = """error = errors.LossError('rank 1 cannot continue', 'see there')
error.reported_elsewhere = True
raise error"""
OF_ONE_RANK = """error = errors.DataError('worker 2 has ended', 'see there')
error.only_this_rank = True
raise error"""


def test_uncaught_mistake_is_printed_by_the_rank_with_the_cause(tmp_path: Path) -> None:
    assert errors_of_rank(0, FOUND_BY_ANOTHER, tmp_path, 0) == ""
    assert "worker 2 has ended" in errors_of_rank(1, OF_ONE_RANK, tmp_path, 0)
    assert note_of(0, tmp_path) == ("LossError: rank 1 cannot continue", True, True)
    assert note_of(1, tmp_path) == ("DataError: worker 2 has ended", False, False), "the verdict repeats it"


def test_uncaught_mistake_without_the_attempts_folder_is_still_shown(tmp_path: Path) -> None:
    gone = f"import os\nos.environ['{ERROR_FILE}'] = '{tmp_path}/attempt_0/0/error.json'\n"
    assert "ddpkit: error" in errors_of_rank(0, gone + MISTAKE, tmp_path)


def raised_in_fit(error: BaseException) -> BaseException:
    """An error of the loss function, as it leaves `fit`."""

    def loss_fn(model: Any, batch: Any) -> Any:
        raise error

    model = nn.Linear(2, 1)
    trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.1), loss_fn, TrainerConfig(global_batch_size=4))
    with pytest.raises(type(error)) as caught:
        trainer.fit(torch.ones(8, 2))
    return caught.value


def frames_in(text: str) -> list[str]:
    return [line.split(", ")[-1].strip() for line in text.splitlines() if line.startswith(("  File", "  ["))]


def test_folded_traceback_shows_the_users_frames() -> None:
    error = raised_in_fit(KeyError("x"))
    text = folded_traceback(error, error.__traceback__)
    first, folded, last = frames_in(text)
    assert (first, last) == ("in raised_in_fit", "in loss_fn")
    assert folded.endswith("frames of ddpkit and torch]")
    assert text.splitlines()[-1] == "KeyError: 'x'"


def test_folded_traceback_of_an_error_in_ddpkit_shows_all_frames() -> None:
    with pytest.raises(AttributeError) as caught:
        Trainer.fit(None, [])  # type: ignore[arg-type]
    assert frames_in(folded_traceback(caught.value, caught.tb))[-1] == "in fit"


def test_ctrl_c_without_checkpoints_prints_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = raised_in_fit(KeyboardInterrupt())
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    show_without_traceback()
    capsys.readouterr()
    sys.excepthook(type(error), error, error.__traceback__)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("ddpkit: interrupted after step 0; nothing was saved; with checkpoint=")


def test_uncaught_mistake_is_shown_with_its_notes(tmp_path: Path) -> None:
    what = "error = errors.DataError('no', 'yes')\nerror.add_note('found at once')\nraise error"
    assert errors_of_rank(0, what, tmp_path).splitlines()[1:] == ["  hint: yes", "  found at once"]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('{"message": {"message": "no", "extraInfo": {"timestamp": "7"}}}', ("no", {"timestamp": "7"})),
        ('{"message": {"extraInfo": {"timestamp": 7}}}', ("", {"timestamp": 7})),
        ('{"message": "no"}', ("no", {})),
        ('{"message": "no", "timestamp": "soon"}', None),
        ('{"message": {"message": "no", "extraInfo": {"timestamp": "soon"}}}', None),
        ('{"message": {"message": "no"}}', None),
        ('{"message": ["no"]}', None),
        ('{"text": "no"}', None),
        ('["no"]', None),
        ("no", None),
        ("", None),
    ],
)
def test_error_file_is_read_if_torch_can_read_it(
    tmp_path: Path, content: str, expected: tuple[str, dict[str, Any]] | None
) -> None:
    path = tmp_path / "error.json"
    path.write_text(content)
    assert read_error_file(str(path)) == expected
    try:
        ProcessFailure(local_rank=0, pid=1, exitcode=1, error_file=str(path))
        read_by_torch = True
    except Exception:
        read_by_torch = False
    assert read_by_torch == (expected is not None)


def test_error_file_that_does_not_exist_is_none(tmp_path: Path) -> None:
    assert read_error_file(str(tmp_path / "error.json")) is None


def test_note_is_read_as_it_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = str(tmp_path / "error.json")
    monkeypatch.setenv(ERROR_FILE, path)
    leave_note("ConfigError: no", {NOTE_SECONDARY: True}, callstack="the stack")
    message, fields = read_error_file(path) or ("", {})
    assert (message, fields[NOTE_SECONDARY], fields["py_callstack"]) == ("ConfigError: no", True, "the stack")


@pytest.mark.slow
@pytest.mark.parametrize(
    "launcher", [[], ["-m", "ddp_kit", "launch", "--nproc-per-node", "2"]], ids=["python", "launch"]
)
@pytest.mark.parametrize("closed", ["0<&-", "1>&-", "2>&-", "0<&- 1>&- 2>&-"])
def test_closed_standard_streams_do_not_affect_training(closed: str, launcher: list[str], tmp_path: Path) -> None:
    command = [sys.executable, *launcher, PROGRAMS / "trains_and_saves.py", tmp_path / "run"]
    subprocess.run(
        ["sh", "-c", f'exec "$0" "$@" {closed}', *command],
        check=True,
        capture_output=True,
        env=clean_environment({}),
        timeout=seconds(120),
    )
    assert [found.step for found in checkpoints(tmp_path / "run", hashes=True) if found.whole] == [4, 2]


def test_exit_of_a_process_that_the_worker_has_started_is_not_recorded(tmp_path: Path) -> None:
    env = clean_environment({ERROR_FILE: str(tmp_path / "error.json")})
    command = [sys.executable, PROGRAMS / "exits_after_its_child.py"]
    worker = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env, start_new_session=True)
    assert errors_of(worker) == "OUTSIDE EXITING\n"
