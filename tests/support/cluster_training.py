"""examples/digits.py as a job that tests disturb on a cluster, and its result on one machine.

It trains slowly until the test lets it hurry. The script's argument is the name of its checkpoint folder.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.support.launching import PROGRAMS, ROOT, launch

STEPS = 345
_DIGITS = ROOT / "examples" / "digits.py"
_SLOWLY = """\
import sys, time
from pathlib import Path
import torch
from ddp_kit import Callback

class Notes(Callback):
    def on_step(self, trainer):
        if trainer.world.is_main:
            with open(f"{folder}.steps", "a") as rows:
                rows.write(f"{trainer.step}\\n")
        if not Path(f"{folder}.hurries").exists():
            time.sleep(0.3)

(folder,) = sys.argv[1:]
torch.set_num_threads(1)  # more of them sum in another order; ssh does not hand OMP_NUM_THREADS on
"""
_SAVED = {
    "log_every_steps=50),": 'log_every_steps=50, checkpoint={"dir": folder, "every_steps": 1}), callbacks=[Notes()],'
}
_EVERY_DIGIT = {"result.loss:.8f": "result.loss!r"}


EXITS = (PROGRAMS / "exit_codes.py").read_text()
"""A script whose rank 1 ends with another code in each attempt; arguments: the file of attempts, the codes.

What a job prints is no count of its attempts: `ray job submit` prints all of it again after it lost the connection.
"""
COUNTED = ["75", "124", "137"]
"""The codes of a job with --retries 1: the first is not counted, the second is, and the third ends the job."""


def write(folder: Path) -> None:
    """Write `train.py`."""
    (folder / "train.py").write_text(_SLOWLY + _digits({**_SAVED, **_EVERY_DIGIT}))


def _digits(changes: Mapping[str, str]) -> str:
    """examples/digits.py with some of its text replaced."""
    text = _DIGITS.read_text()
    for before, after in changes.items():
        assert text.count(before) == 1, before
        text = text.replace(before, after)
    return text


def hurry(folder: Path, name: str) -> None:
    """Let the run that saves in `name` do the rest of its steps without a pause."""
    (folder / f"{name}.hurries").touch()


def steps(folder: Path, name: str) -> list[int]:
    """The steps that rank 0 has done so far, in all attempts."""
    path = folder / f"{name}.steps"
    return [*map(int, path.read_text().split())] if path.exists() else []


def repeated_too_often(folder: Path, name: str, losses: int) -> list[int]:
    """The steps of a run that has ended, if more were done twice than the loss of nodes explains.

    Each loss costs at most the step in hand and the one before, which is still being written.
    """
    done = steps(folder, name)
    return done if len(done) > STEPS + 2 * losses else []


def goes_on(folder: Path, name: str) -> Callable[[], bool]:
    """A function that tells whether three steps more than now have been done."""
    before = len(steps(folder, name))
    return lambda: len(steps(folder, name)) >= before + 3


def result(output: str) -> tuple[str, str]:
    """The loss, with every digit, and the test accuracy that the job prints at its end."""
    (loss,) = set(re.findall(r"final loss: (\S+)", output))
    (accuracy,) = set(re.findall(r"test accuracy: (\S+)", output))
    return loss, accuracy


_ON_ONE_MACHINE: dict[int, tuple[str, str]] = {}


def on_one_machine(folder: Path, ranks: int) -> tuple[str, str]:
    """The result of the same job without a disturbance and without checkpoints; it runs once for all tests."""
    if ranks not in _ON_ONE_MACHINE:
        script = folder / "digits.py"
        script.write_text(_digits(_EVERY_DIGIT))
        done = launch("--nproc-per-node", ranks, script, timeout=120)
        assert done.returncode == 0, done.stdout + done.stderr
        _ON_ONE_MACHINE[ranks] = result(done.stdout)
    return _ON_ONE_MACHINE[ranks]
