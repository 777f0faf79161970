"""A script cannot tell a warm worker from a cold one, nor either from plain python, beyond what the tables here say.

Each probe in `probes/` prints what it sees as one line of JSON. It runs as `python -u probe.py`, as
`ddpkit launch --cold probe.py` (an interpreter of its own for each worker), as `ddpkit launch --keep-warm probe.py`
(forked from a server that has imported torch), and by the last command again (forked from the process that it has
kept); what they say, how they end and what they write to stderr is compared name by name.

Where a probe tells only of the script, `--cold` and warm are what the launcher has such workers from: two servers that
serve all of these cases, so that torch is not imported for each of them three times.
"""

import fcntl
import json
import os
import pty
import re
import resource
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import termios
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import chdir
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from labels import unlabelled
from launching import DDPKIT, seconds, wait_until

from ddp_kit.launcher.program import Program
from ddp_kit.launcher.warm import kept_client
from ddp_kit.launcher.warm.client import WarmServer

Facts = dict[str, Any]
Seen = Callable[[str, str], Facts]

PROBES = Path(__file__).parent / "probes"
LAUNCH = (str(DDPKIT), "launch", "--nproc-per-node")
COLD = ("--cold",)
KEEP = ("--keep-warm=5m",)
ONE_THREAD = {"OMP_NUM_THREADS": "1"}

# Where a warm worker may differ from a cold one: case/name of what was seen (with wildcards) -> why.
WARM_IS_NOT_COLD: dict[str, str] = {
    "*/*.sys.modules.*": "torch, and what the server needs, is imported before the script begins",
    "*/*.sys.loggers.*": "torch makes its loggers when it is imported",
    "*/before.sys.warnings.filters": "torch adds its filters when it is imported",
    "*/before.threads.of the process": "numpy's threads are there from the start, where OMP_NUM_THREADS is not 1",
    "*/before.process.status.SigCgt": "numpy's threads are there from the start, where OMP_NUM_THREADS is not 1",
    "*/*.sys.gc frozen": "what all ranks share is kept out of the collector's sight, so that it stays shared",
    "*/*.main.frame below": "the script is called from the server's code",
    "*/*.main.depth of the stack": "the script is called from the server's code",
    "ends: stacks/stderr": "the script is called from the server's code",
    "ends: too deep/stderr": "the script is called from the server's code, in five frames of the thousand",
    "*/*.command line of ps": "the words are those of python, but the kernel gives them with blanks in between",
    "*/drawn.hash of a word": "all ranks have the server's hash seed, as with PYTHONHASHSEED",
    "*/launcher": "the last line names the exception; where a script cannot be warm, a line says why",
}

# Where a worker of a kept process may differ from another warm one.
KEPT_IS_NOT_WARM: dict[str, str] = {
    "*/*.sys.modules.ddp_kit.launcher.warm.*": "the kept process has imported these modules",
    "*/*.main.depth of the stack": "the script is called from the kept process's code, too",
    "*/drawn.hash of a word": "all launches have the kept process's hash seed",
    "no number of threads/stderr": "OpenMP says so in each process that imports torch; the kept process has done it",
    "ends: stacks/stderr": "the script is called from the kept process's code, too",
    "ends: too deep/stderr": "the script is called from the kept process's code, too",
}

# Where any worker may differ from plain python.
WORKER_IS_NOT_PYTHON: dict[str, str] = {
    "*/*.dies with its parent": "the kernel ends the workers of a launcher that was killed",
    "*environment.*RANK": "the place in the job, as torchrun gives it",
    "*environment.*WORLD_SIZE": "the place in the job, as torchrun gives it",
    "*environment.ROLE_NAME": "the place in the job, as torchrun gives it",
    "*environment.MASTER_*": "where the ranks meet",
    "*environment.TORCH*": "torchrun's own variables",
    "*/torch.elastic": "torch says that torchrun's variables are there",
    "*.process.leads its *": "each worker is started in a session of its own, as by torchrun",
    "*.process.is alone in its session": "each worker is started in a session of its own, as by torchrun",
    "no number of threads/stderr": "OpenMP says so in each process that imports torch, and the launcher does too",
    "terminal/*.process.terminal.*": "a session of its own has no controlling terminal",
    "*/launcher": "python has none",
}

# Beside these, what is of one run only: the port, the run's id, the folder of error files.
OF_ONE_RUN = ("*environment.MASTER_PORT", "*environment.TORCHELASTIC_RUN_ID", "*environment.TORCHELASTIC_ERROR_FILE")


@dataclass(frozen=True)
class Case:
    """How a probe is run."""

    words: tuple[str, ...]
    """The script and its arguments, in a folder with copies of all probes."""
    env: Mapping[str, str] = field(default_factory=lambda: ONE_THREAD)
    exit_code: int = 0
    flags: tuple[str, ...] = ()
    """The launcher's; there is no plain python to compare with where they ask for more than one process or attempt."""
    processes: int = 1
    stdin: str = ""
    terminal: bool = False
    prepared: Callable[[], None] | None = None
    """What the process does before it becomes python, or the launcher."""
    served: bool = False
    """Whether the workers come from the servers of all cases, without a launcher."""

    @property
    def is_for_python(self) -> bool:
        return self.processes == 1 and not self.flags


def poor() -> None:
    """Take away what the system gives by default."""
    os.umask(0o027)
    os.nice(3)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, 1024))
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])


PYTHON_VARIABLES = {
    "PYTHONSAFEPATH": "1",
    "PYTHONDONTWRITEBYTECODE": "1",
    "PYTHONFAULTHANDLER": "1",
    "PYTHONHASHSEED": "0",
    "PYTHONINTMAXSTRDIGITS": "1000",
    "PYTHONIOENCODING": "latin-1:backslashreplace",
    "PYTHONUNBUFFERED": "1",
}
LARGE = {"LARGE": "x" * 100_000, "LARGE_TOO": "y" * 100_000, "BYTES": "\udcff=\udcfe", "ÜNÏ": "", "PYTHONOPTIMIZE": "2"}
EXIT_CODES = {
    "in order": 0,
    "exit 3": 3,
    "exit text": 1,
    "exit 2**70": 255,
    "exit at once": 5,
    "exception": 1,
    "base exception": 1,
    "chained": 1,
    "group with a note": 1,
    "syntax error in a module": 1,
    "no such module": 1,
    "own hook": 1,
    "in threads": 0,
    "interrupt": 130,
    "interrupt from outside": 130,
    "terminated": 143,
    "segmentation fault": 139,
    "too deep": 1,
    "stacks": 0,
    "unflushable": 120,
    "own streams": 0,
    "unclear stream": 0,
    "no streams": 0,
    "modules that are none": 0,
    "no main": 0,
    "main is none": 0,
    "audited": 0,
    "watchdogs": 0,
    "exit in a handler": 6,
    "broken pipe": 120,
    "gone in order": 0,
    "recorded": 1,
}
CORES = len(os.sched_getaffinity(0))
ITSELF = ("itself.py", "--lr", "0.1 ' x", "", "--", "-", "ünï", "\udcff\udcfe bytes")
CASES = {
    "itself": Case(ITSELF),
    "two threads": Case(("itself.py",), env={"OMP_NUM_THREADS": "2", "PYTHONWARNINGS": "error"}),
    "threads not said": Case(("itself.py",), env={}),
    "more threads than cores": Case(("itself.py",), env={"OMP_NUM_THREADS": f"{2 * CORES}"}),
    "threads of OpenMP and of BLAS": Case(("itself.py",), env={"OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "1"}),
    "no number of threads": Case(("itself.py",), env={"OMP_NUM_THREADS": "1e3"}),
    "one processor": Case(("itself.py",), env={}, prepared=poor),
    "variables of python": Case(("itself.py",), env=ONE_THREAD | PYTHON_VARIABLES),
    "large environment": Case(("package/../itself.py", "without-torch"), env=LARGE),
    "terminal": Case(("itself.py",), terminal=True),
    "restarted": Case(ITSELF, env=ONE_THREAD | {"FAIL_FIRST": "1"}, flags=("--max-restarts", "1")),
    "two workers draw": Case(("numbers_drawn.py",), processes=2),
    "odd letters, a link, latin-1, CRLF": Case(("odd lètters/scrïpt one.py", "without-torch")),
    "whole path, mark of byte order": Case(("{folder}/marked.py", "without-torch")),
    "module with a mistake": Case(("-m", "mistake"), exit_code=1, served=True),
    "no python name": Case(("script",)),
    "folder": Case(("folder", "word"), served=True),
    "zip file": Case(("zipped.zip", "word"), served=True),
    "module": Case(("-m", "package.inner", "--word", "-m"), served=True),
    "package": Case(("-m", "package", "word"), served=True),
    "no such module": Case(("-m", "package.nowhere"), exit_code=1, served=True),
    "module that fails": Case(("-m", "package.fails"), exit_code=1, served=True),
    "shadows": Case(("shadows/script.py",)),
    "pickles": Case(("pickles.py", "word"), served=True),
    "pickles of a module": Case(("-m", "pickles", "word"), served=True),
    "loader": Case(("loader.py", "word"), served=True),
    "tensors": Case(("tensors.py",), served=True),
    "children": Case(("children.py",)),
    "stdin": Case(("stdin.py",), stdin="first line\nsecond, ünïcode\n\nlast without end"),
    "stdin of a terminal": Case(("stdin.py",), stdin="first line\n", terminal=True),
    "writes": Case(("writes.py",)),
    "sets threads": Case(("sets_threads.py",)),
} | {f"ends: {name}": Case(("endings.py", name), exit_code=code, served=True) for name, code in EXIT_CODES.items()}
STARTED_COLD = ("no python name", "folder", "zip file", "shadows", "sets threads")
NEVER_KEPT = ("no python name", "folder", "zip file")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the probes, and what a repository keeps badly: links, odd names and encodings, mistakes."""
    made = tmp_path_factory.mktemp("same") / "probes"
    shutil.copytree(PROBES, made, ignore=shutil.ignore_patterns("__pycache__"))
    text = (made / "itself.py").read_text()
    (made / "odd lètters").mkdir()
    (made / "odd lètters" / "scrïpt one.py").symlink_to("../latin.py")
    latin = "#!/usr/bin/env python\n# -*- coding: latin-1 -*-\n" + text.replace("6 * 7", "len('ünï') * 14")
    (made / "latin.py").write_bytes(latin.replace("\n", "\r\n").encode("latin-1"))
    (made / "marked.py").write_text("\ufeff" + text)
    (made / "mistake.py").write_text("print('not reached')\nx = (\n")
    (made / "broken").mkdir()
    (made / "broken" / "with_a_mistake.py").write_text("good = 1\nx = (\n")
    (made / "package" / "fails.py").write_text("from . import nothing_of_this_name\n")
    (made / "script").write_text("import sys\n\nprint('{\"name\": \"' + __file__ + sys.path[0] + '\"}')\n")
    with zipfile.ZipFile(made / "zipped.zip", "w") as packed:
        for file in (made / "folder").glob("*.py"):
            packed.write(file, file.name)
    return made


@pytest.fixture(scope="module")
def servers(folder: Path) -> Iterator[dict[str, WarmServer]]:
    """What gives the launcher its workers, by way."""
    with chdir(folder):
        started = {way: WarmServer([], inherited() | ONE_THREAD, forks=way == "warm") for way in ("cold", "warm")}
    yield started
    for server in started.values():
        server.close()


@pytest.fixture(scope="module")
def runtime() -> Iterator[Path]:
    """The folder for the sockets of kept processes, whose path must be short."""
    with tempfile.TemporaryDirectory(prefix="kept-") as made:
        yield Path(made)
        stop_kept(Path(made))


@pytest.fixture(scope="module")
def seen(folder: Path, servers: dict[str, WarmServer], runtime: Path) -> Seen:
    """What the probe of a case saw under python, cold, warm or kept, by name.

    A case runs once, all its ways at a time, and then from the kept process.
    """

    @cache
    def all_ways(name: str) -> dict[str, Facts]:
        case = CASES[name]
        words = [word.format(folder=folder) for word in case.words]
        launch = (*LAUNCH, str(case.processes), *case.flags)
        commands = {
            "python": (sys.executable, "-u", *words),
            "cold": (*launch, *COLD, *words),
            "warm": (*launch, *KEEP, *words),
        }
        place = runtime if case.served else Path(tempfile.mkdtemp(dir=runtime))
        running = {
            way: Served(case, words, servers[way], place)
            if case.served and way in servers
            else Running(case, command, folder, place)
            for way, command in commands.items()
            if way in ways_of(name)
        }
        try:
            facts = {way: one.facts() for way, one in running.items()}
            if "kept" in ways_of(name):
                facts["kept"] = facts_of_kept(case, commands["warm"], folder, place)
        finally:
            for one in running.values():
                one.kill()
            if not case.served:
                stop_kept(place)
        return facts

    def one_way(name: str, way: str) -> Facts:
        facts = all_ways(name)[way]
        assert facts["exit code"] == CASES[name].exit_code, (way, facts)
        return facts

    return one_way


def ways_of(name: str) -> tuple[str, ...]:
    python = ("python",) if CASES[name].is_for_python else ()
    return (*python, "cold", "warm", *(() if name in NEVER_KEPT else ("kept",)))


def inherited() -> dict[str, str]:
    """What a probe's environment has of this one's."""
    return {name: os.environ[name] for name in ("PATH", "HOME", "LANG", "PYTHONPATH") if name in os.environ}


def environment(case: Case, runtime: Path) -> dict[str, str]:
    return inherited() | dict(case.env) | {"XDG_RUNTIME_DIR": str(runtime)}


def facts_of_kept(case: Case, command: Sequence[str], cwd: Path, runtime: Path) -> Facts:
    """What a probe sees that is forked from its kept process."""
    program = program_of(command[command.index(KEEP[0]) + 1 :])
    with chdir(cwd), pytest.MonkeyPatch.context() as patched:
        patched.setenv("XDG_RUNTIME_DIR", str(runtime))
        address = kept_client.address_of(program, None)
    assert address is not None
    if case.served and not address.exists():
        Running(case, command, cwd, runtime).facts()
    wait_until(address.exists, "the kept process")
    before = ask_kept(address, "description")["launches"]
    facts = Running(case, command, cwd, runtime).facts()
    assert ask_kept(address, "description")["launches"] == before + 1, facts
    return facts


def ask_kept(address: Path, what: str) -> dict[str, Any]:
    answer = kept_client.ask(address, what)
    assert answer is not None
    return answer


def stop_kept(runtime: Path) -> None:
    for address in runtime.glob("ddpkit/*.kept"):
        ask_kept(address, "stop")


def program_of(words: Sequence[str]) -> Program:
    module = words[0] == "-m"
    name, *arguments = words[module:]
    return Program(sys.executable, name, tuple(arguments), module)


class Running:
    """A process that runs a probe, with pipes or on a terminal of its own."""

    def __init__(self, case: Case, command: Sequence[str], cwd: Path, runtime: Path) -> None:
        streams: Any = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
        self.case, self.terminal, prepared = case, -1, case.prepared
        if case.terminal:
            self.terminal, theirs = pty.openpty()
            fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
            how = termios.tcgetattr(theirs)
            how[3] &= ~termios.ECHO  # what is typed would come between the lines of the probe
            termios.tcsetattr(theirs, termios.TCSANOW, how)
            streams = dict.fromkeys(streams, theirs)
            prepared = _take_the_terminal
        self.process = subprocess.Popen(
            command,
            cwd=cwd,
            env=environment(case, runtime),
            preexec_fn=prepared,
            start_new_session=case.terminal,
            **streams,
        )
        if case.terminal:
            os.close(theirs)

    def facts(self) -> Facts:
        """Wait for the end; what the probe printed, with what else was written and the exit code."""
        try:
            out, err = (self._shown(), b"") if self.case.terminal else self._communicate()
            code = self.process.wait(timeout=seconds(90))
        except subprocess.TimeoutExpired:
            self.process.terminate()
            self.process.communicate(timeout=seconds(60))
            return {"exit code": "none: it hangs"}
        return _facts(out, err, code)

    def kill(self) -> None:
        """End it, where it is still there."""
        self.process.kill()

    def _communicate(self) -> tuple[bytes, bytes]:
        return self.process.communicate(self.case.stdin.encode(), timeout=seconds(90))

    def _shown(self) -> bytes:
        os.write(self.terminal, self.case.stdin.encode())
        shown = b""
        while True:
            try:
                shown += os.read(self.terminal, 65536)
            except OSError:  # the last process has closed the terminal
                os.close(self.terminal)
                return shown


class Served:
    """A worker of one of the servers that runs a probe."""

    def __init__(self, case: Case, words: Sequence[str], server: WarmServer, runtime: Path) -> None:
        self._server = server
        self._files = [tempfile.TemporaryFile() for _ in range(2)]  # noqa: SIM115  # closed by `facts`
        command = (sys.executable, "-u", *words)
        streams = [file.fileno() for file in self._files]
        self._process = server.start(command, environment(case, runtime), program_of(words), streams)

    def facts(self) -> Facts:
        """Wait for the end; as of `Running`, and what the launcher would have said of the start."""
        try:
            code = self._process.wait(timeout=seconds(90))
        except subprocess.TimeoutExpired:
            return {"exit code": "none: it hangs"}
        self._server.clear(succeeded=code == 0)
        said = []
        for file in self._files:
            file.seek(0)
            said.append(file.read())
            file.close()
        cold = [f"starting cold: {self._process.cold}"] if self._process.cold else []
        return _facts(*said, code) | {"launcher": cold}

    def kill(self) -> None:
        """End it, where it is still there."""
        if self._process.returncode is None:
            self._server.kill(self._process)


def _facts(out: bytes, err: bytes, code: int) -> Facts:
    lines = unlabelled(out.decode(errors="surrogateescape")).splitlines()
    printed = [line for line in lines if line.startswith("{")]
    others, launcher = _told_apart(unlabelled(err.decode(errors="surrogateescape")).splitlines())
    return _merged([_flat(json.loads(line)) for line in printed]) | {
        "exit code": 128 - code if code < 0 else code,  # as a shell says it
        "stdout": [_without_addresses(line) for line in lines if line not in printed],
        "stderr": others,
        "launcher": launcher,
    }


def _take_the_terminal() -> None:
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def _told_apart(stderr: list[str]) -> tuple[list[str], list[str]]:
    """The script's lines, and those of the launcher and of torch's agent, without pids and times."""
    agent = re.compile(r"[IWE]\d{4} [\d:.]+ +\d+ .*?\] ")
    last_words = re.compile(r"ddpkit: rank \d+ failed first")
    end = next((number for number, line in enumerate(stderr) if last_words.match(line)), len(stderr))
    launcher = [line for line in stderr[:end] if line.startswith("ddpkit: ") or agent.match(line)]
    script = [_without_addresses(line) for line in stderr[:end] if line not in launcher]
    return script, [re.sub(r"pid:? \d+", "pid", agent.sub("", line)) for line in launcher + stderr[end:]]


def _without_addresses(line: str) -> str:
    return re.sub(r"0x[0-9a-f]+", "0x", line)


def _flat(facts: Facts, above: str = "") -> Facts:
    flat: Facts = {}
    for name, value in facts.items():
        flat |= _flat(value, f"{above}{name}.") if isinstance(value, dict) else {above + name: value}
    return flat


def _merged(ranks: list[Facts]) -> Facts:
    """One rank's facts; where several ranks do not agree, how many ranks say different things."""
    values = {name: [rank.get(name) for rank in ranks] for rank in ranks for name in rank}
    return {name: all_[0] if len({*map(repr, all_)}) == 1 else f"{len(all_)} values" for name, all_ in values.items()}


def differences(case: str, one: Facts, other: Facts, *excused: str) -> str:
    """What is not the same and has no row, a line each; empty where all is the same."""
    rows = (*excused, *OF_ONE_RUN)
    names = [name for name in one | other if not any(fnmatchcase(f"{case}/{name}", row) for row in rows)]
    pairs = {name: (one.get(name, "is not there"), other.get(name, "is not there")) for name in names}
    return "".join(f"\n{name}:\n    {a!r}\n    {b!r}" for name, (a, b) in pairs.items() if a != b)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_kept_warm_and_cold_workers_and_plain_python_look_alike_to_a_script(case: str, seen: Seen) -> None:
    assert not differences(case, seen(case, "cold"), seen(case, "warm"), *WARM_IS_NOT_COLD)
    for way in ("cold", "warm") if CASES[case].is_for_python else ():
        excused = WORKER_IS_NOT_PYTHON | (WARM_IS_NOT_COLD if way == "warm" else {})
        assert not differences(case, seen(case, "python"), seen(case, way), *excused), way
    if "kept" in ways_of(case):
        excused = KEPT_IS_NOT_WARM | ({"*/launcher": "the other ways have none"} if CASES[case].served else {})
        assert not differences(case, seen(case, "warm"), seen(case, "kept"), *excused)
    cold = any("starting cold" in line for line in seen(case, "warm")["launcher"])
    assert cold == (case in STARTED_COLD)


@pytest.mark.slow
def test_second_attempt_looks_like_the_first_to_a_script(seen: Seen) -> None:
    of_the_attempt = (
        "*environment.TORCHELASTIC_*",
        "*environment.FAIL_FIRST",
        "*environment.XDG_RUNTIME_DIR",
        "*/launcher",
    )
    assert not differences("itself", seen("itself", "warm"), seen("restarted", "warm"), *of_the_attempt)


@pytest.mark.slow
def test_two_workers_draw_different_numbers(seen: Seen) -> None:
    drawn = {name: value for name, value in seen("two workers draw", "cold").items() if name.startswith("drawn.")}
    assert len(drawn) > 5
    assert set(drawn.values()) == {"2 values"}, drawn


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["--redirects", "--tee"])
@pytest.mark.parametrize("way", [COLD, ()], ids=["cold", "warm"])
def test_log_files_have_every_byte_of_the_output(flag: str, way: tuple[str, ...], folder: Path, tmp_path: Path) -> None:
    environment = {name: value for name, value in inherited().items() if name != "HOME"}
    given: Any = {"cwd": folder, "env": environment, "capture_output": True, "timeout": seconds(200)}
    plain = subprocess.run([sys.executable, "-u", "writes.py"], **given)
    logs = ["--log-dir", str(tmp_path), flag, "3"]
    run = subprocess.run([*LAUNCH, "1", *way, *logs, "writes.py"], **given)
    assert run.returncode == plain.returncode == 0, run.stderr
    for name, wanted in (("stdout.log", plain.stdout), ("stderr.log", plain.stderr)):
        (log,) = tmp_path.rglob(name)
        assert log.read_bytes() == wanted
