"""What a script imports first is imported once per node, where no worker can tell the difference."""

import ast
import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from textwrap import dedent
from typing import Any, NoReturn

import pytest

from ddp_kit.env import VARIABLES_OF_ONE_WORKER
from ddp_kit.launcher.program import Program
from ddp_kit.launcher.warm import imports
from ddp_kit.launcher.warm.messages import Import
from tests.support.launching import DDPKIT, launch, seconds, started, wait_until


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of installed packages."""
    folder = tmp_path / "lib" / "site-packages"
    folder.mkdir(parents=True)
    monkeypatch.syspath_prepend(folder)
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name in ("alpha", "beta", "einops", "nltk"):
        (folder / f"{name}.py").write_text("thing = 1\n")
    return folder


def the_script(tmp_path: Path, text: str) -> Program:
    folder = tmp_path / "mine"
    folder.mkdir(exist_ok=True)
    (folder / "train.py").write_text(dedent(text))
    return Program(sys.executable, str(folder / "train.py"), ("--lr", "1"))


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("import alpha\nimport beta", ["import alpha", "import beta"]),
        ("import os, alpha, beta.inner as b", ["import alpha", "import beta.inner as b"]),
        ('"""Doc."""\nfrom __future__ import annotations\nfrom alpha import thing', ["from alpha import thing"]),
        ("import alpha\nprint(1)\nimport beta", ["import alpha"]),
        ("import os\nos.environ['A'] = '1'\nimport alpha", []),
        ("import alpha\nimport own\nimport beta", ["import alpha"]),
        ("import alpha\nfrom . import own\nimport beta", ["import alpha"]),
        ("import alpha\nimport not_there\nimport beta", ["import alpha"]),
        ("try:\n    import alpha\nexcept ImportError:\n    pass\nimport beta", []),
        ("from ddp_kit import Trainer\nimport alpha", ["import alpha"]),
        ("import alpha\nimport beta as", []),
        ("", []),
    ],
)
def test_leading_imports_are_those_before_anything_else(
    packages: Path, tmp_path: Path, text: str, expected: list[str]
) -> None:
    program = the_script(tmp_path, "")
    (Path(program.name).parent / "own.py").touch()
    Path(program.name).write_text(text)
    assert [ast.unparse(each.node) for each in imports.leading_imports(program)] == expected


def test_leading_imports_end_before_an_unfit_package_and_a_file_of_the_same_name(
    packages: Path, tmp_path: Path
) -> None:
    program = the_script(tmp_path, "import alpha\nimport beta")
    assert [each.package for each in imports.leading_imports(program, ["beta"])] == ["alpha"]
    (Path(program.name).parent / "alpha.py").touch()
    assert imports.leading_imports(program) == []


def imported(request: Import) -> Any:
    """Run the imports in a fork of this process; return what `Imported` contains, or the unfit package and why."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))  # noqa: SIM115

        def fail(package: str, reason: str) -> NoReturn:
            os.write(write, json.dumps([package, reason]).encode())
            os._exit(0)

        try:
            done = imports.run(request, {"HIDDEN": "1"}, fail)
            content = {
                **vars(done),
                "names": sorted(done.names),
                "output": [text.decode() for text in done.output],
                "main": sorted(vars(done.main)),
            }
            os.write(write, json.dumps(content).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    return json.loads(text)


def request(
    program: Program, env: Mapping[str, str] | None = None, packages: tuple[str, ...] | None = ("alpha", "beta")
) -> Import:
    return Import(program, {**os.environ, **(env or {})}, VARIABLES_OF_ONE_WORKER, packages)


@pytest.mark.parametrize(
    ("module", "reason"),
    [
        ("import os; os.environ.get('RANK')", "it reads RANK when it is imported"),
        ("import os; os.getenv('MASTER_PORT')", "it reads MASTER_PORT"),
        ("import os\ntry: os.environ['LOCAL_RANK']\nexcept: pass", "it reads LOCAL_RANK"),
        ("import os; dict(os.environ)", "it reads "),
        (
            "try: import own\nexcept ImportError: pass",
            "it looks for a module own, which is also in the script's folder",
        ),
        ("import importlib.util; importlib.util.find_spec('own')", "it looks for a module own"),
        ("raise ValueError", "its import fails (ValueError)"),
        ("raise SystemExit(3)", "its import fails (SystemExit)"),
    ],
)
def test_package_whose_import_a_worker_could_notice_is_unfit(
    packages: Path, tmp_path: Path, module: str, reason: str
) -> None:
    (packages / "beta.py").write_text(module)
    program = the_script(tmp_path, "import alpha\nimport beta")
    (Path(program.name).parent / "own.py").touch()
    package, why = imported(request(program))
    assert package == "beta", why
    assert reason in why


JEMALLOC = """
import ctypes, threading
named, ends = threading.Event(), threading.Event()
def wait():
    ctypes.CDLL(None).prctl(15, b"jemalloc_bg_thd", 0, 0, 0)  # PR_SET_NAME
    named.set()
    ends.wait()
threading.Thread(target=wait, daemon=True).start()
named.wait()
"""


def test_package_that_starts_the_thread_of_jemalloc_is_imported(packages: Path, tmp_path: Path) -> None:
    (packages / "beta.py").write_text(JEMALLOC)
    assert "beta" in imported(request(the_script(tmp_path, "import beta")))["names"]


def test_imports_see_the_place_and_the_variables_of_a_worker(packages: Path, tmp_path: Path) -> None:
    (packages / "beta.py").write_text(
        "import os, sys, __main__; [name for name in os.environ if name.startswith('FSSPEC_')]\n"
        "print(sys.argv, sys.path[0], __main__.__file__)\n"
        "print(os.environ['MINE'], os.environ.get('ABSENT'), os.environ['HIDDEN'], file=sys.stderr)\n"
        "os.environ.setdefault('FIRST', '1'); os.environ['FIRST'] += '2'; del os.environ['GONE']"
    )
    program = the_script(tmp_path, "import beta")
    done = imported(request(program, {"MINE": "7", "GONE": "1"}))
    folder = str(Path(program.name).parent)
    assert done["output"] == [f"{[program.name, '--lr', '1']} {folder} {program.name}\n", "7 None 1\n"]
    assert done["read"].items() >= {"MINE": "7", "ABSENT": None, "FIRST": None}.items()
    assert "HIDDEN" not in done["read"]
    assert done["changed"] == {"FIRST": "12", "GONE": None}


def test_import_of_fsspec_reads_only_its_own_variables(
    packages: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "fsspec"]:  # imported by another test
        monkeypatch.delitem(sys.modules, name)
    done = imported(request(the_script(tmp_path, "import fsspec"), {"FSSPEC_FILE": "{}", "MINE": "7"}, None))
    assert done["read"].get("FSSPEC_FILE") == "{}"
    assert "MINE" not in done["read"]


def test_variables_that_imports_have_read_are_compared_with_those_of_a_worker() -> None:
    done = imports.Imported(read={"A": "1", "B": None})
    assert done.variable_that_differs({"A": "1", "C": "2"}) is None
    assert done.variable_that_differs({"A": "2"}) == "A"
    assert done.variable_that_differs({"A": "1", "B": ""}) == "B"


def test_unfit_packages_are_remembered_until_they_change(packages: Path, tmp_path: Path) -> None:
    env = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    assert imports.unfit(env) == {}
    imports.remember("alpha", "why", env)
    imports.remember("beta", "because", env)
    assert imports.unfit(env) == {"alpha": "why", "beta": "because"}
    os.utime(packages / "alpha.py", (1, 1))
    assert imports.unfit(env) == {"beta": "because"}
    (packages / "beta.py").unlink()
    assert imports.unfit(env) == {}
    file = tmp_path / "cache" / "ddpkit" / "imports.json"
    assert (file.stat().st_mode & 0o777, file.parent.stat().st_mode & 0o777) == (0o600, 0o700)


@pytest.mark.parametrize("content", ["", "[]", '{"alpha": 3}', '{"alpha": {"version": "x"}}'])
def test_unfit_packages_in_a_damaged_file_are_ignored(packages: Path, tmp_path: Path, content: str) -> None:
    env = {"XDG_CACHE_HOME": str(tmp_path)}
    (tmp_path / "ddpkit").mkdir()
    (tmp_path / "ddpkit" / "imports.json").write_text(content)
    assert imports.unfit(env) == {}
    imports.remember("beta", "because", env)


def test_unfit_packages_of_a_user_without_a_home_are_not_remembered(
    packages: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", fail)
    imports.remember("alpha", "why", {})
    assert imports.unfit({}) == {}


def test_unfit_packages_beside_a_damaged_entry_are_remembered(packages: Path, tmp_path: Path) -> None:
    env = {"XDG_CACHE_HOME": str(tmp_path)}
    imports.remember("alpha", "why", env)
    file = tmp_path / "ddpkit" / "imports.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"other": 3, "another": {"version": "x"}}))
    imports.remember("beta", "because", env)
    assert imports.unfit(env) == {"alpha": "why", "beta": "because"}


# --- With the real command --------------------------------------------------------------------------------------------


# einops and nltk are names in IMPORTED_ONCE.
SCRIPT = """\
import einops
import nltk
import os
import signal
open(os.environ["OUT"] + os.environ["RANK"], "w").write(f"{einops.pid == os.getpid()} {nltk.pid == os.getpid()}")
"""


@pytest.mark.slow
def test_imports_are_made_once_and_an_unfit_package_in_each_process(packages: Path, tmp_path: Path) -> None:
    (packages / "einops.py").write_text("import os; pid = os.getpid(); print('from einops')")
    (packages / "nltk.py").write_text("import os; pid = os.getpid(); rank = os.environ.get('RANK')")
    program = the_script(tmp_path, SCRIPT)
    env = {"OUT": str(tmp_path / "rank")}
    for launches in range(2):
        done = launch("--nproc-per-node", "2", program.name, env=env)
        assert done.returncode == 0, done.stderr
        assert sorted(done.stdout.splitlines()) == ["from einops"] * 2
        assert ("nltk is imported in each process" in done.stderr) == (launches == 0)
        assert [(tmp_path / f"rank{rank}").read_text() for rank in range(2)] == ["False True"] * 2
    done = launch("--nproc-per-node", "2", "--preload", "off", program.name, env=env)
    assert [(tmp_path / f"rank{rank}").read_text() for rank in range(2)] == ["True True"] * 2
    done = launch("--nproc-per-node", "2", "--dry-run", program.name, env=env)
    assert "once per node: torch, einops; in each process: nltk (it reads RANK" in done.stdout


@pytest.mark.slow
def test_import_that_crashes_does_so_in_the_workers(packages: Path, tmp_path: Path) -> None:
    (packages / "nltk.py").write_text("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)")
    program = the_script(tmp_path, SCRIPT)
    done = launch("--nproc-per-node", "2", program.name)
    assert done.returncode == 139
    assert "SIGSEGV" in done.stderr


@pytest.mark.slow
def test_signal_during_the_imports_ends_the_job(packages: Path, tmp_path: Path) -> None:
    (packages / "nltk.py").write_text(
        "import os, pathlib, time; pathlib.Path(os.environ['OUT']).touch(); time.sleep(600)"
    )
    program = the_script(tmp_path, SCRIPT)
    began = tmp_path / "began"
    with started(DDPKIT, "launch", "--nproc-per-node", "2", program.name, env={"OUT": str(began)}) as process:
        wait_until(began.exists, "the import")
        process.send_signal(signal.SIGINT)
        assert process.wait(seconds(20)) == 130
