"""The warm server and its line to the launcher; with a real server where one is needed."""

import json
import os
import select
import signal
import socket
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from ddp_kit.launcher.processes import Child, is_stopped
from ddp_kit.launcher.program import Program
from ddp_kit.launcher.warm import client, scan
from ddp_kit.launcher.warm.client import Process, WarmServer
from ddp_kit.launcher.warm.messages import (
    Channel,
    Clear,
    Ended,
    FolderMade,
    Import,
    ImportDone,
    Kill,
    MakeFolder,
    Message,
    Start,
    Started,
)
from ddp_kit.launcher.warm.worker import _leave_note
from ddp_kit.launcher.wire import ClosedError
from tests.support.launching import PROGRAMS, clean_environment, launch, seconds, wait_until
from tests.support.launching import started as running


def a_program(path: Path | str, *arguments: str, module: bool = False) -> Program:
    return Program(sys.executable, str(path), arguments, module)


@pytest.mark.parametrize(
    "message",
    [
        Start(1, ("python", "train.py"), {"A": "1", "ODD": "\udcff"}, a_program("train.py", "--lr", "0.1"), (0, 2)),
        Start(1, ("bash",), {}),
        Import(a_program("train.py"), {"A": "1"}, ("RANK",)),
        Import(a_program("train.py"), {}, (), ("numpy", "scipy"), ("lightning",)),
        ImportDone("lightning", "it reads RANK"),
        Kill(7),
        Clear(succeeded=True),
        MakeFolder("/tmp", "ddpkit-"),
        FolderMade("/tmp/ddpkit-1"),
        Started(2, 4711, "why cold", "why not at all"),
        Ended(3, -9),
    ],
)
def test_channel_messages_arrive_unchanged(message: Message) -> None:
    one, other = map(Channel, socket.socketpair())
    one.send(message)
    assert list(other.receive()) == [message]
    one.close()
    with pytest.raises(ClosedError):
        list(other.receive())
    other.close()


def test_program_command_line_is_that_of_python() -> None:
    assert a_program("a b.py", "x").command_line == (sys.executable, "-u", "a b.py", "x")
    assert a_program("pack.age", module=True).command_line == (sys.executable, "-u", "-m", "pack.age")


def test_scan_of_files_that_hide_modules_of_torch_requires_a_cold_start(tmp_path: Path) -> None:
    main = tmp_path / "train.py"
    main.touch()
    assert scan.reason_for_cold_start(a_program(main), {}, frozenset(["queue", "json"])) == ""
    (tmp_path / "json").mkdir()  # a folder of data, not a package
    assert scan.reason_for_cold_start(a_program(main), {}, frozenset(["queue", "json"])) == ""
    (tmp_path / "queue.py").touch()
    assert "queue.py" in scan.reason_for_cold_start(a_program(main), {}, frozenset(["queue", "json"]))


def test_scan_of_a_file_that_is_not_python_requires_a_cold_start(tmp_path: Path) -> None:
    (tmp_path / "train").touch()
    assert "not a .py file" in scan.reason_for_cold_start(a_program(tmp_path / "train"), {}, frozenset())


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("import os\nos.environ['OMP_NUM_THREADS'] = '4'\nimport torch", "OMP_NUM_THREADS"),
        ("import os\nif True:\n  os.environ.update(OMP_NUM_THREADS='4')\nimport torch", "OMP_NUM_THREADS"),
        ("from os import environ\nenviron.setdefault( 'TORCH_LOGS', '1')\nimport mine", "TORCH_LOGS"),
        ("import os\nos.environ |= {'A': '1', 'PYTORCH_JIT': '0'}\nfrom torch import nn", "PYTORCH_JIT"),
        ("'''\nimport torch\n'''\nimport os\nos.environ.update({\n  'MKL_X': '1',\n})", "MKL_X"),
        ("import torch, os\nos.environ['OMP_NUM_THREADS'] = '4'", ""),
        ("import torch, os\nos.environ['TORCHDYNAMO_DISABLE'] = '1'", ""),
        (
            "import torch, os\nos.environ['TORCHDYNAMO_DISABLE'] = '1'\nfrom ddp_kit import Trainer",
            "TORCHDYNAMO_DISABLE",
        ),
        (
            "import os\nos.environ['PYTORCH_CUDA_ALLOC_CONF'] = 'backend:cudaMallocAsync'\nimport torch",
            "PYTORCH_CUDA_ALLOC_CONF",
        ),
        ("os.environ.setdefault('MKL_NUM_THREADS', '1')\nimport torch", ""),
        ("if os.environ['OMP_NUM_THREADS'] == '1':\n    pass", ""),
        ("# os.environ['OMP_NUM_THREADS'] = '4'\nimport torch", ""),
        ("os.environ['PYTHONHASHSEED'] = '0'\nos.environ['CUDA_VISIBLE_DEVICES'] = '1'", ""),
        ("os.environ['OMP_NUM_THREADS'] = '4' if", ""),
        ("os.environ['PYTORCH_ALLOC_CONF'] = 'expandable_segments:True'\nimport torch", ""),
        ("if True:\n  os.environ['PYTORCH_CUDA_ALLOC_CONF'] = 'expandable_segments:True'\n  a = 1\nimport torch", ""),
        ("os.environ.setdefault('PYTORCH_CUDA_ALLOC_CONF', \"expandable_segments:True\")\nimport torch", ""),
        ("os.environ.update(PYTORCH_ALLOC_CONF='expandable_segments:True', MKL_NUM_THREADS='2')\nimport torch", ""),
        ("os.environ |= {'MKL_NUM_THREADS': '2', 'OMP_NUM_THREADS': '2'}\nimport torch", "OMP_NUM_THREADS"),
        ("os.environ['MKL_NUM_THREADS'] = '2' if a else '3'\nimport torch", "MKL_NUM_THREADS"),
        ("os.environ['MKL_NUM_THREADS'] = '2' + '3'\nimport torch", "MKL_NUM_THREADS"),
        ("os.environ.update(MKL_NUM_THREADS='2' * 2)\nimport torch", "MKL_NUM_THREADS"),
        ("os.environ['MKL_NUM_THREADS'] = '2'\nos.environ['MKL_NUM_THREADS'] = n\nimport torch", "MKL_NUM_THREADS"),
        ("os.environ['PYTORCH_ALLOC_CONF'] = ''\nimport torch", "PYTORCH_ALLOC_CONF"),
        ("os.environ['A'] = os.environ['OMP_NUM_THREADS']\nimport torch", ""),
        (f"os.environ['OMP_NUM_THREADS'] = '4'\nos.environ['A'] = {'+'.join(['b'] * 3000)}", ""),  # too deep for ast
    ],
)
def test_scan_of_a_script_that_sets_variables_of_torch_requires_a_cold_start(
    text: str, name: str, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(text)
    env = {"MKL_NUM_THREADS": "2", "PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    found = scan.reason_for_cold_start(a_program(tmp_path / "train.py"), env, frozenset())
    assert (f"sets {name}," in found) if name else not found


SETS = "import os\nos.environ['OMP_NUM_THREADS'] = '4'\n"


@pytest.mark.parametrize(
    ("files", "setter"),
    [
        ({"train.py": "import settings\nimport torch", "settings.py": SETS}, "settings.py"),
        ({"train.py": "import torch\nimport settings", "settings.py": SETS}, ""),
        ({"train.py": "import settings", "settings.py": f"import torch\n{SETS}"}, ""),
        ({"train.py": "import a, settings", "a.py": "from torch import nn", "settings.py": SETS}, ""),
        ({"train.py": "import a, settings", "a.py": "def f():\n  import torch", "settings.py": SETS}, "settings.py"),
        (
            {"train.py": "import a", "a.py": "import b", "b.py": "import a, settings", "settings.py": SETS},
            "settings.py",
        ),
        ({"train.py": "from mine.models import net", "mine/__init__.py": SETS}, "mine/__init__.py"),
        ({"train.py": "from mine import net", "mine/__init__.py": "", "mine/net.py": SETS}, "net.py"),
        (
            {
                "train.py": "try:\n  import mine.models.net\nexcept ImportError: pass",
                "mine/models/net.py": "from .. import config",
                "mine/config.py": SETS,
            },
            "config.py",
        ),
        ({"train.py": "def later():\n  import settings", "settings.py": SETS}, ""),
        ({"train.py": "if TYPE_CHECKING:\n  import settings", "settings.py": SETS}, ""),
        ({"train.py": "import settings", "settings.py": f"{SETS} ("}, ""),
        ({"train.py": "import settings", "settings.py": "os.environ['MKL_NUM_THREADS'] = '2'"}, ""),
        ({"train.py": "import json, numpy, missing, ddp_kit"}, ""),
        ({"train.py": f"{SETS}import a0"} | {f"a{n}.py": f"import a{n + 1}" for n in range(400)}, "train.py"),
    ],
)
def test_scan_of_a_module_that_sets_variables_of_torch_requires_a_cold_start(
    files: dict[str, str], setter: str, tmp_path: Path
) -> None:
    write_files(files, tmp_path)
    found = scan.reason_for_cold_start(a_program(tmp_path / "train.py"), {"MKL_NUM_THREADS": "2"}, frozenset())
    assert (
        found.endswith(f"{setter} sets OMP_NUM_THREADS, which torch reads when it is imported") if setter else not found
    )


@pytest.mark.parametrize("main", ["__main__.py", "train/__main__.py", "train.py"])
def test_scan_of_a_package_that_sets_variables_of_torch_requires_a_cold_start(
    main: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_files({"mine/__init__.py": SETS, f"mine/{main}": "import torch"}, tmp_path)
    monkeypatch.chdir(tmp_path)
    program = a_program("mine" if main == "__main__.py" else "mine.train", module=True)
    assert "mine/__init__.py sets OMP_NUM_THREADS" in scan.reason_for_cold_start(program, {}, frozenset())


def write_files(files: dict[str, str], folder: Path) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


THREADS_SET = """\
import os
values = {"OMP_NUM_THREADS": "3"}
os.environ.update(values)
"""


@pytest.mark.slow
def test_variables_that_the_scan_cannot_see_are_reported_once(tmp_path: Path) -> None:
    write_files(
        {"settings.py": THREADS_SET, "train.py": "import settings, torch\nassert torch.get_num_threads() == 1"},
        tmp_path,
    )
    done = launch("--nproc-per-node", 2, tmp_path / "train.py")
    assert (done.returncode, done.stderr.count("the script set OMP_NUM_THREADS too late")) == (0, 1), done.stderr
    assert "use --cold" in done.stderr


@pytest.mark.slow
def test_variables_that_a_module_sets_have_the_same_effect_warm_and_cold(tmp_path: Path) -> None:
    program = "import settings, torch\nprint(torch.get_num_threads(), torch.distributed.get_debug_level().name)"
    sets = SETS.replace("4", "2") + "os.environ['TORCH_DISTRIBUTED_DEBUG'] = 'DETAIL'"
    write_files({"settings.py": sets, "train.py": program}, tmp_path)
    warm, cold = (launch(*flags, tmp_path / "train.py") for flags in ((), ("--cold",)))
    assert warm.stdout == cold.stdout == "2 DETAIL\n"
    assert "starting cold: settings.py sets OMP_NUM_THREADS" in warm.stderr


@pytest.fixture
def server(tmp_path: Path) -> Iterator[WarmServer]:
    warm = WarmServer(["x" * 200], clean_environment())
    yield warm
    warm.close()


def forked(
    server: WarmServer, program: Program, extra: Mapping[str, str] | None = None, streams: tuple[int, ...] = ()
) -> Process:
    return pump_until_answered(server, server.start(program.command_line, clean_environment(extra), program, streams))


def make_imports(server: WarmServer, program: Program) -> None:
    server.import_for(Import(program, clean_environment(), ()), lambda *_: None)
    while server.imports:
        server.pump(seconds(60))


def pump_until_answered(server: WarmServer, worker: Process) -> Process:
    while not worker.answered:
        server.pump(seconds(60))
    return worker


def gone(pid: int) -> None:
    """Wait for a process that is not our child; the test's own time limit ends a wait in vain."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    select.select([descriptor], [], [])
    os.close(descriptor)


@pytest.mark.slow
def test_warm_worker_is_forked_and_its_exit_code_reported(server: WarmServer, tmp_path: Path) -> None:
    main = tmp_path / "train.py"
    main.write_text("import os, sys; print(sys.argv[1:], os.environ['MINE']); sys.exit(3)")
    out = tmp_path / "out.txt"
    with out.open("w") as file:
        streams = (file.fileno(), file.fileno())
        worker = forked(server, a_program(main, "a", "b"), {"MINE": "7"}, streams)
    assert (worker.cold, worker.wait(seconds(60))) == ("", 3)
    assert out.read_text() == "['a', 'b'] 7\n"


@pytest.mark.slow
@pytest.mark.parametrize(("text", "there"), [("ddp_kit's Trainer", 3), ("torch.optim", 1), ("ddp_kit, optimal", 0)])
def test_warm_worker_has_the_imports_that_its_script_mentions(
    text: str, there: int, server: WarmServer, tmp_path: Path
) -> None:
    main = tmp_path / "train.py"
    main.write_text(
        f"# {text}\nimport sys\n"
        "sys.exit(('torch._dynamo' in sys.modules) + 2 * ('ddp_kit.trainer.trainer' in sys.modules))"
    )
    make_imports(server, a_program(main))
    assert forked(server, a_program(main)).wait(seconds(60)) == there


def test_warm_server_that_was_lost_is_asked_for_no_imports(tmp_path: Path) -> None:
    server = WarmServer(["x"], clean_environment(), forks=False)
    os.kill(server.pid, signal.SIGKILL)
    assert server.make_folder("ddpkit-") == ""
    assert server.gone
    server.import_for(Import(a_program(tmp_path / "train.py"), {}, ()), lambda *_: None)
    assert not server.imports
    worker = server.start(["true"], {})
    assert (worker.answered, worker.lost) == (True, True)
    server.close()


def test_warm_server_that_was_killed_is_opened_again_with_its_folders(tmp_path: Path) -> None:
    server = WarmServer(["x"], clean_environment(), forks=False)
    folder = Path(server.make_folder("ddpkit-", str(tmp_path)))
    os.kill(server.pid, signal.SIGKILL)
    while not server.gone:
        server.pump(seconds(60))
    assert folder.is_dir()
    server.open_again()
    assert not server.gone
    assert pump_until_answered(server, server.start(["true"], clean_environment())).wait(seconds(60)) == 0
    server.close()
    assert not folder.exists()


@pytest.mark.slow
def test_warm_server_that_still_imports_is_not_waited_for(tmp_path: Path) -> None:
    main = tmp_path / "train.py"
    main.write_text("# ddp_kit's Trainer")
    os.mkfifo(tmp_path / "importing")
    (tmp_path / "torch.py").write_text(
        f"import signal\nopen({str(tmp_path / 'importing')!r}, 'w').close()\nsignal.pause()"
    )
    server = WarmServer([], clean_environment({"PYTHONPATH": str(tmp_path)}))
    (tmp_path / "importing").read_text()
    server.start(a_program(main).command_line, clean_environment(), a_program(main))
    server.close()
    assert server._process.returncode == -signal.SIGKILL


@pytest.mark.slow
def test_warm_worker_with_a_trainer_has_the_default_log_handler(server: WarmServer, tmp_path: Path) -> None:
    main, out, err = (tmp_path / name for name in ("train.py", "out", "err"))
    main.write_text(
        "import sys\nbefore = {'ddp_kit.trainer', 'loguru'} <= set(sys.modules)\nfrom ddp_kit import Trainer\n"
        "from loguru import logger\nlogger.info('hello')\nlogger.remove(0)\nlogger.info('not heard')\nprint(before)\n"
    )
    make_imports(server, a_program(main))
    with out.open("w") as output, err.open("w") as errors:
        worker = forked(server, a_program(main), streams=(output.fileno(), errors.fileno()))
    assert (worker.wait(seconds(60)), out.read_text()) == (0, "True\n")
    (line,) = err.read_text().splitlines()
    assert line.endswith(" - hello")


@pytest.mark.slow
def test_warm_worker_shows_its_command_line_to_ps(server: WarmServer, tmp_path: Path) -> None:
    main = tmp_path / "train.py"
    main.write_text("import signal; signal.pause()")
    os.mkfifo(tmp_path / "ready")
    main.write_text("import signal, sys\nopen(sys.argv[1], 'w').close()\nsignal.pause()")
    worker = forked(server, a_program(main, str(tmp_path / "ready")))
    (tmp_path / "ready").read_text()
    assert psutil.Process(worker.pid).cmdline() == [sys.executable, "-u", str(main), str(tmp_path / "ready")]


@pytest.mark.slow
def test_worker_with_variables_that_imports_read_starts_cold(server: WarmServer, tmp_path: Path) -> None:
    main = tmp_path / "train.py"
    main.touch()
    worker = forked(server, a_program(main), {"MKL_NUM_THREADS": "3"})
    assert "MKL_NUM_THREADS" in worker.cold


@pytest.mark.slow
def test_workers_die_with_the_server_and_the_launcher_notices(server: WarmServer, tmp_path: Path) -> None:
    main = tmp_path / "train.py"
    main.write_text("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\nwhile True: signal.pause()")
    worker = forked(server, a_program(main))
    os.kill(server._process.pid, signal.SIGKILL)
    assert worker.wait(seconds(60)) == -signal.SIGKILL
    gone(worker.pid)
    assert forked(server, a_program(main)).lost, "and from then on it is said"


def test_poll_of_a_worker_does_not_consume_messages_for_others() -> None:
    server = WarmServer([], clean_environment(), forks=False)
    workers = [pump_until_answered(server, server.start(["sleep", "1000"], clean_environment())) for _ in range(2)]
    for worker in workers:
        os.kill(worker.pid, signal.SIGTERM)
        gone(worker.pid)
    assert select.select([server], [], [], seconds(60))[0]
    assert [worker.poll() for worker in workers] == [None, None]
    assert select.select([server], [], [], 0)[0], "what has come can still be waited for"
    assert [worker.wait(seconds(60)) for worker in workers] == [-signal.SIGTERM] * 2
    server.close()


def test_server_that_is_stopped_is_continued_once_and_then_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_CHECK_SECONDS", seconds(0.05))
    said: list[str] = []
    server = WarmServer([], clean_environment(), forks=False, print_message=said.append)
    first, second = (
        pump_until_answered(server, server.start(["sleep", "1000"], clean_environment())) for _ in range(2)
    )
    os.kill(server.pid, signal.SIGSTOP)
    os.kill(first.pid, signal.SIGTERM)
    assert first.wait(seconds(60)) == -signal.SIGTERM, "its end is told by a server that runs again"
    assert "SIGCONT" in said[0]
    os.kill(server.pid, signal.SIGSTOP)
    assert second.wait(seconds(60)) == -signal.SIGKILL
    assert second.lost
    gone(second.pid)
    assert "killed" in said[1]
    assert len(said) == 2
    server.close()


def test_server_check_does_not_count_time_while_the_launcher_is_suspended(monkeypatch: pytest.MonkeyPatch) -> None:
    suspended = [0.0]
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + sum(suspended))
    monkeypatch.setattr(client, "time", clock)
    said: list[str] = []
    server = WarmServer([], clean_environment(), forks=False, print_message=said.append)
    worker = pump_until_answered(server, server.start(["sleep", "1000"], clean_environment()))
    os.kill(server.pid, signal.SIGSTOP)
    wait_until(lambda: is_stopped(server.pid), "stopped")
    for _ in range(4):
        suspended.append(12)
        server.pump()
    assert said == [], "the server was stopped with the launcher, and about to be continued with it"
    suspended.append(client._CHECK_SECONDS)
    server.pump()
    assert "SIGCONT" in said[0]
    assert worker.poll() is None
    server.close()


@pytest.mark.slow
def test_server_that_is_stopped_accepts_messages_larger_than_the_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_CHECK_SECONDS", seconds(0.05))
    server = WarmServer([], clean_environment(), forks=False)
    os.kill(server.pid, signal.SIGSTOP)
    large = {f"LARGE_{number}": "x" * 100_000 for number in range(10)}
    assert server.start(["true"], clean_environment(large)).wait(seconds(60)) == 0
    server.close()


def test_server_that_is_stopped_ends_with_its_children() -> None:
    server = WarmServer([], clean_environment(), forks=False)
    worker = pump_until_answered(server, server.start(["sleep", "1000"], clean_environment()))
    os.kill(server.pid, signal.SIGSTOP)
    server.close()
    gone(worker.pid)


def test_process_whose_threads_outlive_their_leader_is_ended_with_its_children() -> None:
    server = WarmServer([], clean_environment(), forks=False)
    reading, writing = os.pipe()
    with os.fdopen(reading) as out:
        command = [sys.executable, str(PROGRAMS / "loses_its_leader.py")]
        worker = pump_until_answered(server, server.start(command, clean_environment(), streams=(writing, 2)))
        os.close(writing)
        has_started = int(out.readline())
        wait_until(lambda: psutil.Process(worker.pid).status() == psutil.STATUS_ZOMBIE, "a zombie")
        server.close()
    assert not psutil.pid_exists(worker.pid)
    assert not psutil.pid_exists(has_started)


def test_child_without_a_command_line_has_a_name_and_an_ended_one_has_none() -> None:
    with running(sys.executable, PROGRAMS / "erases_command_line.py") as process:
        assert process.stdout is not None
        process.stdout.readline()
        child = Child(process.pid, 0)
        assert child.command.strip(b"\0") == b""
        assert child.name.startswith("[python")
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert child.name == "", "a zombie"
    assert child.name == ""


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("no"), "ValueError: no"),
        (MemoryError("no memory\nfor more"), "MemoryError: no memory"),
        (KeyError(), "KeyError"),
        (SyntaxError("invalid", ("train.py", 1, 1, "x y")), "SyntaxError: invalid"),
    ],
)
def test_error_note_for_the_launcher_excludes_notes_of_the_exception(
    error: Exception, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    error.add_note("hint: lower micro_batch_size")
    _leave_note(error)
    assert json.loads((tmp_path / "error.json").read_text())["message"]["message"] == message
