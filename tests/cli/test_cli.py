"""The command line: its surface, its mistakes, its exit codes; on the real command."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ddp_kit.launcher import spec
from tests.support.labels import unlabelled
from tests.support.launching import DDPKIT, PROGRAMS, run, seconds, started

pytestmark = pytest.mark.slow

Command = Callable[..., "subprocess.CompletedProcess[str]"]


def test_import_of_the_command_line_imports_neither_torch_nor_nvml() -> None:
    code = "import sys, ddp_kit.cli.main; print([m for m in ('torch', 'pynvml', 'pydantic') if m in sys.modules])"
    done = run(sys.executable, "-c", code)
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr


def test_help_lists_the_commands_and_flags(ddpkit: Command) -> None:
    top, launch = ddpkit("--help"), ddpkit("launch", "--help")
    assert top.returncode == launch.returncode == 0
    assert "ddpkit launch --gpus 4 train.py" in top.stdout
    for flag in spec.TORCHRUN_FLAGS:
        assert f"{flag.name} {flag.metavar}".strip() in launch.stdout
    assert "--gpus N|all|0,2" in launch.stdout
    assert "--hang-timeout SECONDS" in launch.stdout
    assert "One default differs from torchrun" in launch.stdout
    assert "exit codes:" in launch.stdout


def test_version_is_that_of_the_package(ddpkit: Command) -> None:
    from ddp_kit import __version__

    assert ddpkit("--version").stdout == f"ddpkit {__version__}\n"


def test_python_m_ddp_kit_runs_the_command() -> None:
    assert run(sys.executable, "-m", "ddp_kit", "--version").stdout.startswith("ddpkit ")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["launch", "--gpus", "4", "train.py"], "this machine has no NVIDIA GPU"),
        (["launch", "--nnodes", "2:1", "train.py"], "--nnodes 2:1: MIN must be at least 1"),
        (["launch", "--nproc-per-node", "0", "train.py"], "is less than 1"),
        (["launch", "--log-dir", "/proc/nowhere", "train.py"], "torch rejects this command line"),
        (["launch", ""], "there is no script ''"),
        (["launch", "typo.py"], "SyntaxError: '(' was never closed"),
        (["launch", "."], "is a folder without a __main__.py"),
        (["launch", "--nproc-per-node", "many", "train.py"], "Unsupported nproc_per_node value: many"),
        (["launch", "-r", "9", "train.py"], "9 does not match"),
        (["launch"], "the following arguments are required: script.py"),
        (["lunch", "train.py"], "there is no command 'lunch'"),
        (["train.py"], "run `ddpkit launch train.py ...`"),
        ([], "the following arguments are required: COMMAND"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_invalid_command_line_exits_with_2_and_a_hint(
    forked_ddpkit: Command, tmp_path: Path, words: list[str], said: str
) -> None:
    (tmp_path / "train.py").touch()
    (tmp_path / "typo.py").write_text("print(1\n")
    run = forked_ddpkit(*words, env={"FAKE_NVML": ""})
    assert run.returncode == 2
    assert said in run.stderr
    assert "Traceback" not in run.stderr


def test_invalid_pet_variable_is_a_usage_error(ddpkit: Command) -> None:
    run = ddpkit("launch", "train.py", env={"PET_STANDALONE": "yes"})
    assert run.returncode == 2
    assert "PET_STANDALONE=yes is not a number\n  hint: set PET_STANDALONE to 0 or 1" in run.stderr


def test_gpus_flag_prefers_free_gpus_and_names_them(
    ddpkit: Command, script: Callable[[str], Path], machine: Callable[..., dict[str, str]]
) -> None:
    shows = script("say(os.environ['LOCAL_RANK'], os.environ['CUDA_VISIBLE_DEVICES'])")
    run = ddpkit("launch", "--gpus", "2", shows, env=machine(1, 0, 3, 0))
    assert run.returncode == 0, run.stderr
    assert sorted(run.stdout.splitlines()) == ["0 1,3", "1 1,3"]
    assert "ddpkit: GPU 1: Fake GPU, 0.0 of 80 GiB used, free" in run.stderr


def test_gpu_that_does_not_report_its_memory_can_be_used(
    ddpkit: Command, script: Callable[[str], Path], machine: Callable[..., dict[str, str]]
) -> None:
    environment = machine(0)
    Path(environment["FAKE_NVML"]).write_text("gpu GPU-0000-uuid 0 0")
    run = ddpkit("launch", "--gpus", "all", script("print('ran')"), env=environment)
    assert run.stdout == "ran\n", run.stderr


@pytest.mark.parametrize(
    ("ending", "code", "said"),
    [
        ("sys.exit(7)", 7, "rank 1 failed first: exit code 7"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 139, "rank 1 failed first: killed by SIGSEGV"),
    ],
)
def test_exit_code_is_that_of_the_first_failing_worker(
    ddpkit: Command, script: Callable[[str], Path], ending: str, code: int, said: str
) -> None:
    wait = "signal.pause()  # until it is ended"
    failing = script(f"import os, signal, sys\nif os.environ['RANK'] == '1':\n    {ending}\n{wait}")
    run = ddpkit("launch", "--nproc-per-node", "2", failing)
    assert run.returncode == code
    assert f"ddpkit: {said}" in run.stderr
    assert "ChildFailedError" not in run.stderr


def test_interrupt_during_the_start_leaves_no_worker(script: Callable[[str], Path]) -> None:
    waiting = script("import signal; say(os.getpid()); signal.pause()")
    with started(DDPKIT, "launch", "--nproc-per-node", 6, waiting) as launcher:
        assert launcher.stdout is not None
        launcher.stdout.readline()  # the first worker runs, others are about to be started
        launcher.send_signal(signal.SIGTERM)
        launcher.communicate(timeout=seconds(60))  # ends when the last process that holds the pipe has ended
    assert launcher.returncode == 143


def test_interrupted_launcher_ends_its_workers_and_reports_it(script: Callable[[str], Path], tmp_path: Path) -> None:
    waiting = script("import signal; say(os.getpid()); signal.pause()")
    with started(DDPKIT, "launch", "--nproc-per-node", 2, waiting) as launcher:
        assert launcher.stdout is not None
        workers = [int(unlabelled(launcher.stdout.readline())) for _ in range(2)]
        launcher.send_signal(signal.SIGTERM)
        _, errors = launcher.communicate(timeout=seconds(60))
    assert launcher.returncode == 143
    assert "ddpkit: stopped by SIGTERM" in errors
    assert "Traceback" not in errors
    for worker in workers:
        with pytest.raises(ProcessLookupError):
            os.kill(worker, 0)


@pytest.mark.slow
def test_ctrl_c_ends_a_launcher_that_a_script_has_started_in_the_background(script: Callable[[str], Path]) -> None:
    """A shell script has its background commands ignore SIGINT."""
    waiting = script("import signal; say(os.getpid()); signal.pause()")
    command = '"$@" & echo $! && wait $!'
    with started("sh", "-c", command, "sh", DDPKIT, "launch", "--nproc-per-node", 2, waiting) as shell:
        assert shell.stdout is not None
        launcher, *workers = [int(unlabelled(shell.stdout.readline())) for _ in range(3)]
        os.kill(launcher, signal.SIGINT)
        _, errors = shell.communicate(timeout=seconds(60))
    assert shell.returncode == 130
    assert "ddpkit: stopped by SIGINT" in errors
    for worker in workers:
        with pytest.raises(ProcessLookupError):
            os.kill(worker, 0)


def test_launch_leaves_no_temporary_files(ddpkit: Command, script: Callable[[str], Path], tmp_path: Path) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    where = script("say(os.environ['TORCHELASTIC_ERROR_FILE'])")
    run = ddpkit("launch", "--nproc-per-node", "2", where, env={"TMPDIR": str(temporary)})
    assert str(temporary) in run.stdout
    assert list(temporary.iterdir()) == []


def test_log_folder_of_the_user_is_kept(ddpkit: Command, script: Callable[[str], Path], tmp_path: Path) -> None:
    run = ddpkit("launch", "--nproc-per-node", "2", "-r", "3", "--log-dir", tmp_path / "logs", script("print('hello')"))
    assert run.returncode == 0, run.stderr
    logs = sorted((tmp_path / "logs").rglob("stdout.log"))
    assert [log.parent.name for log in logs] == ["0", "1"]
    assert [log.read_text() for log in logs] == ["hello\n", "hello\n"]


@pytest.mark.parametrize(
    ("before", "words"),
    [
        (["--"], ["--local=3", "--log"]),
        (["--nproc_per_node", "1"], ["y", "--"]),
        (["-t0", "--redirect=0", "--log-d", "logs"], ["-x", "--gpus", "2", "--nproc-per-node=9"]),
    ],
    ids=str,
)
def test_arguments_after_the_script_are_passed_to_the_script(
    ddpkit: Command, script: Callable[[str], Path], before: list[str], words: list[str]
) -> None:
    shows = script("import sys; print(sys.argv[1:])")
    run = ddpkit("launch", *before, shows, *words)
    assert run.stdout == f"{words}\n", run.stderr
    assert ddpkit("launch", shows, "--", *words).stdout == f"{words}\n", "as with torchrun, one -- is dropped"


def test_sighup_ignored_at_the_start_stays_ignored(script: Callable[[str], Path]) -> None:
    waiting = script("import signal; say(os.getpid()); signal.pause()")
    command = ["nohup", DDPKIT, "launch", "--nproc-per-node", 2, waiting]
    with started(*command, stderr=subprocess.DEVNULL) as launcher:
        assert launcher.stdout is not None
        workers = [int(unlabelled(launcher.stdout.readline())) for _ in range(2)]
        launcher.send_signal(signal.SIGHUP)
        os.kill(workers[0], signal.SIGUSR1)  # what ends the job is this
        launcher.communicate(timeout=seconds(60))
    assert launcher.returncode == 128 + signal.SIGUSR1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_before_workers_start_prints_one_line_and_leaves_nothing(
    script: Callable[[str], Path], tmp_path: Path, number: signal.Signals
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    command = [sys.executable, "-X", "importtime", "-m", "ddp_kit", "launch", script("pass")]
    # A small pipe: the import goes no further than this test has read.
    with started(*command, env={"TMPDIR": str(temporary)}, stdout=None, pipesize=4096) as launcher:
        assert launcher.stderr is not None
        for line in launcher.stderr:
            if "torch._utils" in line:  # in the middle of importing torch
                break
        launcher.send_signal(number)
        _, errors = launcher.communicate(timeout=seconds(60))
    assert launcher.returncode == 128 + number
    assert errors.splitlines()[-1] == f"ddpkit: stopped by {number.name}"
    assert "Traceback" not in errors
    assert list(temporary.iterdir()) == []


def test_modules_programs_and_macros_start_like_under_torchrun(ddpkit: Command, tmp_path: Path) -> None:
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").write_text(
        "import os, sys; os.write(1, f'{__name__} {sys.argv[1:]}\\n'.encode())"
    )
    run = ddpkit("launch", "--nproc-per-node", "2", "-m", "package.train", "--where=${local_rank}")
    assert sorted(run.stdout.splitlines()) == ["__main__ ['--where=0']", "__main__ ['--where=1']"]
    assert ddpkit("launch", "--no-python", "echo", "hello").stdout == "hello\n"


def test_launch_on_one_node_ignores_an_unresolvable_host_name(ddpkit: Command, script: Callable[[str], Path]) -> None:
    assert "127.0.0.1" in ddpkit("launch", script("import os; print(os.environ['MASTER_ADDR'])")).stdout


def test_second_signal_during_the_report_exits_with_the_code_of_the_first() -> None:
    done = run(sys.executable, PROGRAMS / "stopped_twice.py")
    assert (done.returncode, done.stderr) == (128 + signal.SIGTERM, "ddpkit: stopped by SIGTERM\n")


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--nnodez", "2"], "there is no flag '--nnodez'\n  hint: did you mean --nnodes?"),
        (["--gpus=2", "--nproc", "2", "-x"], "there is no flag '-x'"),
        (["--nnodes"], "argument --nnodes: expected one argument"),
    ],
)
def test_misspelt_flag_is_refused_without_an_import_of_torch(flags: list[str], said: str) -> None:
    code = "import sys; from ddp_kit.cli.main import main; print(main(sys.argv[1:]), 'torch' in sys.modules)"
    done = run(sys.executable, "-c", code, "launch", *flags, *([] if flags[-1] == "--nnodes" else ["train.py"]))
    assert done.stdout == "2 False\n"
    assert said in done.stderr
