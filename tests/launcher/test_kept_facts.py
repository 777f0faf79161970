"""A launch in a process with other attributes is not forked from the kept process, or is given its own."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from ddp_kit.launcher.warm.facts import OF_ANY_PROCESS, OF_ITSELF, difference, facts_of, own_facts
from tests.programs.changed import CGROUP, CHANGES, GIVEN
from tests.support.kept_folder import Folder
from tests.support.launching import DDPKIT, PROGRAMS, launch, run, seconds, wait_until

CHANGED = PROGRAMS / "changed.py"
# Facts that no process can change: of the installation, or of the machine.
OF_THE_INSTALLATION = {"ddpkit", "the Python interpreter", "the security label", "the memory nodes"}
ATTRIBUTES = PROGRAMS / "process_attributes.py"

only_linux = pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
only_root = pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="needs root")


@contextmanager
def facts_after(*names: str) -> "Iterator[dict[str, Any]]":
    """The facts of a process that has made these changes."""
    words = [sys.executable, str(CHANGED), ",".join(names)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(words, text=True, **pipes) as process:  # type: ignore[call-overload]
        try:
            own = process.stdout.readline()
            if not own:
                pytest.skip(f"not possible here: {process.stderr.read().splitlines()[-1]}")
            yield {**facts_of(process.pid), **json.loads(own)}
        finally:
            process.kill()


@only_root
@pytest.mark.parametrize("name", CHANGES)
def test_fact_of_a_changed_process_differs_and_no_other_does(name: str) -> None:
    here = {**facts_of(os.getpid()), **own_facts()}
    with facts_after(name) as facts:
        expected = {name, "the scheduling"} if name == "the priority" else {name}  # sched_attr has the nice value
        if name == "the root folder":  # without /proc, it cannot read its own facts
            here = facts_of(os.getpid())
        assert {fact for fact in here if here[fact] != facts[fact]} <= expected
        assert here[name] != facts[name]
    if name == "the cgroup":
        wait_until(lambda: not (CGROUP / "cgroup.procs").read_text(), "an empty cgroup")
        CGROUP.rmdir()


def test_every_fact_has_a_change() -> None:
    assert {*OF_ANY_PROCESS, *OF_ITSELF} == {*CHANGES} | OF_THE_INSTALLATION


@only_linux
def test_facts_of_an_equal_process_are_equal() -> None:
    here = {**facts_of(os.getpid()), **own_facts()}
    with facts_after() as facts:
        assert difference(json.loads(json.dumps(here)), json.loads(json.dumps(facts))) == ""
    for name in here:
        assert difference(here, {**here, name: "other"}) == name


# Lines of /proc/PID/status that are not facts -> why.
NOT_FACTS = {
    "Umask": "given", "SigBlk": "given", "SigIgn": "given", "SigCgt": "exec clears it",
    "Cpus_allowed": "the same as Cpus_allowed_list", "Mems_allowed": "the same as Mems_allowed_list",
    "Kthread": "always 0", "CoreDumping": "always 0", "TracerPid": "", "untag_mask": "exec resets it",
    **dict.fromkeys(("Name", "State", "Tgid", "Ngid", "Pid", "PPid", "NStgid", "NSpid", "NSpgid", "NSsid"), "its own"),
    **dict.fromkeys(("FDSize", "SigQ", "SigPnd", "ShdPnd", "Threads", "HugetlbPages"), "what it has done"),
    **dict.fromkeys(("voluntary_ctxt_switches", "nonvoluntary_ctxt_switches"), "what it has done"),
    **dict.fromkeys(("x86_Thread_features", "x86_Thread_features_locked"), "exec resets them"),
}  # fmt: skip


@only_linux
def test_every_line_of_the_status_of_a_process_is_a_fact_or_given() -> None:
    facts = {line.partition(":")[0] for value in facts_of(os.getpid()).values() if isinstance(value, list)
             for line in value if isinstance(line, str) and "\t" in line}  # fmt: skip
    lines = {line.partition(":")[0] for line in Path("/proc/self/status").read_text().splitlines()}
    assert {name for name in lines - facts - {*NOT_FACTS} if not name.startswith(("Vm", "Rss"))} == set()


# --- With the real command --------------------------------------------------------------------------------------------


def seen(folder: Folder, *words: object, changes: str = "") -> dict[str, Any]:
    """What the script of a launch from a changed process says of itself, and what the launcher says."""
    prefix = [sys.executable, CHANGED, changes, "--"] if changes else []
    done = run(*prefix, DDPKIT, "launch", "--nproc-per-node", "1", *words, folder.script, env=folder.env)
    assert done.returncode == 0, done.stderr
    of_each_launch = ("the session keyring", "sessionid", "the login") if changes else ()
    found = {**json.loads(done.stdout), "stderr": done.stderr}
    return {name: value for name, value in found.items() if name not in of_each_launch}


@pytest.fixture
def prepared(folder: Folder) -> Folder:
    folder.script.write_text(ATTRIBUTES.read_text())
    folder.prepare()
    return folder


def possible(*names: str) -> str:
    """Those of the changes that are possible here."""
    found = []
    for name in names:
        words = [sys.executable, str(CHANGED), name, "--", sys.executable, "-c", ""]
        if subprocess.run(words, capture_output=True).returncode == 0:
            found.append(name)
    return ",".join(found)


LEFT_OUT = {
    "the root folder": "there is no Python in it",
    "the tracer": "it would have to be traced until its end",
    "the protection of memory": "torch cannot be loaded with it",
}
RIGHTS = ("the capabilities", "no_new_privs", "the seccomp filters", "the secure bits", "the user and groups")


@only_root
@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("names", [RIGHTS, tuple(CHANGES.keys() - {*RIGHTS, *LEFT_OUT})], ids=["rights", "others"])
def test_launch_from_a_changed_process_is_not_forked_from_the_kept_one(
    prepared: Folder, names: tuple[str, ...]
) -> None:
    before = prepared.kept()
    changes = possible(*names)
    alone = seen(prepared, "--cold", changes=changes)
    warm = seen(prepared, changes=changes)
    assert "the kept process cannot be used and is replaced: " in warm.pop("stderr")
    alone.pop("stderr")
    assert warm == alone
    wait_until(lambda: prepared.is_kept() and prepared.kept()["pid"] != before["pid"], "another kept process")
    # That one has fewer rights, or other attributes: a launch from an unchanged process does not get them.
    back = seen(prepared)
    assert "the kept process cannot be used and is replaced: " in back.pop("stderr")
    assert back != alone
    with suppress(OSError):
        CGROUP.rmdir()


@only_linux
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_launch_from_the_kept_process_has_its_own_umask_and_signals(prepared: Folder) -> None:
    ordinary = seen(prepared)
    for changes in (",".join(GIVEN), "SIGHUP"):
        alone, kept = (seen(prepared, *words, changes=changes) for words in (["--cold"], []))
        assert kept == alone
        assert kept["lines"] != ordinary["lines"]
    assert seen(prepared) == ordinary
    assert prepared.kept()["launches"] == 4


@only_linux
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ignored_signals_of_the_first_launch_are_not_those_of_the_next(folder: Folder) -> None:
    folder.script.write_text(ATTRIBUTES.read_text())
    seen(folder, changes=",".join(GIVEN))
    wait_until(folder.is_kept, "the kept process")
    alone, kept = seen(folder, "--cold"), seen(folder)
    assert kept == alone
    assert folder.kept()["launches"] == 1


ALPHA = """\
import os
import sys

folder = os.environ.get("ALPHA_HOME", "")
mode = os.environ.get("ALPHA_MODE")
local = os.path.exists("alpharc")
home = open(f"{folder}/config").read() if os.path.exists(f"{folder}/config") else ""
entries = sorted(os.listdir(f"{folder}/plugins"))
words = sys.argv[1:]
"""
SCRIPT = """\
import alpha
import torch

print([alpha.mode, alpha.local, alpha.home, alpha.entries, alpha.words])
"""


@only_linux
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_launch_whose_imports_would_see_something_else_is_not_forked_from_the_kept_process(folder: Folder) -> None:
    packages, home, inside = (folder.path / name for name in ("site-packages", "home", "inside"))
    for path in (packages, home, home / "plugins", inside):
        path.mkdir()
    (packages / "alpha.py").write_text(ALPHA)
    (inside / "alpharc").touch()
    folder.script.write_text(SCRIPT)
    folder.env |= {"PYTHONPATH": str(packages), "ALPHA_HOME": str(home)}

    def launched(*words: str, cwd: Path = folder.path, **env: str) -> tuple[str, str]:
        command = [DDPKIT, "launch", "--nproc-per-node", "1", "--preload", "alpha", *words[:1], folder.script]
        done = run(*command, *words[1:], env=folder.env | env, cwd=cwd)
        assert done.returncode == 0, done.stderr
        return done.stdout, "".join(line for line in done.stderr.splitlines() if "replaced" in line)

    launched("--keep-warm")
    wait_until(folder.is_kept, "the kept process")
    assert launched("--keep-warm", LR="0.1", SSH_TTY="/dev/pts/1")[1] == ""
    assert folder.kept()["launches"] == 1
    cases: list[tuple[str, dict[str, Any], list[str]]] = [
        ("ALPHA_MODE: not as", {"ALPHA_MODE": "fast"}, []),
        ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE: not as", {"TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}, []),
        ("the current folder, which an import has used: not as", {"cwd": inside}, []),
        ("the script's arguments, which an import has read: not as", {}, ["--lr", "1"]),
        (f"{home / 'config'} has changed, and an import has looked at it", {}, []),
        (f"{home / 'plugins'} has changed", {}, []),
    ]
    for reason, how, words in cases:
        wait_until(folder.is_kept, "the kept process")
        before = folder.kept()["pid"]
        if "config" in reason:
            (home / "config").write_text("one")
        elif "plugins" in reason:
            (home / "plugins" / "one").touch()
        shown, said = launched("--keep-warm", *words, **how)
        assert reason in said
        assert shown == launched("--cold", *words, **how)[0]
        wait_until(lambda before=before: folder.is_kept() and folder.kept()["pid"] != before, "another")  # type: ignore[misc]
        launched("--keep-warm")  # as at the start
        wait_until(folder.is_kept, "the kept process")


@only_linux
@pytest.mark.slow
def test_commands_that_look_do_not_prolong_the_life_of_the_kept_process(folder: Folder) -> None:
    folder.env["DDPKIT_KEEP_WARM"] = f"{seconds(10)}s"
    folder.prepare()
    started, pid = time.monotonic(), folder.kept()["pid"]
    while psutil.pid_exists(pid):
        assert time.monotonic() < started + 2 * seconds(10)
        assert run(DDPKIT, "warm", env=folder.env).returncode == 0
        launch("--nproc-per-node", "2", "--dry-run", folder.script, env=folder.env, cwd=folder.path)


@only_linux
@pytest.mark.slow
def test_launch_soon_after_the_first_uses_the_kept_process(folder: Folder) -> None:
    for _ in range(2):
        assert folder.launch().returncode == 0
    assert folder.kept()["launches"] == 1


CLAIMS = """\
import json, os, sys
from pathlib import Path
from ddp_kit.launcher.program import Program
from ddp_kit.launcher.warm import kept_client
program = Program(sys.executable, sys.argv[2], ())
request = {
    "argv": [sys.argv[2]], "env": dict(os.environ), "folder": os.getcwd(), "umask": 0, "ignored": [], "blocked": [],
    "import": {"program": program, "env": {}, "differing": (), "packages": None}, "facts": json.loads(sys.argv[3]),
}
print(json.dumps(kept_client.ask(Path(sys.argv[1]), "launch", request)))
"""


@only_root
@pytest.mark.slow
def test_process_cannot_claim_rights_that_it_does_not_have(folder: Folder) -> None:
    folder.prepare()
    claimed = json.dumps({**facts_of(os.getpid()), **own_facts()})
    words = [sys.executable, "-c", CLAIMS, folder.sockets[0], folder.script, claimed]
    done = run(sys.executable, CHANGED, "the capabilities", "--", *words, env=folder.env, cwd=folder.path)
    assert done.stderr == ""
    assert json.loads(done.stdout)["refused"] == "the capabilities: not as when the process was started"
