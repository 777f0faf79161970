"""`ddpkit submit`: from a command line to the job file of an engine, and to the engine's own command."""

import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from ddp_kit.cli import submit
from ddp_kit.clusters.engine import Engine
from ddp_kit.clusters.request import Request
from ddp_kit.clusters.slurm import clock
from ddp_kit.errors import UsageError
from ddp_kit.terminal import Terminal
from tests.support.launching import run, seconds, started
from tests.support.submitted import job_file

_HOST = "echo up; read code < go; exit $code"
_SESSION = "import sys; from ddp_kit.clusters.ssh import run; sys.exit(run({'a': sys.argv[1:]}, 1, 0, print))"


pytestmark = pytest.mark.usefixtures("script")


def test_slurm_text_contains_the_requested_resources() -> None:
    flags = "--nodes 4 --gpus 8 --time 36h --partition long --requeue --retries 5"
    text = job_file("--on", "slurm", *flags.split(), "--max-restarts", "2", "train.py", "--lr", "0 1")
    for line in ("nodes=4", "gpus-per-node=8", "cpus-per-task=64", "time=1-12:00:00", "partition=long", "requeue"):
        assert f"\n#SBATCH --{line}" in text
    assert "ddpkit launch --max-restarts 2 train.py --lr '0 1' ||" in text
    assert "-lt 5" in text
    assert text.splitlines()[1].startswith("# Made by: ddpkit submit --on slurm --nodes 4")


def test_slurm_text_is_valid_shell(tmp_path: Path) -> None:
    for words in (("--array", "0-9"), ("--image", "docker://x/y:1"), ("--gpus", "8")):
        text = job_file("--on", "slurm", "--nodes", "2", *words, "train.py", "a'b$c")
        subprocess.run(["bash", "-n"], input=text, text=True, check=True, timeout=seconds(60))
    assert tmp_path.exists()


@pytest.mark.parametrize("code", [0, 1, 2, 3, 4, 42, 75, 124, 128, 137, 143])
@pytest.mark.parametrize("retries", [0, 2, 3])
def test_slurm_script_requeues_by_exit_code(code: int, retries: int, tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    shown = f"   Comment=ddpkit-retries-{retries}" if retries else ""
    scontrol = f"[ $1 = show ] && echo '{shown}' || echo \"$@\" >>{tmp_path}/asked"
    for name, body in (("srun", f"exit {code}"), ("scontrol", scontrol)):
        (programs / name).write_text(f"#!/bin/sh\n{body}\n")
        (programs / name).chmod(0o755)
    text = job_file("--on", "slurm", "--nodes", "2", "train.py")
    done = run("bash", "-c", text, env={"PATH": f"{programs}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"})
    assert done.returncode == code
    asked = tmp_path / "asked"
    counted = f"update JobId=7 Comment=ddpkit-retries-{retries + 1}\nrequeue 7\n" if retries < 3 else ""
    expected = {4: "requeue 7\n", 75: "requeue 7\n"} | dict.fromkeys((3, 124, 137, 143), counted)
    assert (asked.read_text() if asked.exists() else "") == expected.get(code, "")


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["--nodes", "2", "train.py"], "no engine is given"),
        (["--on", "slrm", "--nodes", "2", "train.py"], "use --on slurm"),
        (["--on", "slurm", "train.py"], "the number of nodes is not given"),
        (["--on", "slurm", "--nodes", "0", "train.py"], "not a whole number of at least 1"),
        (["--on", "slurm", "--nodes", "2", "tran.py"], "did you mean train.py?"),
        (["--on", "slurm", "--nodes", "2", "--time", "soon", "train.py"], "--time: 'soon' is not a time"),
        (["--on", "slurm", "--nodes", "2", "--time", "90", "train.py"], "--time: '90' has no unit"),
        (["--on", "slurm", "--nodes", "2", "--hosts", "a,b", "train.py"], "slurm does not support --hosts"),
        (["--on", "kubeflow", "--nodes", "2", "--image", "x", "--grace", "90", "train.py"], "not support --grace"),
        (["--on", "slurm", "--nodes", "2", "--cold", "--time", "1h", "train.py"], "put it before --cold"),
        (["--on", "slurm", "--nnodes", "2", "train.py"], "--nodes"),
        (["--on", "slurm", "--nodes", "2", "--max-restarts", "3", "--nnodes=2", "train.py"], "use --nodes N"),
        (["--on", "slurm", "--nodes", "2", "--max-restartz", "3", "train.py"], "did you mean --max-restarts?"),
        (["--on", "ssh", "--nodes", "3", "--hosts", "a,b", "train.py"], "--hosts names 2"),
        (["--on", "ssh", "--nodes", "3", "train.py"], "use --hosts"),
        (["--on", "ssh", "--hosts=-oProxyCommand=x", "train.py"], "is not a host"),
        (["--on", "ssh", "--hosts", "a,b"], "there is no script"),
        (["--on", "ssh", "--hosts", "a,b", "--spares", "1", "train.py"], "use at least 3 nodes, or remove --spares"),
        (["--on", "slurm", "--nodes", "4", "--spares", "3", "train.py"], "use --spares 2, or at least 5 nodes"),
        (["--on", "slurm", "--spares", "1", "--nodes", "4", "train.py"], "put it before --spares"),
        (["--on", "skypilot", "--nodes", "2", "--gpus", "8", "train.py"], "use --gpus H100:8"),
        (["--on", "ray", "--nodes", "2", "--gpus", "H100:8", "train.py"], "ray does not support a type in --gpus"),
        (["--on", "slurm", "--nodes", "2", "--gpus", ":8", "train.py"], "neither a number of GPUs nor TYPE:NUMBER"),
        (["--on", "kubernetes", "--nodes", "2", "train.py"], "--image is not given"),
        (["--on", "jobset", "--nodes", "2", "--image", "x", "--name", "My_Run", "train.py"], "use --name my-run"),
        (["--on", "kubernetes", "--nodes", "2", "--image", "x", "train.py", "caf\udce9"], "is not valid UTF-8"),
    ],
)
def test_submit_invalid_arguments_raise_usage_error_with_hint(words: list[str], part: str) -> None:
    with pytest.raises(UsageError) as refused:
        submit.run(words, Terminal({}))
    assert part in str(refused.value)


@pytest.mark.parametrize("engine", ["ray", "skypilot"])
def test_submit_script_outside_copied_folder_raises_usage_error(engine: str, tmp_path: Path) -> None:
    (tmp_path / "jobs").mkdir()
    with pytest.raises(
        UsageError, match=rf"{engine} copies the working folder .*/train.py is not a relative path.*\n.*give train.py"
    ):
        submit.run(["--on", engine, "--nodes", "2", str(tmp_path / "train.py")], Terminal({}))
    os.chdir("jobs")
    with pytest.raises(UsageError, match=r"copies the working folder .*\n.*cd \.\.$"):
        submit.run(["--on", engine, "--nodes", "2", "../train.py"], Terminal({}))


def test_submit_without_the_engines_program_raises_usage_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(UsageError, match="sbatch was not found.*\n.*--dry-run"):
        submit.run(["--on", "slurm", "--nodes", "2", "train.py"], Terminal({}))


def test_job_file_line_break_in_argument_adds_no_line(tmp_path: Path) -> None:
    words = ("--nodes", "2", "--image", "x", "train.py", "--prompt", "one\ntouch two\r#SBATCH --nodes=9\u2028three")
    for engine in ("slurm", "kubernetes", "jobset", "kubeflow"):
        lines = job_file("--on", engine, *words).splitlines()
        assert lines[:6] == [line for line in lines[:6] if line.startswith("#")]
    (tmp_path / "job").write_text(job_file("--on", "slurm", *words))
    run("bash", "job", cwd=tmp_path, env={"PATH": "/usr/bin:/bin"})
    assert not (tmp_path / "two").exists()


def _expanded(word: str) -> str:
    """What Kubernetes makes of a word of a container's command, if each variable is `X`: its rules of expansion."""
    return re.sub(r"\$(\$|\(([^)]*)\))", lambda found: "$" if found[1] == "$" else "X", word)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])  # the fixture changes nothing
@given(
    words=st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"]), max_size=9), max_size=3)
)
@example(words=["checkpoint.dir=s3://bucket/run", "checkpoint.resume=s3://bucket/run/step-00000012"])
@example(words=["a$$b", "$(PET_NNODES)", "$", "$${x}", "one\ntwo", "\x1b[31m\x7f", "\x85\u2028"])
def test_job_file_passes_arguments_unchanged_on_every_engine(words: list[str]) -> None:
    launch = ["ddpkit", "launch", "train.py", *words]
    for engine in ("kubernetes", "jobset", "kubeflow", "skypilot"):
        image = ["--image", "x"] if engine != "skypilot" else []
        text = job_file("--on", engine, "--nodes", "2", *image, "train.py", *words)
        spec = list(yaml.safe_load_all(text))[-1]  # YAML allows no control characters, even in comments
        if engine == "skypilot":
            assert shlex.join(launch) in spec["run"]
            continue
        spec = spec["spec"]
        for replicated in spec.get("replicatedJobs", []):
            spec = replicated["template"]["spec"]
        container = spec["trainer"] if engine == "kubeflow" else spec["template"]["spec"]["containers"][0]
        assert [_expanded(word) for word in container["command"]] == launch
    text = job_file("--on", "slurm", "--nodes", "2", "train.py", *words)
    step, env = "srun() { printf '%s\\0' \"$@\"; }\n" + text, {"SLURM_JOB_ID": "7"}
    done = subprocess.run(["bash", "-c", step], env=env, capture_output=True, timeout=seconds(60), check=True)
    assert done.stdout.decode().split("\0")[:-1] == launch


def test_url_is_passed_on_by_engines_that_copy_or_run_here() -> None:
    words = ["checkpoint.dir=s3://bucket/run", "--init", "gs://bucket/run/step-00000012"]
    for engine in (["ray", "--nodes", "2"], ["ssh", "--hosts", "one,two"]):
        assert shlex.join(["train.py", *words]) in job_file("--on", *engine, "train.py", *words)


@pytest.mark.parametrize("flag", ["--name", "--partition", "--array", "--image", "--gpus"])
@pytest.mark.parametrize("letter", ["\n", "\r", "\x1b", "\u2028"])
def test_submit_control_character_in_value_raises_usage_error(flag: str, letter: str) -> None:
    value = f"a{letter}touch x:8"
    with pytest.raises(UsageError, match="contains a control character") as refused:
        submit.run(["--on", "slurm", "--nodes", "2", flag, value, "train.py"], Terminal({}))
    assert letter not in str(refused.value).partition("\n")[0]


def test_slurm_text_quotes_values() -> None:
    text = job_file("--on", "slurm", "--nodes", "2", "--name", "my run #2", "--partition", "a --wrap=b", "train.py")
    assert "#SBATCH --job-name='my run #2'\n#SBATCH --partition='a --wrap=b'\n" in text


def test_slurm_text_names_the_cpus_flag() -> None:
    words = ("--on", "slurm", "--nodes", "2", "--gpus", "8")
    (line,) = (line for line in job_file(*words).splitlines() if line.startswith("#SBATCH --cpus-per-task=64"))
    assert line.endswith("if the nodes have fewer cores, sbatch refuses the job: use --cpus")
    assert "use --cpus" not in job_file("--on", "slurm", "--nodes", "2", "--gpus", "8", "--cpus", "48")


@pytest.mark.parametrize(("cores", "passed"), [("64", "--cpus-per-task=64 ddpkit"), ("", "ddpkit")])
def test_slurm_step_gets_the_cores_of_the_job(cores: str, passed: str, tmp_path: Path) -> None:
    (tmp_path / "srun").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "srun").chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": cores}
    done = run("bash", "-c", job_file("--on", "slurm", "--nodes", "2", "train.py"), env=env)
    assert done.stdout == f"{passed} launch train.py\n"


def test_ssh_ignored_sighup_does_not_stop_the_job(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "go")
    with started("nohup", sys.executable, "-c", _SESSION, "sh", "-c", _HOST, cwd=tmp_path) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        process.send_signal(signal.SIGHUP)
        (tmp_path / "go").write_text("3\n")
        assert "exit code 3" in process.stdout.readline()
        assert process.stdout.readline().strip() == ""
        assert process.stdout.readline() == "up\n"
        (tmp_path / "go").write_text("0\n")
        assert process.wait(seconds(60)) == 0


def test_node_that_a_job_with_spares_has_excluded_does_not_end_the_job() -> None:
    slurm = ("--on", "slurm", "--nodes", "3")
    pods = ("--on", "kubernetes", "--nodes", "3", "--image", "x")
    spares = ("--spares", "1", "train.py")
    assert "    3|124|5) again_counted" in job_file(*slurm, *spares)
    assert "--no-kill" in job_file(*slurm, *spares)
    assert "    3|124) again_counted" in job_file(*slurm, "train.py")
    assert "--no-kill" not in job_file(*slurm, "train.py")
    assert "values: [3, 124, 5, 129," in job_file(*pods, *spares)
    assert "values: [3, 124, 129," in job_file(*pods, "train.py")


def test_spares_are_hosts_that_do_not_train() -> None:
    ssh = job_file("--on", "ssh", "--hosts", "a,b,c", "--spares", "1", "train.py")
    assert [f"--nnodes 2 --node-rank {rank} " in ssh for rank in range(4)] == [True, True, True, False]
    assert "--nodes 3 --retries 3 --spares 1 -- --spares 1 train.py" in job_file(
        "--on", "ray", "--nodes", "3", "--spares", "1", "train.py"
    )


def test_ssh_reads_hosts_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "hosts").write_text("# two\ngpu1\nme@gpu2  # second\n\n")
    text = job_file("--on", "ssh", "--hosts", "hosts", "train.py")
    assert " gpu1 " in text
    assert " me@gpu2 " in text
    assert text.count("--master-addr gpu1") == 2


def test_submit_dry_run_imports_no_torch(tmp_path: Path) -> None:
    """And so it is printed at once."""
    code = (
        "import sys; from ddp_kit.cli.main import main; "
        "main(['submit', '--on', 'slurm', '--nodes', '2', '--dry-run', 'train.py']); "
        "sys.exit(bool({'torch', 'pydantic', 'numpy'} & set(sys.modules)))"
    )
    done = run(sys.executable, "-c", code, cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_submit_names_the_job_after_the_script() -> None:
    for words, name in (
        (("sub/My_Run.py", "-m"), "my-run"),
        (("-m", "pkg.main", "a.b"), "main"),
        (("--no-python", "./run.sh"), "run"),
        (("1.py",), "train-1"),
    ):
        Path("sub").mkdir(exist_ok=True)
        Path(words[0]).touch()
        assert f"--job-name={name}\n" in job_file("--on", "slurm", "--nodes", "2", *words)


class Lsf(Engine):
    """What an engine has to have."""

    name = "lsf"
    help = "a batch script for bsub"
    flags = frozenset({"cpus"})
    suffix = ".lsf"
    program = "bsub"
    install = "log in to a host that has bsub"

    def text(self, request: Request) -> str:
        return f"#BSUB -nnodes {request.nodes}\n{shlex.join(request.launch)}\n"

    def submit_command(self, request: Request, path: str) -> tuple[str, ...]:
        return self.program, path


def test_submit_new_engine_needs_only_its_class_and_list_entry(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(submit.ENGINES, "lsf", Lsf())
    assert "lsf         a batch script for bsub" in submit.parser().format_help()
    assert job_file("--on", "lsf", "--nodes", "2", "train.py") == "#BSUB -nnodes 2\nddpkit launch train.py"
    with pytest.raises(UsageError, match="lsf does not support --image"):
        submit.run(["--on", "lsf", "--nodes", "2", "--image", "x", "train.py"], Terminal({}))
    (tmp_path / "bsub").write_text('#!/bin/sh\ncp "$1" submitted\nexit 9\n')
    (tmp_path / "bsub").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert submit.run(["--on", "lsf", "--nodes", "2", "train.py"], Terminal({})) == 9
    assert "ddpkit launch train.py" in (tmp_path / "submitted").read_text()


def test_clock_is_a_time_limit_of_slurm() -> None:
    assert clock(86401) == "1-00:00:01"
    assert clock(5400) == "01:30:00"
