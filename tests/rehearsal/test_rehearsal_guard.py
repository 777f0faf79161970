"""The guard of a rehearsal: no way to write a file changes one that existed before. Each way runs in a forked child."""

import csv
import dbm.dumb
import gzip
import json
import lzma
import mmap
import os
import pickle
import shutil
import sqlite3
import tarfile
import tempfile
import time
import zipfile
from collections.abc import Callable
from logging import FileHandler, makeLogRecord
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors
import safetensors.numpy
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.package import PackageExporter

from ddp_kit.rehearsal.lines import ELSEWHERE_FILE, Instructions
from ddp_kit.rehearsal.watch import install

TENSORS = {"weight": torch.ones(2)}
NET = nn.Linear(2, 2)


def _with_pickle(path: Path) -> None:
    with path.open("wb") as file:
        pickle.dump(TENSORS, file)


def _torch_save_of_a_file(path: Path) -> None:
    with path.open("wb") as file:
        torch.save(TENSORS, file)


def _replace(path: Path) -> None:
    torch.save(TENSORS, path.with_suffix(".new"))
    path.with_suffix(".new").replace(path)


def _mapped(path: Path) -> None:
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as content:
        content[0] = 0


def _in_a_zip(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("a", "b")


def _in_a_tar(path: Path) -> None:
    with tarfile.open(path, "w") as file:
        file.add(__file__)


def _through_a_link(path: Path) -> None:
    path.with_suffix(".link").symlink_to(path)
    path.with_suffix(".link").write_text("other")


def _relative(path: Path) -> None:
    os.chdir(path.parent)
    Path(path.name).write_text("other")


def _low_level(path: Path) -> None:
    descriptor = os.open(path, os.O_WRONLY)
    os.write(descriptor, b"other")


def _emptied_first(path: Path) -> None:
    path.chmod(0o600)
    path.write_text("other")


def _in_two_steps(path: Path) -> None:
    os.link(path, path.with_suffix(".second"))
    path.write_text("other")


def _packed(path: Path) -> None:
    with PackageExporter(path) as exporter:
        exporter.save_text("a", "b", "c")


def _profiled(path: Path) -> None:
    with torch.profiler.profile() as profiler:
        torch.ones(2)
    profiler.export_chrome_trace(str(path))


def _logged(path: Path) -> None:
    FileHandler(path).emit(makeLogRecord({"msg": "other"}))


def _moved_folder(path: Path) -> None:
    path.parent.rename(f"{path.parent}-moved")


def _csv(path: Path) -> None:
    with path.open("a") as file:
        csv.writer(file).writerow([1, 2])


WAYS: dict[str, Callable[[Path], Any]] = {
    "torch.save(path)": lambda path: torch.save(TENSORS, path),
    "torch.save(path), old format": lambda path: torch.save(TENSORS, path, _use_new_zipfile_serialization=False),
    "torch.save(file)": _torch_save_of_a_file,
    "torch.save and replace": _replace,
    "torch.jit.save": lambda path: torch.jit.save(torch.jit.script(NET), path),
    "ScriptModule.save": lambda path: torch.jit.script(NET).save(path),
    "ScriptFunction.save": lambda path: torch.jit.trace(lambda x: x + 1, torch.ones(1)).save(str(path)),
    "torch.export.save": lambda path: torch.export.save(torch.export.export(NET, (torch.ones(1, 2),)), path),
    "torch.package": _packed,
    "profiler": _profiled,
    "safetensors.torch.save_file": lambda path: safetensors.torch.save_file(TENSORS, path),
    "safetensors.torch.save_model": lambda path: safetensors.torch.save_model(NET, str(path)),
    "safetensors.numpy.save_file": lambda path: safetensors.numpy.save_file({"a": np.ones(2)}, path),
    "safetensors.serialize_file": lambda path: safetensors.serialize_file({}, path),
    "distributed checkpoint": lambda path: dcp.save(TENSORS, checkpoint_id=path.parent, no_dist=True),
    "numpy.save": lambda path: np.save(path.open("wb"), np.ones(2)),
    "numpy.savez": lambda path: np.savez(path.open("r+b"), a=np.ones(2)),
    "numpy.savetxt": lambda path: np.savetxt(path, np.ones(2)),
    "ndarray.tofile": lambda path: np.ones(2).tofile(path),
    "numpy.memmap": lambda path: np.memmap(path, mode="r+", shape=(1,), dtype=np.uint8),
    "mmap": _mapped,
    "pickle": _with_pickle,
    "json": lambda path: json.dump({}, path.open("w")),
    "csv": _csv,
    "open for appending": lambda path: path.open("a").write("other"),
    "bytes path": lambda path: open(os.fsencode(path), "w"),  # noqa: PTH123, SIM115
    "write_bytes": lambda path: path.write_bytes(b"other"),
    "os.open": _low_level,
    "relative path": _relative,
    "link": _through_a_link,
    "logging": _logged,
    "gzip": lambda path: gzip.open(path, "wb"),  # noqa: SIM115
    "lzma": lambda path: lzma.open(path, "wb"),  # noqa: SIM115
    "zipfile": _in_a_zip,
    "tarfile": _in_a_tar,
    "tempfile and os.replace": lambda path: os.replace(tempfile.mkstemp(dir=path.parent)[1], path),  # noqa: PTH105
    "dbm": lambda path: dbm.dumb.open(str(path), "n"),  # noqa: SIM115
    "sqlite3": lambda path: sqlite3.connect(path).execute("CREATE TABLE other (x)"),
    "sqlite3, URI": lambda path: sqlite3.connect(f"file:{path}?mode=rw", uri=True).execute("CREATE TABLE other (x)"),
    "shutil.copyfile": lambda path: shutil.copyfile(__file__, path),
    "shutil.copy2": lambda path: shutil.copy2(__file__, path),
    "shutil.copytree": lambda path: shutil.copytree(Path(__file__).parent, path.parent, dirs_exist_ok=True),
    "shutil.move onto it": lambda path: shutil.move(shutil.copy(__file__, f"{path}.new"), path),
    "shutil.move away": lambda path: shutil.move(path, f"{path}.old"),
    "shutil.rmtree": lambda path: shutil.rmtree(path.parent),
    "rename": lambda path: path.rename(f"{path}.old"),
    "rename of its folder": _moved_folder,
    "unlink": lambda path: path.unlink(),
    "os.truncate": lambda path: os.truncate(path, 1),
    "chmod, then open": _emptied_first,
    "hard link, then open": _in_two_steps,
}
_NAMES = {"shutil.copytree": Path(__file__).name, "distributed checkpoint": ".metadata", "dbm": "file.dat"}


def _ended_in_child(folder: Path, way: Callable[[Path], Any], path: Path, began: float) -> bool:
    """Whether the guard has ended a child process before `way` returned."""
    (folder / "run").mkdir(exist_ok=True)
    Instructions(launch=0, steps=9, steps_after_restart=9, folders=(str(folder / "own"),), began=began).write(
        folder / "run"
    )
    child = os.fork()
    if not child:
        code = 2
        try:
            os.environ["DDPKIT_REHEARSAL"] = str(folder / "run")
            install()
            way(path)
            code = 1
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) != 2, "the way to write has failed"
    return os.waitstatus_to_exitcode(status) == 0


def _now() -> float:
    """The current time, once files that are created have a later time. The kernel's clock for files is coarse."""
    began = time.time()
    with tempfile.NamedTemporaryFile() as file:
        while Path(file.name).stat().st_ctime < began:
            os.utime(file.name)
    return began


def _existing(folder: Path, name: str) -> Path:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    if "sqlite3" in name:
        connection = sqlite3.connect(path)
        connection.execute("CREATE TABLE mine (x)")
        connection.close()
    else:
        path.write_text("of the user")
    return path


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", WAYS)
def test_file_that_existed_before_the_rehearsal_is_not_changed(tmp_path: Path, name: str) -> None:
    default = "sqlite3.db" if "sqlite3" in name else "file.pt2"
    path = _existing(tmp_path / "results", _NAMES.get(name, default))
    before = path.read_bytes()
    target = path.with_suffix("") if name == "dbm" else path
    began = _now()
    assert _ended_in_child(tmp_path, WAYS[name], target, began)
    assert path.read_bytes() == before
    told = Path((tmp_path / "run" / ELSEWHERE_FILE).read_text())
    assert told in (path, path.parent)
    for path in tmp_path.glob("**/file.link"):
        path.unlink()  # that the call has made before it was ended
    # Without a file to protect, the same call is not ended.
    assert not _ended_in_child(tmp_path, WAYS[name], target, began=0.0)


def _reads(path: Path) -> None:
    path.read_bytes()
    assert sqlite3.connect(path).execute("SELECT count(*) FROM mine").fetchone() == (0,)
    np.memmap(path, mode="r", dtype=np.uint8)
    path.stat()


def _writes_new_files(path: Path) -> None:
    own, new = path.parents[1] / "own", path.with_name("new")
    for target in (own, new):
        for _ in range(2):
            target.write_text("of this run")
        target.rename(f"{target}.moved").unlink()


@pytest.mark.parametrize("way", [_reads, _writes_new_files])
def test_rehearsal_may_read_everything_and_change_what_it_has_created(
    tmp_path: Path, way: Callable[[Path], None]
) -> None:
    path = _existing(tmp_path / "results", "sqlite3.db")
    assert not _ended_in_child(tmp_path, way, path, _now())


@pytest.mark.parametrize("name", ["__pycache__/a.pyc", ".cache/model.bin", "lock"])
def test_rehearsal_may_change_caches_and_empty_lock_files(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text("" if name == "lock" else "old")
    assert not _ended_in_child(tmp_path, lambda path: path.write_text("new"), path, _now())
