"""What makes a run slow is named: while it runs, by `ddpkit top` and by a line of advice; later, by the report."""

import json
import os
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from launching import DDPKIT, clean_environment

pytestmark = pytest.mark.slow

TRAIN = """
import os, sys, time
from itertools import count
from pathlib import Path
import torch
from torch import nn
from torch.utils.data import Dataset
from ddp_kit import Trainer, TrainerConfig, timing
from ddp_kit.trainer import trainer as loop

CAUSE, end = sys.argv[1], Path(sys.argv[2])
# All sleep for much longer than they compute, however busy the cores are: so the cause alone stands out.
SLEEPS = {"straggler": 0.1 * int(os.environ["RANK"]), "data": 0.0, "compile": 0.05, "synchronisation": 0.04}


class Samples(Dataset):
    def __len__(self):
        return 64

    def __getitem__(self, index):
        if CAUSE == "data":
            time.sleep(0.02)
        return torch.ones(3)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.rounds = nn.Linear(3, 3), 1

    def forward(self, x):
        for _ in range(self.rounds):  # unrolled: each number of rounds has a graph of its own
            x = torch.tanh(self.layer(x))
        return x


class Gpu:  # a stand-in on the host's clock, which finishes its work when the host waits for it
    def __init__(self):
        self.numbers, self.recorded, self.finished = count(1), 0, 0

    def wait(self):
        self.finished = self.recorded

    def has_finished(self):
        return self.finished == self.recorded


class Event:
    def record(self):
        self.number, self.time = next(gpu.numbers), time.perf_counter()
        gpu.recorded = self.number

    def query(self):
        return self.number <= gpu.finished

    def elapsed_time(self, other):
        return 1000 * (other.time - self.time)


def loss_fn(model, batch):
    time.sleep(SLEEPS[CAUSE])
    loss = model(batch).square().mean()
    if CAUSE == "synchronisation":
        gpu.wait()  # loss.item()
    return loss


gpu = Gpu()
if CAUSE == "synchronisation":
    loop.step_clock = lambda device: timing.DeviceClock(Event, gpu.has_finished)
model = Model()
config = TrainerConfig(
    global_batch_size=4,
    log_every_steps=2 if CAUSE == "compile" else 10,
    max_steps=10**6,
    compile="model" if CAUSE == "compile" else None,
    checkpoint={"dir": "run"},
)
trainer = Trainer(model, torch.optim.SGD(model.parameters(), lr=0.01), loss_fn, config)
for step in trainer.steps(Samples()):
    model.rounds = min(1 + step.number // 2, 4)
    if step.number % 10 == 0 and end.exists():
        trainer.stop()
"""


class Job:
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
            "compile",
            1,
            "torch.compile recompiled in the intervals that ended at steps 4, 6 and 8 (4 graphs so far)",
        ),
        (
            "synchronisation",
            1,
            "host-device synchronisation, or steps that are too small: the GPU ran out of work in 100%",
        ),
    ],
)
def test_the_cause_of_a_slow_run_is_named(
    script: Callable[..., Path], ddpkit: Callable[..., Any], tmp_path: Path, cause: str, ranks: int, said: str
) -> None:
    path = script(TRAIN, f"{cause}_{os.getpid()}.py")  # `ddpkit top` shows all jobs here, those of other tests too
    job = Job(path, ddpkit, tmp_path, ranks, cause)
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
