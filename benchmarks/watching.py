"""What watching a run costs: the tiny MLP with and without, and a sample of the machine.

    python benchmarks/watching.py [--rounds 7]

All have a log point every 50 steps. Off: nothing else. Watched: the record of the run with its samples once a second,
and `ddpkit top` reading the ranks. With loggers: CSVLogger, JSONLinesLogger and TensorBoardLogger as well. The runs
take turns; each prints the time of its steps after the first 500. Writes its table to RESULTS.md.
"""

import argparse
import json
import os
import pty
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from statistics import median

from report import machine, table, write_section

STEPS, WARM = 8000, 500
SCRIPT = f"""
import json, sys, time
from pathlib import Path
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset
from ddp_kit import Callback, CSVLogger, JSONLinesLogger, TensorBoardLogger, Trainer, TrainerConfig

class Clock(Callback):
    def on_step(self, trainer):
        if trainer.step == {WARM}:
            self.began = time.perf_counter()
        if trainer.step == {STEPS}:
            self.seconds = time.perf_counter() - self.began

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 1))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, fused=True)
data = TensorDataset(torch.randn(4096, 64), torch.randn(4096, 1))
clock = Clock()
loggers = []
if sys.argv[1] == "loggers":
    loggers = [CSVLogger("run.csv"), JSONLinesLogger("run.jsonl"), TensorBoardLogger("tensorboard")]
config = TrainerConfig(max_steps={STEPS}, micro_batch_size=8, log_every_steps=50)
loss_fn = lambda m, batch: F.mse_loss(m(batch[0]), batch[1])
trainer = Trainer(model, optimizer, loss_fn, config, callbacks=[clock, *loggers])
trainer.fit(data)
if trainer.world.is_main:
    Path("seconds.json").write_text(json.dumps(clock.seconds / ({STEPS} - {WARM})))
"""
SAMPLED_SECONDS = 30
KINDS = ("off", "watched", "loggers")


def microseconds(kind: str, ranks: int) -> float:
    """Of an optimizer step."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "train.py").write_text(SCRIPT)
        ddpkit = str(Path(sys.executable).with_name("ddpkit"))
        kept = [] if kind == "off" else ["--log-dir", "logs"]
        words = [ddpkit, "launch", "--nproc-per-node", str(ranks), *kept, "train.py", kind]
        with nullcontext() if kind == "off" else top_in_terminal(ddpkit):
            subprocess.run(words, cwd=folder, check=True, capture_output=True, timeout=300)
        return 1e6 * float(json.loads((folder / "seconds.json").read_text()))


@contextmanager
def top_in_terminal(ddpkit: str) -> Iterator[None]:
    """`ddpkit top`, in a terminal whose output nobody keeps."""
    ours, theirs = pty.openpty()
    watching = subprocess.Popen([ddpkit, "top"], stdin=theirs, stdout=theirs, stderr=theirs)
    os.close(theirs)
    reader = threading.Thread(target=read_to_end, args=(ours,))
    reader.start()
    try:
        yield
    finally:
        os.write(ours, b"q")
        watching.wait()
        reader.join()
        os.close(ours)


def read_to_end(terminal: int) -> None:
    with suppress(OSError):  # the last process has closed its end
        while os.read(terminal, 1 << 16):
            pass


def sampling_share() -> float:
    """The share of a core that the launcher's samples take."""
    from ddp_kit.launcher.record import RecordKeeper

    with tempfile.TemporaryDirectory() as name:
        keeper = RecordKeeper(Path(name), Path(name), 0)
        keeper.start()
        began = time.process_time()
        time.sleep(SAMPLED_SECONDS)
        used = time.process_time() - began
        keeper.stop()
    return used / SAMPLED_SECONDS


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    rounds = parser.parse_args().rounds
    rows = []
    for ranks in (1, 2):
        found: dict[str, list[float]] = {kind: [] for kind in KINDS}
        for number in range(rounds):
            for turn in range(len(KINDS)):
                kind = KINDS[(number + turn) % len(KINDS)]
                found[kind].append(microseconds(kind, ranks))
        cells = [f"{median(found['off']):.0f}"]
        for kind in KINDS[1:]:
            ratio = median(one / off for one, off in zip(found[kind], found["off"], strict=True))
            cells.append(f"{median(found[kind]):.0f} ({ratio:.3f})")
        rows.append([str(ranks), *cells])
    text = (
        "## Watching\n\n`python benchmarks/watching.py`. Microseconds per optimizer step of the tiny MLP with a log "
        f"point every 50 steps: medians of {rounds} interleaved rounds; in brackets the median ratio to off. Watched: "
        "the record, its samples and `ddpkit top`. With loggers: CSV, JSON lines and TensorBoard as well.\n\n"
        f"{machine(('torch', 'ddpkit', 'tensorboard'))}\n\n"
        f"{table(['ranks', 'off', 'watched', 'with loggers'], rows)}\n\n"
        f"Sampling the machine once per second takes {sampling_share():.3%} of a core."
    )
    print(text)
    write_section("watching", text)


if __name__ == "__main__":
    main()
