"""What a checkpoint in object storage costs: how long the loop stands still, bytes on the wire, memory of the writer.

    python benchmarks/storage.py [--sizes 10,100,500] [--saves 8] [--quick]

Prints a table and writes it into benchmarks/RESULTS.md. torch.distributed.checkpoint is compared where s3fs is
installed; it pins another botocore than moto, so give it an environment of its own. The store is a local S3 server, so
the times until a checkpoint is complete are those of this server and of the loopback network.
"""

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from threading import Event, Thread

import psutil
import torch
import torch.distributed.checkpoint as dcp
from report import machine, table, write_section
from torch import nn
from torch.utils.data import TensorDataset

sys.path.insert(0, str(Path(__file__).parents[1]))
from ddp_kit import Trainer, TrainerConfig
from ddp_kit.env import CHECKPOINT_WRITER
from tests.support.object_store import ObjectStore, Proxy

try:
    import s3fs  # noqa: F401
    from torch.distributed.checkpoint._fsspec_filesystem import FsspecWriter

    HAS_DCP = True
except ImportError:
    HAS_DCP = False
LAYERS, FEATURES, BATCH = 24, 8, 8
QUIET_STEPS = 3
FIRST = 2  # saves that allocate memory and do not count
ABOUT = """\
One process trains with AdamW; the state is the model and its AdamW state. A save on disk (/var/tmp) and one in the
store, a local S3 server (moto), alternate; medians, in brackets the largest. "Stands still" is the time of
`trainer.save()` in the loop. A checkpoint is complete when its manifest is in the store, or its folder is synced.
"On the wire" are all bytes that were sent to the store for a save, divided by the size of the state. "Memory of the
writer" is its anonymous memory: the state itself is in memory that it shares with the training process. DCP is
`torch.distributed.checkpoint.save` with its `FsspecWriter` and s3fs: it returns when the checkpoint is in the store."""


@dataclass
class Found:
    """Measurements of one size and place."""

    stood: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    anonymous: int = 0


class Watch(Thread):
    """The largest anonymous memory of the writer processes of this process."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.largest = 0
        self.done = Event()

    def run(self) -> None:
        while not self.done.wait(0.005):
            for child in psutil.Process().children():
                try:
                    if CHECKPOINT_WRITER in " ".join(child.cmdline()):
                        status = Path(f"/proc/{child.pid}/status").read_text()
                        self.largest = max(self.largest, int(status.partition("RssAnon:")[2].split()[0]) << 10)
                except (psutil.Error, OSError, IndexError):
                    continue


def network(megabytes: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model whose weights and Adam's state are so many megabytes."""
    width = max(1, int((megabytes * 1e6 / 12 / LAYERS) ** 0.5))
    layers = chain.from_iterable((nn.Linear(width, width), nn.ReLU()) for _ in range(LAYERS))
    model = nn.Sequential(nn.Linear(FEATURES, width), *layers, nn.Linear(width, 1))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)


def saved_by_dcp(url: str, megabytes: int) -> Iterator[float]:
    """Seconds of one save after the other."""
    model, optimizer = network(megabytes)
    while True:
        for _ in range(QUIET_STEPS):
            model(torch.randn(BATCH, FEATURES)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        began = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(state, storage_writer=FsspecWriter(url))
        yield time.perf_counter() - began


def trainer_in(place: str, megabytes: int) -> tuple[Trainer, TensorDataset]:
    model, optimizer = network(megabytes)
    config = TrainerConfig(
        global_batch_size=BATCH, max_steps=100_000, log_every_steps=100_000, checkpoint={"dir": place, "keep_last": 1}
    )
    trainer = Trainer(
        model,
        optimizer,
        lambda model, batch: nn.functional.mse_loss(model(batch[0]), batch[1]),
        config,
    )
    return trainer, TensorDataset(torch.randn(4096, FEATURES), torch.randn(4096, 1))


def compare(megabytes: int, saves: int, store: ObjectStore, folder: Path) -> tuple[dict[str, Found], int]:
    """Measurements by place, those of DCP under "dcp", and the size of the state in bytes."""
    places = {"disk": str(folder / str(megabytes)), "store": f"s3://{store.bucket}/run-{megabytes}"}
    found = {name: Found() for name in (*places, "dcp")}
    by_dcp = saved_by_dcp(f"s3://{store.bucket}/dcp-{megabytes}", megabytes)
    runs = {}
    for name, place in places.items():
        trainer, data = trainer_in(place, megabytes)
        runs[name] = trainer, trainer.steps(data)
    for number in range(FIRST + saves):
        for name, (trainer, steps) in runs.items():
            for _ in range(QUIET_STEPS):
                next(steps)
            watch = Watch()
            watch.start()
            began = time.perf_counter()
            trainer.save()
            stood = time.perf_counter() - began
            trainer._run.checkpoints._disk.saver.wait()
            whole = time.perf_counter() - began
            watch.done.set()
            watch.join()
            if number >= FIRST:
                found[name].stood.append(stood)
                found[name].whole.append(whole)
                found[name].anonymous = max(found[name].anonymous, watch.largest)
        if HAS_DCP:
            stood = next(by_dcp)
            found["dcp"].stood += [stood] if number >= FIRST else []
    size = sum(size for name, size in store.keys(f"run-{megabytes}/").items() if "/step-" in name)
    for _, steps in runs.values():
        steps.close()
    return found, size


def sent(megabytes: int, store: ObjectStore) -> float:
    """Bytes on the wire for one save, divided by the size of the state."""
    with Proxy(store) as proxy:
        os.environ.update(proxy.environment)
        trainer, data = trainer_in(f"s3://{store.bucket}/wire-{megabytes}", megabytes)
        steps = trainer.steps(data)
        next(steps)
        before = proxy.bytes_sent
        trainer.save()
        trainer._run.checkpoints._disk.saver.wait()
        size = sum(size for name, size in store.keys(f"wire-{megabytes}/").items() if "/step-" in name)
        wire = proxy.bytes_sent - before
        steps.close()
    os.environ.update(store.environment)
    return wire / size


def milliseconds(values: list[float]) -> str:
    return f"{1000 * statistics.median(values):.1f} ({1000 * max(values):.1f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sizes", default="10,100,500")
    parser.add_argument("--saves", type=int, default=8)
    parser.add_argument("--quick", action="store_true", help="the smallest size, and no table in RESULTS.md")
    args = parser.parse_args()
    sizes = [int(size) for size in args.sizes.split(",")]
    rows = []
    folder = Path(tempfile.mkdtemp(prefix="storage-", dir="/var/tmp"))
    with ObjectStore() as store:
        os.environ.update(store.environment)
        for megabytes in sizes[:1] if args.quick else sizes:
            found, size = compare(megabytes, args.saves, store, folder)
            wire = sent(megabytes, store)
            disk, bucket = found["disk"], found["store"]
            rows.append(
                [
                    f"{size / 1e6:.0f}",
                    milliseconds(disk.stood),
                    milliseconds(bucket.stood),
                    milliseconds(found["dcp"].stood) if HAS_DCP else "",
                    f"{statistics.median(disk.whole):.2f}",
                    f"{statistics.median(bucket.whole):.2f}",
                    f"{wire:.4f}",
                    f"{disk.anonymous / 1e6:.0f}",
                    f"{bucket.anonymous / 1e6:.0f}",
                ]
            )
    shutil.rmtree(folder, ignore_errors=True)
    header = ["MB", "stands still, disk, ms", "store, ms", "DCP, ms", "complete, disk, s", "store, s", "on the wire"]
    header += ["memory of the writer, disk, MB", "store, MB"]
    text = table(header, rows)
    about = f"`python benchmarks/storage.py` on {machine(['torch', 'obstore', 'moto', 's3fs', 'ddpkit'])}. {ABOUT}"
    print(f"{about}\n\n{text}")
    if not args.quick:
        write_section("storage", f"{about}\n\n{text}")


if __name__ == "__main__":
    main()
