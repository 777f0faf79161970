"""A kept process that is not this user's, or that there is no place for, is not used; the launch works without it."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from kept_folder import Folder
from launching import ROOT, clean_environment, launch, wait_until

import ddp_kit

pytestmark = pytest.mark.slow

NOBODY = 65534
# The credentials that the other end sees are those at the time of `listen` and of `connect`.
LISTENS = """\
import os, socket, sys
listening = socket.socket(socket.AF_UNIX)
listening.bind(sys.argv[1])
os.setuid(int(sys.argv[2]))
listening.listen()
print("listens", flush=True)
connection, _ = listening.accept()
print(len(connection.recv(1 << 16)), flush=True)
"""
CONNECTS = """\
import os, sys
from pathlib import Path
from ddp_kit.launcher.wire import Connection
import socket
os.setuid(int(sys.argv[2]))
connection = Connection(socket.socket(socket.AF_UNIX))
connection.socket.connect(sys.argv[1])
try:
    connection.send({"for": sys.argv[3], "argv": []}, [0, 1, 2])
    print(connection.receive_object())
except EOFError:
    print("no answer")
"""
only_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root to become another user")


@contextmanager
def listening(address: Path, user: int) -> "Iterator[subprocess.Popen[str]]":
    """A process of another user at the address of a kept process."""
    words = [sys.executable, "-c", LISTENS, str(address), str(user)]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "listens\n"
        try:
            yield process
        finally:
            process.kill()


def works_and_says(folder: Folder, what: str, **env: str) -> None:
    """Launch: the ranks run, and one line says why no process is kept, or why it is replaced."""
    done = folder.launch(**env)
    assert (done.returncode, done.stdout.count(str(folder.path))) == (0, 2), done
    messages = [line for line in done.stderr.splitlines() if line.startswith("ddpkit: ")]
    assert len(messages) == bool(what), messages
    assert all(what in line for line in messages)


@only_root
def test_socket_of_another_user_is_not_used(folder: Folder) -> None:
    folder.prepare()
    (address,) = folder.sockets
    before = folder.kept()["pid"]
    address.unlink()
    with listening(address, NOBODY) as other:
        works_and_says(folder, "")
        assert other.stdout is not None
        assert other.stdout.readline() == "0\n"  # the end of the connection, and no request
    with suppress(ProcessLookupError):  # it ends by itself once it has noticed that its socket is gone
        os.kill(before, 9)


@only_root
@pytest.mark.parametrize("what", ["stop", "launch", "description"])
def test_request_of_another_user_is_not_answered(folder: Folder, what: str) -> None:
    folder.prepare()
    (address,) = folder.sockets
    pid = folder.kept()["pid"]
    for path, mode in ((folder.path, 0o755), (address.parent, 0o755), (address, 0o777)):
        path.chmod(mode)
    words = [sys.executable, "-c", CONNECTS, str(address), str(NOBODY), what]
    asked = subprocess.run(words, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    assert asked.stdout == "no answer\n", asked.stderr
    address.parent.chmod(0o700)
    assert folder.kept()["pid"] == pid
    assert folder.launch().returncode == 0
    assert folder.kept()["launches"] == 1


@pytest.mark.parametrize("mode", [0o755, 0o770, 0o707])
def test_folder_with_wrong_modes_is_not_used(folder: Folder, mode: int) -> None:
    place = folder.path / "ddpkit"
    place.mkdir()
    place.chmod(mode)
    works_and_says(folder, f"no process is kept: {place}")
    assert not list(place.iterdir())
    assert not folder.left()


@only_root
def test_folder_of_another_user_is_not_used(folder: Folder) -> None:
    place = folder.path / "ddpkit"
    place.mkdir(mode=0o700)
    os.chown(place, NOBODY, NOBODY)
    works_and_says(folder, f"no process is kept: {place}")
    assert not list(place.iterdir())


@pytest.mark.parametrize("runtime", [None, "", "relative", "/nowhere"])
def test_without_a_runtime_folder_the_process_is_kept_in_the_temporary_one(folder: Folder, runtime: str | None) -> None:
    folder.env["XDG_RUNTIME_DIR"] = runtime
    works_and_says(folder, "")
    place = folder.temporary / f"ddpkit-{os.getuid()}"
    wait_until(lambda: list(place.glob("*.kept")), "the kept process")
    works_and_says(folder, "")
    (address,) = place.glob("*.kept")
    pid = folder.kept(address)["pid"]
    assert folder.kept(address)["launches"] == 1
    psutil.Process(pid).terminate()
    wait_until(lambda: not psutil.pid_exists(pid), "its end")


def test_folder_with_a_long_path_keeps_no_process(folder: Folder) -> None:
    long = folder.path / ("x" * 90)
    long.mkdir()
    works_and_says(folder, f"no process is kept: {long}", XDG_RUNTIME_DIR=str(long))
    works_and_says(folder, f"no process is kept: {long}", XDG_RUNTIME_DIR="", TMPDIR=str(long))
    assert not list(long.iterdir())


def test_kept_process_of_another_version_is_replaced(folder: Folder) -> None:
    copy = folder.path / "older"
    shutil.copytree(ROOT / "ddp_kit", copy / "ddp_kit", ignore=shutil.ignore_patterns("__pycache__"))
    init = copy / "ddp_kit" / "__init__.py"
    assert f'"{ddp_kit.__version__}"' in init.read_text()
    init.write_text(init.read_text().replace(f'"{ddp_kit.__version__}"', '"0.0.9"'))
    code = "import sys; from ddp_kit.cli.main import entry; entry(sys.argv[1:])"
    words = [sys.executable, "-c", code, "launch", "--nproc-per-node", "2", str(folder.script)]
    env = clean_environment(folder.env) | {"PYTHONPATH": str(copy)}
    done = subprocess.run(words, cwd=folder.path, env=env, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    wait_until(folder.is_kept, "the kept process of the other version")
    before = folder.kept()["pid"]
    works_and_says(folder, "the kept process cannot be used and is replaced: ddpkit: not as when")
    wait_until(lambda: folder.is_kept() and folder.kept()["pid"] != before, "another kept process")
    works_and_says(folder, "")
    assert folder.kept()["launches"] == 1


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()", "leaves a thread"),
        ("import socket; connection = socket.socket()", "leaves a file or connection open"),
        ("import signal; signal.signal(signal.SIGUSR1, print)", "changes the handling of signals"),
    ],
    ids=["thread", "socket", "signal"],
)
def test_package_that_leaves_something_behind_is_not_in_the_kept_process(
    folder: Folder, source: str, reason: str
) -> None:
    packages = folder.path / "site-packages"
    packages.mkdir()
    (packages / "einops.py").write_text("one = 1")
    (packages / "nltk.py").write_text(source)
    folder.env |= {"PYTHONPATH": str(packages), "XDG_CACHE_HOME": str(folder.path / "cache")}
    folder.script.write_text(f"import einops\nimport nltk\n{folder.script.read_text()}")
    assert folder.launch().returncode == 0  # finds that nltk is unfit
    folder.prepare()
    works_and_says(folder, "")
    assert folder.kept()["imports"] == ["import einops"]
    assert folder.kept()["launches"] == 1
    described = launch("--nproc-per-node", 2, "--dry-run", folder.script, env=folder.env, cwd=folder.path)
    assert reason in described.stdout
