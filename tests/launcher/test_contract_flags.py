"""The contract of torchrun's command line: the same words once to `torchrun` and once to `ddpkit launch`.

What can be seen of both must be equal: the workers' lines and environments, the log folder, success or failure.
"""

import inspect
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import argparse_util
from torch.distributed import run as torchrun

from tests.support.labels import unlabelled
from tests.support.launching import BIN, DDPKIT, PROGRAMS, clean_environment, free_port, seconds, started, wait_until

pytestmark = pytest.mark.slow

COMMANDS = {"torchrun": [str(BIN / "torchrun")], "ddpkit": [str(DDPKIT), "launch"]}
LONG = int(seconds(120))
FLAGS = {flag for action in torchrun.get_args_parser()._actions for flag in action.option_strings}

# Earlier versions of torchrun meet at port 29500; later ones at a free port, where all is on one node.
AT_A_FIXED_PORT = inspect.getsource(torchrun.run).count("uuid4") == 1

WORKER = (PROGRAMS / "says_who_it_is.py").read_text()
ENDS = str(PROGRAMS / "worker_endings.py")


@dataclass
class Seen:
    """What is left of a launch, without what is different in each of torchrun's own."""

    failed: bool
    lines: list[str]
    """What the workers wrote, on either stream, sorted: ranks take no turns."""
    environments: dict[str, dict[str, str]]
    """What was added, by rank and attempt, as in 1.0."""
    logs: dict[str, list[str]]
    """The lines of each file in the folder logs, sorted."""
    places: set[str] = field(compare=False)
    """Where the workers are told to meet."""
    code: int = field(compare=False)
    errors: str = field(compare=False)


Same = Callable[..., Seen]


def _start(launcher: str, words: list[str], folder: Path, env: dict[str, str]) -> "subprocess.Popen[str]":
    paths = os.pathsep.join(filter(None, [env.get("PYTHONPATH"), os.environ.get("PYTHONPATH")]))
    environment = clean_environment({"OMP_NUM_THREADS": None, **env, "PYTHONPATH": paths or None})
    folder.mkdir(exist_ok=True)
    command, pipe = [*COMMANDS[launcher], *words], subprocess.PIPE
    elsewhere = ("--rdzv", "--master", "--standalone", "--nnodes", "PET_")
    if launcher == "torchrun" and AT_A_FIXED_PORT and not any(each.startswith(elsewhere) for each in (*words, *env)):
        command.insert(1, "--standalone")
    return subprocess.Popen(command, cwd=folder, env=environment, text=True, stdin=pipe, stdout=pipe, stderr=pipe)


def _seen(agents: list["subprocess.Popen[str]"], folder: Path, before: str = "") -> Seen:
    """What is to be seen of a launch on as many nodes as there are agents. `before`: what was read already."""
    try:
        written = [agent.communicate(timeout=LONG) for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    both = unlabelled("\n".join([before, *(stream for streams in written for stream in streams)]))
    environments, places = {}, set()
    for file in folder.glob("environment.*"):
        found = json.loads(file.read_text())
        places.add(f"{found.pop('MASTER_ADDR')}:{found.pop('MASTER_PORT')}")
        found.pop("OMP_NUM_THREADS", None)  # ours is a share of the machine's cores
        found.pop("PYTORCH_ALLOC_CONF", None)  # our default on a machine with GPUs
        found.pop("TORCHINDUCTOR_CACHE_DIR", None)  # torch sets it in itself when it logs a traceback
        error_file = "/".join(Path(found.pop("TORCHELASTIC_ERROR_FILE")).parts[-3:])
        given = {name: _any_run(value, folder) for name, value in found.items() if os.environ.get(name) != value}
        environments[file.name.removeprefix("environment.")] = given | {"error file": error_file}
    return Seen(
        failed=any(agent.returncode for agent in agents),
        lines=sorted(line for line in both.splitlines() if re.search(r"\b(out|apple,|err|kiwi|got \w+) \d", line)),
        environments=environments,
        logs={
            _any_run(str(file.relative_to(folder)), folder): sorted(_any_run(file.read_text(), folder).splitlines())
            for file in (folder / "logs").rglob("*")
            # The first holds a time; the others are ddpkit's own.
            if file.is_file() and file.name not in ("error.json", "output.log", "verdict.json")
        },
        places=places,
        code=max(agent.returncode for agent in agents),
        errors="\n".join(errors for _, errors in written),
    )


def run_once(launcher: str, words: list[str], folder: Path, env: dict[str, str]) -> Seen:
    return _seen([_start(launcher, words, folder, env)], folder)


def _any_run(text: str, folder: Path) -> str:
    text = re.sub(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "<id>", text.replace(str(folder), "<folder>"))
    return re.sub(r"^logs/([^/]+)_\w{8}/", r"logs/\1_<random>/", text)


@pytest.fixture
def worker(tmp_path: Path) -> str:
    (tmp_path / "worker.py").write_text(WORKER)
    return str(tmp_path / "worker.py")


@pytest.fixture
def same(tmp_path: Path) -> Same:
    """Run torchrun and ddpkit launch with the same words, see the same, and return it; what ddpkit said with it."""

    def run(*words: object, env: dict[str, str] | None = None) -> Seen:
        seen = {}
        for launcher in COMMANDS:
            shutil.rmtree(tmp_path / launcher, ignore_errors=True)
            seen[launcher] = run_once(launcher, list(map(str, words)), tmp_path / launcher, env or {})
        assert seen["ddpkit"] == seen["torchrun"], seen["ddpkit"].errors
        return seen["ddpkit"]

    return run


@pytest.fixture
def plugins(tmp_path: Path) -> dict[str, str]:
    """An installed package with a place for logs, a rendezvous and an event log handler of its own."""
    site = tmp_path / "site"
    (site / "plugins-1.0.dist-info").mkdir(parents=True)
    (site / "plugins-1.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: plugins\nVersion: 1.0\n")
    (site / "plugins-1.0.dist-info" / "entry_points.txt").write_text(
        "[torchrun.logs_specs]\nflat = plugins:Flat\n[torchrun.handlers]\nmeeting = plugins:meeting\n"
    )
    (site / "plugins.py").write_text((PROGRAMS / "torchrun_plugins.py").read_text())
    return {"PYTHONPATH": str(site)}


def test_dashes_underscores_and_unique_prefixes_name_the_same_flags(same: Same, worker: str) -> None:
    seen = same("--nproc_per_node=2", "--max-restarts", 1, "--log_dir", "logs", "--redirects=0:1", worker, "-x", "1")
    assert seen.environments["1.0"]["TORCHELASTIC_MAX_RESTARTS"] == "1"
    again = same("--nproc-per", 2, "--max-r", 1, "--log-d=logs", "--redir", "0:1", "--", worker, "-x", "1")
    assert again.lines == seen.lines
    assert again.environments == seen.environments


PAIRS = """
PET_NNODES=1:1 PET_NPROC_PER_NODE=2 PET_RDZV_BACKEND=c10d PET_RDZV_ENDPOINT=localhost:0 PET_RDZV_ID=from_here
PET_RDZV_CONF=join_timeout=60,last_call_timeout=1 PET_MAX_RESTARTS=3 PET_MONITOR_INTERVAL=0.05 PET_START_METHOD=fork
PET_EVENT_LOG_HANDLER=null PET_ROLE=trainer PET_LOG_DIR=logs PET_REDIRECTS=0:1 PET_TEE=1:3
PET_LOG_LINE_PREFIX_TEMPLATE=${rank}> PET_LOCAL_RANKS_FILTER=1 PET_DUPLICATE_STDOUT_FILTERS=apple
PET_DUPLICATE_STDERR_FILTERS=kiwi PET_NODE_RANK=0 PET_MASTER_ADDR=127.0.0.1 PET_MASTER_PORT=29999
PET_LOCAL_ADDR=127.0.0.1 PET_SIGNALS_TO_HANDLE=SIGTERM,SIGINT PET_SHUTDOWN_TIMEOUT=5
"""
# ddpkit reads the variables of later flags with every version of torch, and torchrun those of its own flags alone.
FROM_ENVIRONMENT = {
    name: value
    for name, value in (pair.split("=", 1) for pair in PAIRS.split())
    if "--" + name.removeprefix("PET_").lower().replace("_", "-") in FLAGS
}
SWITCHES = ["PET_STANDALONE", "PET_MODULE", "PET_NO_PYTHON", "PET_RUN_PATH", "PET_VIRTUAL_LOCAL_RANK"]


def test_defaults_that_torchrun_takes_from_the_environment_are_all_tested() -> None:
    taken = (argparse_util.env, argparse_util.check_env)
    names = {f"PET_{a.dest.upper()}" for a in torchrun.get_args_parser()._actions if isinstance(a, taken)}
    assert names <= {*FROM_ENVIRONMENT, *SWITCHES}


def test_pet_variable_is_the_default_of_its_flag(same: Same, worker: str) -> None:
    off = dict.fromkeys(SWITCHES, "0")
    seen = same(worker, env=FROM_ENVIRONMENT | off)
    first = seen.environments["1.0"]
    names = ["WORLD_SIZE", "TORCHELASTIC_RUN_ID", "ROLE_NAME", "TORCHELASTIC_MAX_RESTARTS"]
    assert [first[name] for name in names] == ["2", "from_here", "trainer", "3"]
    assert first["TORCHELASTIC_SIGNALS_TO_HANDLE"] == "SIGTERM,SIGINT"
    logs = "logs/from_here_<random>/attempt_0"
    assert seen.logs[f"{logs}/0/stdout.log"] == ["apple, 0", "out 0 of __main__ []"]
    assert [line[-8:] for line in seen.logs[f"{logs}/filtered_stdout.log"]] == ["apple, 1"]
    assert all(line.endswith(("1", "[]")) for line in seen.lines), "rank 0 is filtered out"
    named = same("--role", "named", "--max-restarts=0", worker, env=FROM_ENVIRONMENT).environments["0.0"]
    assert (named["ROLE_NAME"], named["TORCHELASTIC_MAX_RESTARTS"]) == ("named", "0"), "a flag comes first"


@pytest.mark.parametrize("switch", SWITCHES)
def test_pet_variable_of_a_switch_is_1_or_0(same: Same, worker: str, tmp_path: Path, switch: str) -> None:
    Path(worker).chmod(0o755)
    Path(worker).write_text(f"#!{sys.executable}\n{WORKER}")
    script = "worker" if switch == "PET_MODULE" else worker
    environment = {switch: "1", "PET_RDZV_ID": "mine", "CUDA_VISIBLE_DEVICES": "3,5", "PYTHONPATH": str(tmp_path)}
    seen = same("--nproc-per-node=2", "--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", script, env=environment)
    assert len(seen.lines) == 8
    by_rank = [seen.environments[rank] for rank in ("0.0", "1.0")]
    virtual = [(env["LOCAL_RANK"], env["CUDA_VISIBLE_DEVICES"]) for env in by_rank]
    assert virtual == ([("0", "3"), ("0", "5")] if "VIRTUAL" in switch else [("0", "3,5"), ("1", "3,5")])
    assert by_rank[0]["TORCHELASTIC_RUN_ID"] == ("<id>" if switch == "PET_STANDALONE" else "mine")


@pytest.mark.parametrize(
    ("words", "files", "on_console"),
    [
        ("-r 3", {"0/stdout", "0/stderr", "1/stdout", "1/stderr"}, []),
        ("-r 0:1,1:2", {"0/stdout", "1/stderr"}, ["apple, 1", "err 0", "kiwi 0", "out 1 of __main__ []"]),
        ("-t 0:1,1:2", {"0/stdout", "1/stderr"}, None),
        ("-r 1 -t 1:3", {"0/stdout", "1/stdout", "1/stderr"}, None),
    ],
)
def test_log_files_are_where_torchrun_puts_them(
    same: Same, worker: str, words: str, files: set[str], on_console: list[str] | None
) -> None:
    where = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--rdzv-id", "job_1", "--log-dir", "logs"]
    seen = same("--nproc-per-node", 2, *where, *words.split(), worker)
    assert set(seen.logs) == {f"logs/job_1_<random>/attempt_0/{file}.log" for file in files}
    assert seen.environments["1.0"]["error file"] == "attempt_0/1/error.json"
    assert on_console in (None, seen.lines)
    if "-t" in words:
        assert "[default1]:err 1" in seen.lines
        assert ("err 0" in seen.lines) or "-r" in words


def test_log_folders_and_files_are_private_and_never_left_empty(worker: str, tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()  # where py-spy is not found, each worker keeps a file open for its own stacks
    (site / "sitecustomize.py").write_text("import sysconfig; sysconfig.get_path = lambda *words: '/nowhere'")
    os.umask(0o022)
    words = ["--nproc-per-node=2", "--log-dir=logs", "-t=3", "--duplicate-stdout-filters=apple", worker]
    env = {"PYTHONPATH": str(site), "PATH": os.pathsep.join(p for p in os.environ["PATH"].split(":") if p != str(BIN))}
    seen = run_once("ddpkit", words, tmp_path, env)
    assert not seen.failed, seen.errors
    made = [tmp_path / "logs", *(tmp_path / "logs").rglob("*")]
    assert {path.name for path in made} >= {"attempt_0", "0", "1", "stdout.log", "filtered_stdout.log", "verdict.json"}
    assert {oct(path.stat().st_mode & 0o777) for path in made if path.is_dir()} == {"0o700"}
    assert {oct(path.stat().st_mode & 0o777) for path in made if path.is_file()} == {"0o600"}
    assert "stacks.txt" not in {path.name for path in made}


def test_prefix_of_teed_lines_can_be_set_by_the_user(same: Same, worker: str) -> None:
    template = "<${role_name} ${rank} ${local_rank}> "
    words = ["--nproc-per-node", 2, "--log-dir", "logs", "--role", "trainer", "-t", 3, worker]
    assert "[trainer1]:err 1" in same(*words).lines
    assert "<trainer 1 1> err 1" in same(*words, env={"TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE": template}).lines
    if "--log-line-prefix-template" in FLAGS:  # from torch 2.14 on
        seen = same("--log-line-prefix-template", template + "${hostname} ", *words)
        assert f"<trainer 1 1> {socket.gethostname()} err 1" in seen.lines


@pytest.mark.parametrize("tee", ["0", "3"])
def test_local_ranks_filter_limits_the_console_output(same: Same, worker: str, tee: str) -> None:
    words = ["--nproc-per-node", 3, "--log-dir", "logs", "-t", tee]
    seen = same(*words, "--local-ranks-filter", "0,2", worker)
    assert {line.split()[1] for line in seen.lines} == {"0", "2"}
    assert len(seen.logs) == (6 if tee == "3" else 0), "the files have all ranks"


def test_duplicate_filters_copy_matching_lines_to_a_file(same: Same, worker: str) -> None:
    words = ["--nproc-per-node", 2, "--log-dir", "logs", "-t", 3]
    seen = same(*words, "--duplicate-stdout-filters", "cherry,apple,, ", "--duplicate_stderr_filters=kiwi", worker)
    logs = {Path(name).name: lines for name, lines in seen.logs.items()}
    assert logs["filtered_stdout.log"] == ["[default0]:apple, 0", "[default1]:apple, 1"], "two commas are a comma"
    assert logs["filtered_stderr.log"] == ["[default0]:kiwi 0", "[default1]:kiwi 1"]
    assert len(seen.lines) == 8, "the console still has every line"


def test_local_rank_macro_is_replaced_in_the_script_and_its_arguments(same: Same, worker: str, tmp_path: Path) -> None:
    for rank in (0, 1):
        (tmp_path / f"worker_{rank}.py").write_text(WORKER)
    seen = same("--nproc-per-node", 2, tmp_path / "worker_${local_rank}.py", "--to=${local_rank}", "$HOME", "${rank}")
    assert "out 1 of __main__ ['--to=1', '$HOME', '${rank}']" in seen.lines


def test_no_python_program_gets_its_rank_and_its_arguments(same: Same, tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text('#!/bin/sh\necho "out $RANK of $WORLD_SIZE" "$@"\n')
    program.chmod(0o755)
    seen = same("--no-python", "--nproc-per-node", 2, program, "--to", "${local_rank}", "a b")
    assert seen.lines == ["out 0 of 2 --to 0 a b", "out 1 of 2 --to 1 a b"]


def test_python_exec_names_the_interpreter(same: Same, worker: str, tmp_path: Path) -> None:
    python = tmp_path / "other-python"
    python.write_text(f'#!/bin/sh\nOTHER="$1 $2" exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    seen = same("--nproc-per-node", 2, worker, env={"PYTHON_EXEC": str(python)})
    assert seen.environments["1.0"]["OTHER"] == f"-u {worker}"
    missing = run_once("ddpkit", [worker], tmp_path, {"PYTHON_EXEC": "/nowhere/python"})
    assert_one_message(missing.code, missing.errors, {2, 3}, "/nowhere/python")


def test_python_m_ddp_kit_is_the_same_launcher(worker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(COMMANDS, "module", [sys.executable, "-m", "ddp_kit", "launch"])
    seen = [run_once(name, [worker], tmp_path / name, {}) for name in COMMANDS]
    assert seen[0] == seen[1] == seen[2]


def test_run_path_script_fails_as_under_torchrun(same: Same, worker: str) -> None:
    Path(worker).write_text(WORKER + "sys.exit(0 if rank == '0' else 7)")
    assert same("--run-path", "--start-method=fork", "--nproc-per-node", 2, worker).failed


def test_plugin_for_logs_is_used(same: Same, worker: str, plugins: dict[str, str]) -> None:
    seen = same("--nproc-per-node", 2, "--logs-specs", "flat", "--log-dir", "logs", worker, env=plugins)
    assert seen.logs["logs/default-1.txt"] == ["apple, 1", "out 1 of __main__ []"]
    assert "torchrun itself" not in seen.errors


def test_plugins_for_rendezvous_and_event_logs_are_used_by_torchrun_itself(
    same: Same, worker: str, plugins: dict[str, str], tmp_path: Path
) -> None:
    meeting = ["--rdzv-backend=meeting", "--rdzv-endpoint=corner:7", "--rdzv-id=us", "--rdzv-conf", "colour=blue"]
    listed = ["--event-log-handler", "listed", "--logs-specs", "flat", "--log-dir", "logs"]
    words = ["--nproc-per-node", 2, *meeting, *listed, worker, "--", "an argument", "--nnodes"]
    seen = same(*words, env=plugins)
    assert seen.environments["1.0"]["TORCHELASTIC_RUN_ID"] == "us at corner:7, blue"
    assert seen.logs["logs/default-1.txt"] == ["apple, 1", "out 1 of __main__ ['an argument', '--nnodes']"]
    assert "ddpkit: torchrun itself runs this job, because only torchrun supports --event-log-handler" in seen.errors
    names = {
        launcher: [json.loads(line)["name"] for line in (tmp_path / launcher / "events.txt").read_text().splitlines()]
        for launcher in COMMANDS
    }
    assert set(names["ddpkit"]) == set(names["torchrun"])
    assert "torchelastic.worker.status.SUCCEEDED" in names["ddpkit"]


def test_torchrun_itself_decides_the_exit_code_of_its_jobs(worker: str, tmp_path: Path) -> None:
    Path(worker).write_text(WORKER + "sys.exit(7)")
    words = ["--nproc-per-node=1", "--event-log-handler=console", "--keep-warm", worker]
    seen = run_once("ddpkit", words, tmp_path, {})
    assert seen.code == 1, seen.errors
    assert '"torchelastic.worker.status.FAILED"' in seen.errors
    assert seen.environments["0.0"]["WORLD_SIZE"] == "1"


def test_file_timers_of_workers_are_served_if_a_variable_enables_them(tmp_path: Path) -> None:
    """When one expires, torch kills the worker, and then torchrun itself."""
    env = {"TORCHELASTIC_ENABLE_FILE_TIMER": "1", "TORCHELASTIC_TIMER_FILE": str(tmp_path / "timers")}
    seen = run_once("ddpkit", ["--nproc-per-node=1", ENDS, "expires", str(LONG)], tmp_path, env)
    assert seen.code == -signal.SIGKILL, seen.errors
    assert "because only torchrun supports TORCHELASTIC_ENABLE_FILE_TIMER=1" in seen.errors


ALL_CONF = (
    "timeout=900,join_timeout=600,last_call_timeout=30,close_timeout=30,heartbeat_timeout=5,keep_alive_interval=5,"
    "keep_alive_max_attempt=3,is_host=1,store_type=tcp,read_timeout=60"
)


@pytest.mark.parametrize("conf", [ALL_CONF, "store_type=file"])
def test_c10d_rendezvous_uses_the_named_endpoint(same: Same, worker: str, conf: str) -> None:
    endpoint = "store" if "file" in conf else f"localhost:{free_port()}"
    words = ["--rdzv-backend", "c10d", "--rdzv-endpoint", endpoint, "--rdzv-id=job", "--rdzv-conf", conf]
    assert same("--nnodes=1", "--nproc-per-node=2", *words, worker).environments["1.0"]["TORCHELASTIC_RUN_ID"] == "job"


def test_standalone_uses_a_new_port_and_id_despite_other_flags(same: Same, worker: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        place = f"127.0.0.1:{taken.getsockname()[1]}"
        seen = same("--standalone", "--rdzv-backend=etcd", "--rdzv-endpoint", place, "--rdzv-id=mine", worker)
    assert seen.environments["0.0"]["TORCHELASTIC_RUN_ID"] == "<id>"


@pytest.mark.parametrize("rendezvous", ["static", "c10d"])
def test_two_agents_form_one_job(worker: str, tmp_path: Path, rendezvous: str) -> None:
    seen = {}
    for launcher in COMMANDS:
        port, folder = free_port(), tmp_path / launcher
        c10d = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}", "--rdzv-id=two"]
        static = [["--node-rank", rank, "--master-addr", "127.0.0.1", f"--master-port={port}"] for rank in "01"]
        words = static if rendezvous == "static" else [c10d, c10d]
        every = ["--nnodes=2", "--nproc-per-node=2"]
        seen[launcher] = _seen([_start(launcher, [*every, *own, worker], folder, {}) for own in words], folder)
        if rendezvous == "static":
            assert seen[launcher].places == {f"127.0.0.1:{port}"}
    assert not seen["ddpkit"].failed, seen["ddpkit"].errors
    assert seen["ddpkit"] == seen["torchrun"]
    places = [(env["GROUP_RANK"], env["LOCAL_RANK"]) for _, env in sorted(seen["ddpkit"].environments.items())]
    assert places == [("0", "0"), ("0", "1"), ("1", "0"), ("1", "1")]


def test_failed_group_is_restarted_until_it_succeeds(same: Same, worker: str) -> None:
    Path(worker).write_text(WORKER + "sys.exit(7 if attempt < 2 else 0)\n")
    words = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", "--rdzv-id=job", "--log-dir=logs", "-r=1", worker]
    seen = same("--nproc-per-node=1", "--max-restarts=3", *words)
    assert not seen.failed
    assert set(seen.environments) == {"0.0", "0.1", "0.2"}
    assert set(seen.logs) == {f"logs/job_<random>/attempt_{attempt}/0/stdout.log" for attempt in range(3)}


def test_root_cause_is_passed_on_as_by_torchrun_and_shown_once(tmp_path: Path) -> None:
    handed_on = []
    for launcher in COMMANDS:
        own = tmp_path / f"{launcher}.json"
        words = ["--nproc-per-node=2", ENDS, "records", str(LONG)]
        seen = run_once(launcher, words, tmp_path / launcher, {"TORCHELASTIC_ERROR_FILE": str(own)})
        assert seen.failed
        error: dict[str, Any] = json.loads(own.read_text())["message"]
        del error["extraInfo"]["timestamp"]
        handed_on.append(error)
    assert "FAILED" not in seen.errors, "the verdict says what torchrun's summary does"
    assert "error.json" not in seen.errors, "the file is gone"
    assert seen.errors.count("Traceback (most recent call last)") == 1, seen.errors
    assert re.search(r"^ddpkit: rank 1 failed first: .*: ValueError: the root cause$", seen.errors, re.MULTILINE)
    assert seen.code == 1
    assert handed_on[0] == handed_on[1]
    assert handed_on[0]["message"] == "ValueError: the root cause"


def test_error_file_whose_message_is_a_string_is_shown_and_passed_on(tmp_path: Path) -> None:
    own = tmp_path / "own.json"
    seen = run_once(
        "ddpkit",
        ["--nproc-per-node=2", ENDS, "own file", str(LONG)],
        tmp_path / "run",
        {"TORCHELASTIC_ERROR_FILE": str(own)},
    )
    assert seen.code == 7
    assert "rank 1 failed first: exit code 7" in seen.errors
    assert seen.errors.rstrip().endswith(": what my program says")
    assert json.loads(own.read_text()) == {"message": "what my program says", "timestamp": 10}
    assert "Traceback" not in seen.errors, "of torch, about the file that it cannot read"


@pytest.mark.parametrize(
    ("number", "named"),
    [(signal.SIGTERM, None), (signal.SIGUSR1, "SIGTERM,SIGUSR1")],
    ids=["default", "named"],
)
def test_signal_to_the_launcher_reaches_every_worker(tmp_path: Path, number: signal.Signals, named: str | None) -> None:
    seen = {}
    for launcher in COMMANDS:
        words = ["--nproc-per-node=2", *(["--signals-to-handle", named] if named else []), ENDS, "waits", str(LONG)]
        agent = _start(launcher, words, tmp_path / launcher, {})
        assert agent.stdout is not None
        before: list[str] = []
        while before.count("waits\n") < 2:
            before.append(unlabelled(agent.stdout.readline()))
            assert before[-1], agent.communicate()
        agent.send_signal(number)
        seen[launcher] = _seen([agent], tmp_path / launcher, "".join(before))
    for rank in "01":
        assert f"got {number.name} {rank}" in seen["ddpkit"].lines
    assert seen["ddpkit"].lines == seen["torchrun"].lines
    assert seen["ddpkit"].environments == seen["torchrun"].environments
    assert seen["ddpkit"].failed or number is signal.SIGUSR1, "a signal that only warns lets the job end well"


def test_signal_that_the_system_lacks_is_ignored(same: Same, worker: str) -> None:
    assert not same("--nproc-per-node=2", "--signals-to-handle", "SIGTERM,SIGNONE", worker).failed


def test_worker_that_ignores_sigterm_is_killed_after_the_shutdown_timeout(tmp_path: Path) -> None:
    """In torch it is killed 30 seconds after it was asked to end, whatever the flag says: this test ends before."""
    words = ["--nproc-per-node=2", f"--shutdown-timeout={seconds(1):.0f}", ENDS, "ignores", str(LONG)]
    agent = _start("ddpkit", words, tmp_path, {})
    try:
        wait_until((tmp_path / "asked").exists, "asked to end", within=120)
        agent.wait(timeout=seconds(25))
    finally:
        agent.kill()
    seen = _seen([agent], tmp_path)
    assert seen.code == 7
    assert "rank 1 failed first: exit code 7" in seen.errors


def assert_one_message(code: int, errors: str, codes: set[int], *said: str) -> None:
    assert code in codes, errors
    for words in said:
        assert words in errors
    assert "Traceback" not in errors
    assert errors.count("error: ") <= 1, errors


@pytest.mark.parametrize(
    ("words", "codes", "said"),
    [
        ("--rdzv-endpont here:1", {2}, "did you mean --rdzv-endpoint?"),
        ("--m 1", {2}, "the flag '--m' is ambiguous"),
        ("-m --no-python", {2}, "--no-python"),
        ("--no-python", {2}, "train.py"),  # which is not executable
        ("--nnodes 3:1", {2}, "--nnodes 3:1: MIN"),
        ("--nnodes two", {2}, "two"),
        ("--nproc-per-node lots", {2}, "lots"),
        ("--shutdown-timeout -1", {2}, "--shutdown-timeout"),
        ("--local-ranks-filter a,b", {2}, "--local-ranks-filter"),
        ("--logs-specs nowhere", {2}, "nowhere"),
        ("--rdzv-conf timeout", {2}, "timeout"),
        ("--rdzv-conf join_timeout=soon --rdzv-backend c10d --rdzv-endpoint localhost:0", {2}, "soon"),
        ("--rdzv-conf timeout=abc --master-port PORT", {2}, "timeout=abc"),
        ("--rdzv-backend static --rdzv-endpoint somewhere", {2}, "somewhere:29500"),
        ("--rdzv-backend c10d --rdzv-endpoint localhost:99999", {2, 3}, "99999"),
        ("--virtual-local-rank --nproc-per-node 2", {2}, "CUDA_VISIBLE_DEVICES"),
        ("--nnodes 2 --rdzv-conf join_timeout=SECONDS --rdzv-backend c10d --rdzv-endpoint localhost:PORT", {3}, "1"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_invalid_flag_is_one_message_without_a_traceback(
    forked_ddpkit: Callable[..., "subprocess.CompletedProcess[str]"],
    tmp_path: Path,
    words: str,
    codes: set[int],
    said: str,
) -> None:
    (tmp_path / "train.py").touch()
    words = words.replace("PORT", str(free_port())).replace("SECONDS", f"{seconds(1):.0f}")
    run = forked_ddpkit("launch", *words.split(), "train.py", env={"CUDA_VISIBLE_DEVICES": "3"})
    assert_one_message(run.returncode, run.stderr, codes, said)


@pytest.mark.parametrize("rendezvous", ["static", "c10d"])
def test_port_in_use_names_the_process_that_uses_it(worker: str, tmp_path: Path, rendezvous: str) -> None:
    (tmp_path / "holder.py").write_text(
        "import signal, socket\nserver = socket.create_server(('127.0.0.1', 0))\n"
        "print(server.getsockname()[1], flush=True)\nsignal.pause()\n"
    )
    with started(sys.executable, tmp_path / "holder.py") as holder:
        assert holder.stdout is not None
        port = holder.stdout.readline().strip()
        c10d = ["--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"]
        words = c10d if rendezvous == "c10d" else ["--master-addr=127.0.0.1", f"--master-port={port}"]
        conf = ["--nproc-per-node=1", "--rdzv-conf=timeout=900,read_timeout=900"]
        agent = _start("ddpkit", [*conf, *words, worker], tmp_path, {})
        try:
            agent.wait(timeout=LONG)  # a process that is no store never answers: nobody may wait for it
        finally:
            agent.kill()
        holder.kill()
        seen = _seen([agent], tmp_path)
        assert_one_message(seen.code, seen.errors, {3}, port, str(holder.pid), "holder.py")
