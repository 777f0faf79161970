"""What imports look at is noted, and the process that makes them is not changed by that."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_kit.env import IMPORT_TIME_VARIABLES, READ_BY_LIBRARIES, START_TIME_VARIABLES
from ddp_kit.launcher.warm.looks import Looks, Variables, looks_of, variables_read
from tests.support.launching import clean_environment

LOOKS = {
    "open({path!r})": "file",
    "os.open({path!r}, 0)": "file",
    "os.stat({path!r})": "file",
    "os.path.exists({path!r})": "file",
    "os.path.isdir({path!r})": "file",
    "os.path.getmtime({path!r})": "file",
    "os.access({path!r}, os.R_OK)": "file",
    "pathlib.Path({path!r}).read_text()": "file",
    "pathlib.Path({path!r}).is_file()": "file",
    "pathlib.Path({path!r}).is_symlink()": "file",
    "os.listdir({path!r})": "listed",
    "os.scandir({path!r})": "listed",
    "glob.glob({path!r} + '/*')": "listed",
    "list(pathlib.Path({path!r}).iterdir())": "listed",
    "os.getcwd()": "folder",
    "pathlib.Path.cwd()": "folder",
    "os.path.abspath('one')": "folder",
    "open('one')": "folder",
    "os.path.exists('one')": "folder",
    "os.listdir()": "folder",
    "sys.argv[0]": "arguments",
    "'--quiet' in sys.argv": "arguments",
    "list(sys.argv)": "arguments",
    "len([1])": "",
}


@pytest.mark.parametrize("code", LOOKS)
def test_what_an_import_looks_at_is_noted(code: str, tmp_path: Path) -> None:
    path, kind = str(tmp_path / "no such file"), LOOKS[code]
    names = {"__name__": "alpha", "ignore": Exception}
    source = f"import glob, os, pathlib, sys\ntry:\n    {code.format(path=path)}\nexcept ignore: pass"
    before = (os.stat, os.getcwd, sys.argv)

    def imported() -> None:
        exec(compile(source, "alpha.py", "exec"), names)

    looks = looks_of(imported)
    files, listed = ([path] if kind == name else [] for name in ("file", "listed"))
    assert looks is not None
    assert (looks.folder, looks.arguments) == (kind == "folder", kind == "arguments")
    assert path in looks.files if files else looks.files == []
    assert looks.listed == listed
    assert (os.stat, os.getcwd, sys.argv) == before


def test_imports_that_end_their_process_have_no_looks() -> None:
    assert looks_of(lambda: os._exit(1)) is None
    assert looks_of(lambda: None) == Looks([], [], folder=False, arguments=False)


@pytest.mark.parametrize(
    "code",
    [
        "os.environ.get('ONE')",
        "os.getenv('ONE')",
        "'ONE' in os.environ",
        "os.environb.get(b'ONE')",
        "os.environ.setdefault('ONE', '')",
        "dict(os.environ)",
        "os.environ.copy()",
        "[*os.environb]",
        "os.path.expandvars('$ONE')",
    ],
)
def test_variables_that_an_import_reads_are_noted(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ONE", raising=False)
    variables, plain = Variables(), os.environ.__class__
    with variables_read(variables):
        exec(f"import os; {code}", {"__name__": "alpha"})
    assert variables.includes("ONE")
    assert os.environ.__class__ is os.environb.__class__ is plain


def test_variables_that_nobody_reads_are_not_noted() -> None:
    variables = Variables()
    with variables_read(variables):
        exec("import os; os.environ.get('ONE')", {"__name__": "alpha"})
        exec("import os; dict(os.environ)", {"__name__": "ddp_kit.launcher.alpha"})
        exec("import os; {n: v for n, v in os.environ.items()}", {"__name__": "tqdm.utils"})
    assert variables.names == {"ONE"}
    assert variables.includes("TQDM_DISABLE")
    assert not variables.includes("LR")


GETENV = """
#include <fcntl.h>
#include <string.h>
#include <unistd.h>
extern char **environ;
static char *noted(const char *name) {
    size_t size = strlen(name);
    char *value = 0;
    for (char **entry = environ; entry && *entry; entry++)
        if (!strncmp(*entry, name, size) && (*entry)[size] == '=') value = *entry + size + 1;
    int file = open("getenv.log", O_WRONLY | O_APPEND | O_CREAT, 0600);
    if (write(file, name, size) < 0 || write(file, "\\n", 1) < 0) return value;
    close(file);
    return value;
}
char *getenv(const char *name) { return noted(name); }
char *secure_getenv(const char *name) { return noted(name); }
"""
IMPORTS = """
import importlib, json
from ddp_kit.launcher.warm import server
from ddp_kit.launcher.warm.looks import Variables, variables_read
variables = Variables()
with variables_read(variables):
    for name in (*server.PRELOADED, "torch._dynamo", "ddp_kit.trainer.trainer"):
        importlib.import_module(name)
print(json.dumps(sorted(variables.names)))
"""


@pytest.mark.slow
def test_every_variable_that_libraries_read_when_they_are_loaded_is_compared(tmp_path: Path) -> None:
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    (tmp_path / "getenv.c").write_text(GETENV)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", "getenv.so", "getenv.c"], cwd=tmp_path, check=True)
    env = clean_environment({"LD_PRELOAD": str(tmp_path / "getenv.so")})
    done = subprocess.run([sys.executable, "-c", IMPORTS], cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    read = {*(tmp_path / "getenv.log").read_text().split()}
    assert len(read) > 30
    compared = (*IMPORT_TIME_VARIABLES, *START_TIME_VARIABLES, *READ_BY_LIBRARIES)
    by_the_interpreter = {"PATH", "__PYVENV_LAUNCHER__"}  # to find itself; its path is compared
    assert {name for name in read if not name.startswith(compared)} - by_the_interpreter == set()
