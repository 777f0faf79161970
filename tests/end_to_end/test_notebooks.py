"""`ddp_kit.launch` in cells of a notebook, with a real kernel; the example notebooks."""

import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from queue import Empty
from typing import Any

import psutil
import pytest

from tests.support.job_processes import has_ended
from tests.support.launching import DDPKIT, ROOT, clean_environment, run, seconds, wait_until

FIRST = """
import os
from ddp_kit import launch

offset = 40

def prints(more):
    print("in a cell:", offset + more)

launch(prints, 1, processes=2)
"""
SECOND = """
offset = 50
launch(prints, 1, processes=2)
"""
FAILS = """
def fails():
    raise ValueError("no good")

launch(fails, processes=2)
"""
WAITS = """
import os, time

def waits():
    print("now", os.environ["RANK"], flush=True)
    time.sleep(1000)

launch(waits, processes=2)
"""


class Notebook:
    """A real kernel."""

    def __init__(self, folder: Path) -> None:
        manager = pytest.importorskip("jupyter_client", reason="needs pip install ipykernel nbclient").KernelManager
        self.folder = folder
        self.runtime = tempfile.TemporaryDirectory()  # the path of a socket has at most 107 bytes
        self.kernel = manager(kernel_name="python3")
        self.kernel.start_kernel(cwd=str(folder), env=clean_environment() | {"XDG_RUNTIME_DIR": self.runtime.name})
        self.client = self.kernel.blocking_client()
        self.client.start_channels()
        self.client.wait_for_ready(timeout=seconds(60))

    @property
    def pid(self) -> int:
        return int(self.kernel.provisioner.pid)

    def run(self, cell: str, *until: str) -> str:
        """What the cell prints, and its error, when it has ended, or as soon as it has printed all of `until`."""
        self.client.execute(cell)
        return self.output(*until)

    def output(self, *until: str) -> str:
        shown, deadline = "", time.monotonic() + seconds(120)
        while True:
            try:
                message = self.client.get_iopub_msg(timeout=1)
            except Empty:
                assert time.monotonic() < deadline, shown
                continue
            kind, content = message["msg_type"], message["content"]
            if kind == "stream":
                shown += content["text"]
            elif kind == "error":
                shown += "\n".join(content["traceback"])
            printed = bool(until) and all(each in shown for each in until)
            if printed or (kind, content.get("execution_state")) == ("status", "idle"):
                return shown

    def kept(self) -> str:
        """What `ddpkit warm` prints."""
        return run(DDPKIT, "warm", env={"XDG_RUNTIME_DIR": self.runtime.name}).stdout

    def launches(self) -> list[psutil.Process]:
        """What `launch` has started in this notebook and still runs, whoever its parent is by now."""
        ours = [
            each for each in psutil.process_iter() if _environment(each).get("XDG_RUNTIME_DIR") == self.runtime.name
        ]
        return [each for each in ours if each.pid != self.pid]


def _environment(process: psutil.Process) -> dict[str, str]:
    try:
        return process.environ()
    except psutil.Error:  # it has ended, or is another user's
        return {}


def _command_line(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def wait_for_ends(processes: Iterable[psutil.Process], what: str) -> None:
    wait_until(lambda: all(has_ended(each.pid) for each in processes), what)


@pytest.fixture
def notebook(tmp_path: Path) -> Iterator[Notebook]:
    notebook = Notebook(tmp_path)
    yield notebook
    notebook.client.stop_channels()
    notebook.kernel.shutdown_kernel(now=True)
    run(DDPKIT, "warm", "stop", env={"XDG_RUNTIME_DIR": notebook.runtime.name})
    notebook.runtime.cleanup()


@pytest.mark.slow
def test_notebook_cells_launch_functions_that_they_define(notebook: Notebook) -> None:
    shown = notebook.run(FIRST)
    assert "[rank 0] in a cell: 41" in shown
    assert "[rank 1] in a cell: 41" in shown
    wait_until(lambda: "0 launches" in notebook.kept(), notebook.kept)
    shown = notebook.run(SECOND)
    assert "in a cell: 51" in shown, "variables are copied at each call"
    assert "1 launches" in notebook.kept()
    shown = notebook.run(FAILS)
    assert "ValueError: no good" in shown
    assert "rank 0 failed first" in shown or "rank 1 failed first" in shown
    assert "now" in notebook.run(WAITS, "now 0", "now 1")
    ranks = [each for each in notebook.launches() if "function.py waits" in _command_line(each)]
    assert len(ranks) == 3, "two ranks, and the client of the launch"
    notebook.kernel.interrupt_kernel()
    assert "KeyboardInterrupt" in notebook.output()
    wait_for_ends(ranks, "ended, which are interrupted")
    assert "now" in notebook.run(WAITS, "now 0", "now 1")
    job = [each for each in notebook.launches() if f"pid {each.pid}," not in notebook.kept()]
    assert len(job) >= 5, "the client, the launcher, its warm server, and two ranks"
    psutil.Process(notebook.pid).kill()
    wait_for_ends(job, "ended, as no job outlives the kernel")


TEMPORARY = """
import os, tempfile
from pathlib import Path
from ddp_kit import launch

folder = Path.cwd() / "temporary"
folder.mkdir()
os.environ["TMPDIR"] = str(folder)
tempfile.tempdir = None  # it is found anew
"""


@pytest.mark.slow
def test_notebook_after_ten_launches_leaves_no_process_or_file(notebook: Notebook) -> None:
    notebook.run(TEMPORARY)
    assert notebook.run("print([launch(os.getpid, processes=2) for _ in range(10)])").count("[rank") == 0
    wait_until(lambda: ["warm.kept" in _command_line(each) for each in notebook.launches()] == [True], notebook.kept)
    notebook.kernel.restart_kernel()
    wait_for_ends(notebook.launches(), "the kept process, which ends with the kernel")
    assert not [*(notebook.folder / "temporary").iterdir()]


@pytest.mark.slow
def test_notebook_whose_kernel_is_killed_leaves_the_kept_process(notebook: Notebook) -> None:
    notebook.run("import os; from ddp_kit import launch; launch(os.getpid, processes=2)")
    wait_until(lambda: "0 launches" in notebook.kept(), notebook.kept)
    notebook.kernel.restart_kernel(now=True)
    (kept,) = notebook.launches()
    assert "warm.kept" in _command_line(kept)
    assert "stopped" in run(DDPKIT, "warm", "stop", env={"XDG_RUNTIME_DIR": notebook.runtime.name}).stdout
    wait_for_ends([kept], "the kept process")


PRINTS = """
import os, sys
from ddp_kit import launch

def prints():
    lines = [f"line {number} \\u20ac\\u20ac\\u20ac" for number in range(20000)]  # three bytes each: reads end inside
    print("\\n".join(lines))
    print("the end of", os.environ["RANK"], end="", file=sys.stderr)

launch(prints, processes=2)
"""


@pytest.mark.slow
def test_notebook_output_is_complete_and_no_character_is_broken(notebook: Notebook) -> None:
    shown = notebook.run(PRINTS)
    for rank in range(2):
        lines = [line for line in shown.splitlines() if line.startswith(f"[rank {rank}] line ")]
        assert lines == [f"[rank {rank}] line {number} \u20ac\u20ac\u20ac" for number in range(20000)]
        assert f"the end of {rank}" in shown


# --- the examples ----------------------------------------------------------------------------------------------------

EXAMPLES = ROOT / "examples" / "notebooks"


def _executed(name: str, folder: Path) -> Any:
    """The notebook with its outputs. A cell that raises must have the tag `raises-exception`, and raise."""
    nbformat = pytest.importorskip("nbformat", reason="needs pip install ipykernel nbclient")
    client = pytest.importorskip("nbclient", reason="needs pip install ipykernel nbclient").NotebookClient
    notebook = nbformat.read(EXAMPLES / name, as_version=4)
    where = {"metadata": {"path": str(folder)}}
    done = client(notebook, timeout=seconds(200), kernel_name="python3", resources=where).execute()
    for cell in done.cells:
        raised = any(each.output_type == "error" for each in cell.get("outputs", ()))
        assert raised == ("raises-exception" in cell.metadata.get("tags", ())), cell.source
    return done


def _shown(notebook: Any, cell: str) -> str:
    """The output of the cell with this id, as text."""
    (found,) = (each for each in notebook.cells if each.id == cell)
    parts = [each.get("text") or each.get("data", {}).get("text/plain") or each.evalue for each in found.outputs]
    return "".join(parts)


@pytest.mark.slow
def test_digits_notebook_trains_and_shows_readable_progress(tmp_path: Path) -> None:
    pytest.importorskip("sklearn", reason="needs pip install scikit-learn")
    notebook = _executed("digits.ipynb", tmp_path)
    shown = _shown(notebook, "train")
    assert float(shown.rpartition("test accuracy: ")[2].partition("%")[0]) > 95
    lines = [line for line in shown.splitlines() if "INFO    step " in line]
    assert [line.split()[3] for line in lines] == [f"{step}/230" for step in (50, 100, 150, 200, 230)]
    assert not {"\r", "\x1b"} & {*shown}, "lines, as no terminal is there"
    assert "step 230" in _shown(notebook, "history")
    assert "this is a" in _shown(notebook, "predict")


@pytest.mark.slow
def test_results_and_errors_notebook_shows_results_and_exceptions(tmp_path: Path) -> None:
    notebook = _executed("results_and_errors.ipynb", tmp_path)
    assert _shown(notebook, "first").endswith("21")
    assert "rank 1 has 20, the sum is 320" in _shown(notebook, "second")
    assert "320 after" in _shown(notebook, "second")
    assert "list index out of range" in _shown(notebook, "fails")
    assert "rank 1 failed first" in _shown(notebook, "fails")
    assert "lock is a lock" in _shown(notebook, "refused")
