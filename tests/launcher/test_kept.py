"""The second launch of a script is forked from a process that is kept, and nobody can tell."""

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import psutil
import pytest
from job_processes import has_ended
from kept_folder import SCRIPT, Folder
from launching import DDPKIT, launch, run, seconds, started, wait_until

from ddp_kit.errors import UsageError
from ddp_kit.launcher import spec
from ddp_kit.launcher.program import Program
from ddp_kit.launcher.warm import kept_client
from ddp_kit.launcher.warm.messages import Import
from ddp_kit.launcher.wire import Connection


def test_folder_that_others_can_use_is_not_used(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_path))
    folder = kept_client.folder()
    assert folder == short_path / "ddpkit"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o755)
    assert kept_client.folder() is None
    folder.rmdir()
    (short_path / "elsewhere").mkdir(mode=0o700)
    folder.symlink_to(short_path / "elsewhere")
    assert kept_client.folder() is None
    folder.unlink()
    folder.touch(mode=0o600)
    assert kept_client.folder() is None


def test_folder_with_a_long_path_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = tmp_path / ("x" * 90)
    long.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(long))
    assert kept_client.folder() is None


def test_folder_without_a_runtime_folder_is_in_the_temporary_one(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(short_path))
    assert kept_client.folder() == short_path / f"ddpkit-{os.getuid()}"


def test_address_depends_on_the_script_and_on_what_is_imported(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_path))
    monkeypatch.chdir(short_path)
    program = Program(sys.executable, "train.py", ("--lr", "1"))
    same = Program(sys.executable, str(short_path / "train.py"), ())
    other = Program(sys.executable, "other.py", ())
    module = Program(sys.executable, "train.py", (), module=True)
    addresses = {kept_client.address_of(each, None) for each in (program, other, module)}
    assert len({*addresses, kept_client.address_of(program, ()), kept_client.address_of(program, ("numpy",))}) == 5
    assert kept_client.address_of(same, None) == kept_client.address_of(program, None)
    one, two = (Program(sys.executable, f"{name}.py", ()) for name in ("plumless", "buckeroo"))  # with the same CRC-32
    assert kept_client.address_of(one, None) != kept_client.address_of(two, None)


def test_folder_that_cannot_be_written_to_is_named(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_path))
    program = Program(sys.executable, "train.py", ())
    Path(f"{kept_client.address_of(program, ())}.lock").mkdir()  # stands for a full disk
    messages: list[str] = []
    server: Any = None  # it is not asked for anything
    kept_client.keep_process(Import(program, {}, (), ()), 1.0, {}, server, print, messages.append)
    assert messages == [f"no process is kept: {short_path / 'ddpkit'} cannot be written to: Is a directory"]


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--keep-warm train.py", 600),
        ("--keep-warm=90 train.py", 90),
        ("--keep-warm=90s train.py", 90),
        ("--keep-warm=1.5h train.py", 5400),
        ("--keep-warm --gpus 2 train.py", 600),
        ("--keep-warm=off train.py", None),
        ("train.py --keep-warm=3", None),
    ],
)
def test_keep_warm_flag_takes_a_time_or_none(words: str, expected: float | None) -> None:
    parsed = spec.parse(words.split(), {})
    assert (parsed.keep_warm, parsed.script) == (expected, "train.py")


def test_keep_warm_flag_has_a_variable() -> None:
    assert spec.parse(["train.py"], {"DDPKIT_KEEP_WARM": "2m"}).keep_warm == 120


@pytest.mark.parametrize("words", ["--keep-warm=soon", "--keep-warm=0", "--keep-warm=-1m"])
def test_keep_warm_flag_refuses_what_is_no_time(words: str) -> None:
    with pytest.raises(UsageError, match="is not a time"):
        spec.parse([words, "train.py"], {})


# What a client needs of the standard library, whatever else a version of Python imports for it.
STANDARD_LIBRARY = """
import argparse, array, ctypes, importlib, json, math, pathlib, re, shlex, shutil, signal, socket, struct, typing
import unicodedata
argparse.ArgumentParser().add_argument("--one", choices=("two",))
class Row(typing.NamedTuple):
    number: int = 0
"""
OF_THE_CLIENT = {
    "ddp_kit.env", "ddp_kit.errors", "ddp_kit.exit_codes", "ddp_kit.launcher", "ddp_kit.cli", "ddp_kit.cli.main",
    "ddp_kit.cli.commands", "ddp_kit.cli.stopped", "ddp_kit.cli.launch", "ddp_kit.terminal", "ddp_kit.texts",
    "ddp_kit.arguments", "ddp_kit.launcher.program", "ddp_kit.launcher.spec", "ddp_kit.launcher.warm",
    "ddp_kit.launcher.warm.facts", "ddp_kit.launcher.warm.kept_client", "ddp_kit.launcher.wire",
}  # fmt: skip


def test_launch_that_is_handed_over_imports_only_what_that_needs(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_path))
    script = short_path / "train.py"
    script.touch()
    address = kept_client.address_of(Program(sys.executable, str(script), ()), None)
    python = [sys.executable, "-X", "importtime"]
    with socket.socket(socket.AF_UNIX) as kept:
        kept.bind(str(address))
        kept.listen()
        kept.settimeout(seconds(30))
        with started(*python, DDPKIT, "launch", "--keep-warm", script) as client:
            with closing(Connection(kept.accept()[0])) as connection:
                connection.receive_object()
                connection.send({"launcher": os.getpid()})
                connection.send({"code": 7})
            _, imports = client.communicate(timeout=seconds(30))
            assert client.returncode == 7, imports
    needed = run(*python, "-c", STANDARD_LIBRARY).stderr
    modules, standard = ({line.rpartition("|")[2].strip() for line in text.splitlines()} for text in (imports, needed))
    assert modules - standard - {"ddp_kit"} == OF_THE_CLIENT, "delays every second launch"


# --- With the real command --------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_launch_from_a_kept_process_is_as_without_one(folder: Folder) -> None:
    folder.prepare()
    alone = folder.launch("--lr", "1", MINE="7", CODE="3", DDPKIT_KEEP_WARM="")
    kept = folder.launch("--lr", "1", MINE="7", CODE="3")
    assert folder.kept()["launches"] == 1
    assert kept.returncode == alone.returncode == 3
    assert sorted(kept.stdout.splitlines()) == sorted(alone.stdout.splitlines())
    assert kept.stderr.count("to stderr") == alone.stderr.count("to stderr") == 2


@pytest.mark.slow
def test_launch_from_another_folder_is_in_that_folder(folder: Folder) -> None:
    folder.prepare()
    inside = folder.path / "inside"
    inside.mkdir()
    done = launch("--nproc-per-node", "1", "../train.py", env=folder.env, cwd=inside)
    assert json.loads(done.stdout)[0] == str(inside)
    assert folder.kept()["launches"] == 1


@pytest.mark.slow
def test_ten_launches_at_the_same_time_use_one_kept_process(folder: Folder) -> None:
    folder.prepare()
    pid = folder.kept()["pid"]
    with ExitStack() as stack:
        command = [DDPKIT, "launch", "--nproc-per-node", "1", folder.script]
        how = {"env": folder.env, "cwd": folder.path, "stdin": subprocess.DEVNULL}
        clients = [stack.enter_context(started(*command, **how)) for _ in range(10)]
        assert [client.wait(seconds(60)) for client in clients] == [0] * 10
    assert (folder.kept()["pid"], folder.kept()["launches"]) == (pid, 10)


@pytest.mark.slow
@pytest.mark.timeout(seconds(300))
@pytest.mark.parametrize(("count", "limit"), [(2, "5m"), (2, "1"), (10, "5m")])
def test_first_launches_at_the_same_time_leave_one_kept_process(folder: Folder, count: int, limit: str) -> None:
    folder.env["DDPKIT_KEEP_WARM"] = limit
    with ExitStack() as stack:
        command = [DDPKIT, "launch", "--nproc-per-node", "1", folder.script]
        how = {"env": folder.env, "cwd": folder.path, "stdin": subprocess.DEVNULL}
        clients = [stack.enter_context(started(*command, **how)) for _ in range(count)]
        assert [client.wait(seconds(120)) for client in clients] == [0] * count
    if limit == "5m":
        wait_until(folder.is_kept, "the kept process")
        wait_until(lambda: not folder.left(), folder.left)
        assert folder.launch().returncode == 0
        assert run(DDPKIT, "warm", "stop", env=folder.env).stdout.endswith("stopped\n")
    wait_until(lambda: not folder.sockets and not folder.left(), folder.left)


@pytest.mark.slow
def test_error_in_a_launch_from_a_kept_process_has_the_same_traceback(folder: Folder) -> None:
    folder.prepare()
    alone, kept = (
        launch("--nproc-per-node", "1", folder.script, env=folder.env | env | {"ERROR": "seven"}, cwd=folder.path)
        for env in ({"DDPKIT_KEEP_WARM": "off"}, {})
    )
    assert kept.returncode == alone.returncode == 1
    lines = [[line for line in done.stderr.splitlines() if "pid" not in line] for done in (alone, kept)]
    assert sorted(lines[0]) == sorted(lines[1])
    assert any("ValueError: seven" in line for line in lines[0])


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_to_the_client_stops_the_job(folder: Folder, number: signal.Signals) -> None:
    folder.prepare()
    with folder.running() as (client, _):
        client.send_signal(number)
        assert client.wait(seconds(30)) == 128 + number
        assert f"stopped by {number.name}" in (client.stderr.read() if client.stderr else "")
    wait_until(lambda: not folder.processes(), folder.processes)


@pytest.mark.slow
def test_kept_process_is_mentioned_by_other_commands_and_ends_without_its_script(folder: Folder) -> None:
    assert "kept" not in run(DDPKIT, "devices", env=folder.env).stdout
    folder.prepare()
    assert "1 process kept for the next launches" in run(DDPKIT, "devices", env=folder.env).stdout
    assert "1 process kept for the next launches" in run(DDPKIT, "doctor", env=folder.env).stdout
    pid = folder.kept()["pid"]
    folder.script.unlink()
    wait_until(lambda: has_ended(pid), "the kept process without a script")
    assert not folder.sockets


@pytest.mark.slow
def test_stopped_kept_process_leaves_no_file_and_another_can_be_kept(folder: Folder) -> None:
    for _ in range(2):
        folder.prepare()
        assert "stopped" in run(DDPKIT, "warm", "stop", env=folder.env).stdout
        wait_until(lambda: not list((folder.path / "ddpkit").iterdir()), "no socket and no lock")


@pytest.mark.slow
def test_kept_process_ends_without_its_socket(folder: Folder) -> None:
    folder.prepare()
    pid = folder.kept()["pid"]
    folder.sockets[0].unlink()
    wait_until(lambda: has_ended(pid), "the kept process without a socket")


@pytest.mark.slow
def test_job_ends_with_its_client(folder: Folder) -> None:
    folder.prepare()
    with folder.running() as (client, _):
        client.kill()
        wait_until(lambda: not folder.processes(), folder.processes)
    assert folder.launch().returncode == 0


@pytest.mark.slow
def test_client_ends_with_its_launcher(folder: Folder) -> None:
    folder.prepare()
    with folder.running() as (client, launcher):
        launcher.kill()
        assert client.wait(seconds(30)) == 137
    wait_until(lambda: not folder.processes(), folder.processes)


@pytest.mark.slow
def test_job_continues_without_the_kept_process(folder: Folder) -> None:
    folder.prepare()
    with folder.running() as (client, _):
        os.kill(folder.kept()["pid"], signal.SIGKILL)
        folder.waits.unlink()
        assert client.wait(seconds(30)) == 0
    before = folder.sockets[0].stat().st_ino
    assert folder.launch().returncode == 0
    wait_until(lambda: folder.sockets[0].stat().st_ino != before, "another kept process")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("variable", "MKL_NUM_THREADS: not as"),
        ("imports", "the imports of the script have changed"),
        ("module", "has changed"),
        ("cores", "the CPU cores: not as"),
    ],
)
def test_kept_process_that_would_differ_is_replaced(folder: Folder, change: str, reason: str) -> None:
    packages = folder.path / "site-packages"
    packages.mkdir()
    (packages / "einops.py").write_text("one = 1")
    folder.env["PYTHONPATH"] = str(packages)
    folder.script.write_text(f"import einops\n{SCRIPT}")
    folder.prepare()
    before = folder.kept()["pid"]
    prefix: list[str] = []
    if change == "variable":
        folder.env["MKL_NUM_THREADS"] = "3"
    elif change == "imports":
        folder.script.write_text(SCRIPT)
    elif change == "module":
        (packages / "einops.py").write_text("one = 22")
    else:
        prefix = ["taskset", "-c", str(min(os.sched_getaffinity(0)))]
    command = [*prefix, DDPKIT, "launch", "--nproc-per-node", "2"]
    described = run(*command, "--dry-run", folder.script, env=folder.env, cwd=folder.path)
    assert f"pid {before}, which would be replaced" in described.stdout
    done = run(*command, folder.script, env=folder.env, cwd=folder.path)
    assert done.returncode == 0
    assert reason in done.stderr
    wait_until(lambda: folder.sockets and folder.kept()["pid"] != before, "another kept process")


@pytest.mark.slow
def test_kept_processes_are_listed_and_stopped(folder: Folder) -> None:
    assert run(DDPKIT, "warm", env=folder.env).stdout == "no process is kept\n"
    folder.prepare()
    pid = folder.kept()["pid"]
    listed = run(DDPKIT, "warm", env=folder.env).stdout
    assert f"pid {pid}" in listed
    assert "import torch" in listed
    assert run(DDPKIT, "warm", "stop", env=folder.env).stdout.endswith("stopped\n")
    wait_until(lambda: not psutil.pid_exists(pid), "its end")
    assert run(DDPKIT, "warm", env=folder.env).stdout == "no process is kept\n"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_signal_to_the_kept_process_ends_it(folder: Folder, number: signal.Signals) -> None:
    folder.prepare()
    assert folder.launch().returncode == 0  # after it has forked once
    pid = folder.kept()["pid"]
    os.kill(pid, number)
    wait_until(lambda: not psutil.pid_exists(pid), "its end")


@pytest.mark.slow
def test_kept_process_imports_what_comes_before_an_unfit_package(folder: Folder) -> None:
    packages = folder.path / "site-packages"
    packages.mkdir()
    (packages / "einops.py").write_text("one = 1")
    (packages / "nltk.py").write_text("import os; rank = os.environ.get('RANK')")
    folder.env |= {"PYTHONPATH": str(packages), "XDG_CACHE_HOME": str(folder.path / "cache")}
    folder.script.write_text(f"import einops\nimport nltk\n{SCRIPT}")
    assert folder.launch().returncode == 0  # finds that nltk is unfit
    folder.prepare()
    assert folder.kept()["imports"] == ["import einops"]
    assert folder.launch().returncode == 0
    assert folder.kept()["launches"] == 1


@pytest.mark.slow
def test_kept_process_ends_after_its_time(folder: Folder) -> None:
    folder.env["DDPKIT_KEEP_WARM"] = f"{seconds(10)}s"  # from its start, which is in the first launch
    folder.prepare()
    wait_until(lambda: not folder.sockets and not folder.processes(), folder.processes)
