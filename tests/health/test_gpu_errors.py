"""The errors of the ranks' GPUs, from a stand-in for NVML whose file changes while they are watched."""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.launching import PROGRAMS, started

pytestmark = pytest.mark.timeout(120)
MachineOf = Callable[[str], dict[str, str]]
TWO = "gpu GPU-a 80 1\n{first}\ngpu GPU-b 80 1\n{second}\n"


class Machine:
    """A machine with two GPUs, whose UUIDs and processes are known before its errors."""

    def __init__(self, machine_of: MachineOf, processes: str = "") -> None:
        self.env = machine_of(TWO.format(first=processes, second=""))
        self._file = Path(self.env["FAKE_NVML"])
        self._lines = self._file.read_text().splitlines()
        self.uuids = [line.split()[1] for line in self._lines if line.startswith("gpu")]

    def errors_of(self, changes: list[str], ranks: dict[str, int], pids: dict[str, int] | None = None) -> Any:
        """The errors that are found. `changes`: what happens to the second GPU before each check."""
        program = (sys.executable, PROGRAMS / "watches_gpus.py", json.dumps(ranks), json.dumps(pids or {}))
        with started(*program, env=self.env, stdin=-1) as process:
            assert process.stdin is not None
            assert process.stdout is not None
            assert process.stdout.readline() == "watching\n"
            for change in changes:
                self._lines.append(change)
                new = self._file.with_suffix(".new")
                new.write_text("\n".join(self._lines))
                new.rename(self._file)
                process.stdin.write("\n")
                process.stdin.flush()
                assert process.stdout.readline() == "checked\n"
            out, err = process.communicate()
            assert process.returncode == 0, err
            return json.loads(out)


def test_xid_of_a_ranks_gpu_is_found_once_with_the_time_of_the_check_before(machine_of: MachineOf) -> None:
    machine = Machine(machine_of)
    before = time.monotonic()
    (found,) = machine.errors_of(["", "xid 79", ""], {machine.uuids[0]: 4, machine.uuids[1]: 5})
    assert (found["xid"], found["text"]) == (79, "Xid 79")
    assert found["gpu"] == {"rank": 5, "index": 1, "address": [0, 0x11, 0]}
    assert before < found["time"] < time.monotonic()


def test_errors_before_the_round_and_of_other_gpus_are_not_found(machine_of: MachineOf) -> None:
    machine = Machine(machine_of)
    Path(machine.env["FAKE_NVML"]).write_text("\n".join([*machine._lines, "xid 31", "ecc 3"]))
    machine._lines += ["xid 31", "ecc 3"]
    assert machine.errors_of([""], {machine.uuids[1]: 0}) == []
    assert machine.errors_of(["xid 79", "ecc 4"], {machine.uuids[0]: 0}) == []


@pytest.mark.parametrize(
    ("change", "text", "xid"),
    [
        ("ecc 5", "2 uncorrected ECC errors since the start of the round", None),
        ("lost", "the driver has lost the GPU", 79),
    ],
)
def test_new_ecc_errors_and_lost_gpus_are_found_at_the_end(
    machine_of: MachineOf, change: str, text: str, xid: int | None
) -> None:
    machine = Machine(machine_of)
    machine._lines.append("ecc 3")
    Path(machine.env["FAKE_NVML"]).write_text("\n".join(machine._lines))
    (found,) = machine.errors_of([change], {machine.uuids[1]: 5})
    assert (found["text"], found["xid"], found["time"], found["gpu"]["rank"]) == (text, xid, None, 5)


def test_gpu_that_the_script_has_chosen_is_that_of_the_rank_whose_process_uses_it(machine_of: MachineOf) -> None:
    machine = Machine(machine_of)
    machine._lines.append("process 4711 1")
    Path(machine.env["FAKE_NVML"]).write_text("\n".join(machine._lines))
    (found,) = machine.errors_of(["xid 31"], {}, {"2": 4710, "3": 4711})
    assert found["gpu"]["rank"] == 3
    assert machine.errors_of(["xid 31"], {}, {"2": 4710}) == []


def test_without_a_driver_nothing_is_found(tmp_path: Path) -> None:
    program = (sys.executable, PROGRAMS / "watches_gpus.py", "{}", "{}")
    with started(*program, env={"LD_LIBRARY_PATH": str(tmp_path)}, stdin=-1) as process:
        out, err = process.communicate("\n")
        assert (out, process.returncode) == ("watching\nchecked\n[]\n", 0), err
