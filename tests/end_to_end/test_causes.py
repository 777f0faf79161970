"""What makes a run slow is named: while it runs, by `ddpkit top` and by a line of advice; later, by the report."""

import json
import os
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.support.launching import DDPKIT, PROGRAMS, clean_environment

pytestmark = pytest.mark.slow


class SlowJob:
    """A job that runs until it is told to end."""

    def __init__(self, script: Path, ddpkit: Callable[..., Any], folder: Path, ranks: int, cause: str) -> None:
        self.script, self.ddpkit, self.end, self.lines = script, ddpkit, folder / "end", list[str]()
        words = ["launch", "--nproc-per-node", str(ranks), script, cause, self.end]
        self.process = subprocess.Popen(
            [DDPKIT, *words],
            env=clean_environment(),
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._advised = threading.Event()
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as output:
            for line in output:
                self.lines.append(line)
                if "advice: " in line:
                    self._advised.set()
        self._advised.set()  # the job has ended

    @property
    def log(self) -> str:
        return "".join(self.lines)

    def reading(self) -> dict[str, Any]:
        """What `ddpkit top` shows once the job has named a cause."""
        self._advised.wait()
        while True:  # the heartbeat follows the log within a step
            jobs = json.loads(self.ddpkit("top", "--once", "--json").stdout)
            found = [each for each in jobs if each["script"] == str(self.script)]
            if found and found[0]["ranks"][0]["advice"]:
                return dict(found[0])
            assert self.process.poll() is None, self.log

    def close(self) -> None:
        self.end.touch()
        code = self.process.wait()
        self._reader.join()
        assert code == 0, self.log


@pytest.mark.parametrize(
    ("cause", "ranks", "said"),
    [
        ("straggler", 2, "rank 1 takes "),
        ("data", 1, "data "),
        (
            "synchronisation",
            1,
            "host-device synchronisation, or steps that are too small: the GPU ran out of work in 100%",
        ),
    ],
)
def test_top_advice_and_report_name_the_cause_of_a_slow_run(
    script: Callable[..., Path], ddpkit: Callable[..., Any], tmp_path: Path, cause: str, ranks: int, said: str
) -> None:
    # Under another name in each process: `ddpkit top` shows all jobs here, those of other tests too.
    path = script((PROGRAMS / "slow_run.py").read_text(), f"{cause}_{os.getpid()}.py")
    job = SlowJob(path, ddpkit, tmp_path, ranks, cause)
    try:
        found = job.reading()
        shown = ddpkit("top", "--once", env={"COLUMNS": "120"}).stdout.splitlines()
    finally:
        job.close()
    first, *_ = found["ranks"]
    advice = first["advice"]
    assert advice.startswith(said)
    assert f"advice: {advice}" in job.log
    title = next(number for number, line in enumerate(shown) if line.startswith(job.script.name))
    line = next(number for number in range(title + 1, len(shown)) if shown[number].startswith("advice: "))
    assert line == title + 2, "after the title and the progress"
    report = ddpkit("report", tmp_path / "run", "--out", tmp_path / "report.html")
    assert f"  {advice} (at step " in report.stdout
    if cause == "straggler":
        assert [each["waits_for"] for each in found["ranks"]] == [1, None]
    if cause == "data":
        assert first["data"] > 0.5
        heads, row = shown[line + 1 : line + 3]
        end = heads.index("data") + len("data")  # not by words: a phase may have two
        assert int(row[:end].split()[-1].rstrip("%")) > 50
