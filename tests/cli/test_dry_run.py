"""--dry-run: what it says is what happens, also under torchrun; and nothing starts."""

import json
import os
import re
import shlex
import socket
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from ddp_kit.cli import dry_run, launch
from ddp_kit.devices.cpus import Cpus
from ddp_kit.devices.gpus import Gpu
from ddp_kit.errors import UsageError
from ddp_kit.launcher import plan, rendezvous, spec
from ddp_kit.launcher.warm import client
from ddp_kit.masking import masked_env
from ddp_kit.terminal import Terminal
from tests.support.launching import BIN, PROGRAMS, free_port, run

Command = Callable[..., "subprocess.CompletedProcess[str]"]
Environments = dict[str, dict[str, str]]

# Leaves its environment and its arguments in the folder that it is started in.
WORKER = """\
import json, os, sys
name = os.environ["RANK"] + ".json"
with open(name, "w") as file:
    json.dump({**os.environ, "arguments": repr(sys.argv[1:])}, file)
"""
THREADS_UNSET = {"OMP_NUM_THREADS": None}
TO_COME = (dry_run.AT_THE_START, dry_run.AT_RENDEZVOUS)
THE_SHELL_S = {"PWD", "OLDPWD", "SHLVL", "_"}
TORCHRUN = re.compile(r"The equivalent torchrun command.*:\n\n  (.*)")


def tables(text: str) -> list[list[str]]:
    """The lines of each table."""
    return [block.splitlines() for block in re.findall(r"(?:^  .*\n?)+", text, re.MULTILINE)]


def told(text: str) -> Environments:
    """The environment of each rank, as the text has it."""
    *_, ours, yours, ranks, _ = tables(text)
    common = {}
    for row in ours:
        name, _, value = re.split(r"  +", row[2:], maxsplit=2)
        common[name] = value
    for row in yours:
        name, value = re.split(r"  +", row[2:], maxsplit=1)
        common[name] = value
    names, *rows = (line.split() for line in ranks)
    by_rank = [common | dict(zip(names, row, strict=True)) for row in rows]
    return {env["RANK"]: env for env in by_rank}


def found(folder: Path) -> Environments:
    """The environment of each worker that has run."""
    workers = {file.stem: json.loads(file.read_text()) for file in folder.glob("*.json")}
    for file in folder.glob("*.json"):
        file.unlink()
    return workers


def settings(text: str) -> dict[str, list[str]]:
    """The origin and the value of each setting, by its name."""
    rows = [re.split(r"  +", row[2:], maxsplit=2) for table in tables(text)[1:4] for row in table]
    return {row[0]: row[1:] for row in rows}


def described(words: str, cpus: tuple[int, ...] = (), machine: tuple[Gpu, ...] = (), **env: str) -> str:
    asked = rendezvous.complete_from_cluster(spec.parse(words.split(), env), env)
    made = plan.make(asked, machine, env, "run-1", Cpus({0: 0, 1: 1}), {})
    made = replace(made, workers=tuple(replace(worker, cpus=cpus) for worker in made.workers))
    defaults = {flag.dest: flag.default for flag in spec.TORCHRUN_FLAGS} | {"nproc_per_node": "1"}
    defaults |= {"training_script": "script.py", "training_script_args": []}
    return dry_run.describe(made, env, "node7", defaults)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "exported"),
    [
        (["--nproc-per-node", "2"], {"ODD": "two\nlines", "BLANKS": "a  b", "NAME": "Jürgen", "EMPTY": ""}),
        (["--cold", "--role", "r", "--max-restarts=3"], {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}),
        (["--nproc-per-node=2", "--virtual-local-rank", "--rdzv-id=x"], {"CUDA_VISIBLE_DEVICES": "3, 5"}),
        (["--nproc-per-node=2", "--virtual-local-rank", "--standalone"], {"OMP_NUM_THREADS": "3"}),
        (["--master-port=PORT", "--signals-to-handle=SIGTERM"], {"RANK": "7", "LOCAL_RANK": "7"}),
        (["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:PORT"], {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}),
        (["--rdzv-endpoint=127.0.0.1:PORT", "--local-addr=localhost"], {"PET_MAX_RESTARTS": "1"}),
    ],
)
def test_dry_run_shows_the_environment_that_workers_get(
    ddpkit: Command, script: Callable[[str], Path], tmp_path: Path, words: list[str], exported: dict[str, str]
) -> None:
    line = [*(word.replace("PORT", str(free_port())) for word in words), script(WORKER), "--lr", "0.1"]
    env = THREADS_UNSET | exported
    text = ddpkit("launch", "--dry-run", *line, env=env)
    assert text.returncode == 0, text.stderr
    assert not found(tmp_path)
    assert ddpkit("launch", *line, env=env).returncode == 0
    assert_told(text.stdout, found(tmp_path))


@pytest.mark.slow
def test_dry_run_shows_the_environment_on_both_nodes(
    ddpkit: Command, script: Callable[[str], Path], tmp_path: Path
) -> None:
    meeting = ["--nnodes=2", "--nproc-per-node=2", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    lines = [[*meeting, f"--node-rank={rank}", script(WORKER)] for rank in (0, 1)]
    texts = [ddpkit("launch", "--dry-run", *line, env=THREADS_UNSET).stdout for line in lines]
    with ThreadPoolExecutor() as nodes:
        runs = nodes.map(lambda line: ddpkit("launch", *line, env=THREADS_UNSET), lines)
        assert [run.returncode for run in runs] == [0, 0]
    workers = found(tmp_path)
    for text, ranks in zip(texts, ("01", "23"), strict=True):
        assert_told(text, {rank: workers[rank] for rank in ranks})


def assert_told(text: str, workers: Environments) -> None:
    promised = told(text)
    assert workers
    assert promised.keys() == workers.keys()
    for rank, env in workers.items():
        del env["arguments"]
        assert promised[rank].keys() == env.keys()
        shown = {name: value if value.isprintable() else repr(value) for name, value in masked_env(env).items()}
        known = {name: value for name, value in promised[rank].items() if not value.startswith(TO_COME)}
        assert known == {name: shown[name] for name in known}
        assert len(env) - len(known) <= 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "arguments"),
    [
        (["--nproc-per-node=2"], ["--lr", "0.1", "a b", "${local_rank}", "it's"]),
        (["--role=two words", "--nnodes=1", "-t3"], ["--local=3", "--"]),
        (["--master-port=PORT", "--virtual-local-rank"], ["--", "--", "x"]),
        (["--duplicate-stdout-filters", "a,,b,c", "--cold", "--gpus", "2"], []),
        (["--gpus-per-process=2", "--nproc-per-node=1"], []),
    ],
)
def test_dry_run_torchrun_command_gives_workers_the_same_environment(
    ddpkit: Command,
    script: Callable[[str], Path],
    machine: Callable[..., dict[str, str]],
    tmp_path: Path,
    words: list[str],
    arguments: list[str],
) -> None:
    line = [*(word.replace("PORT", str(free_port())) for word in words), script(WORKER), *arguments]
    env = THREADS_UNSET | machine(0, 1, 0) | {"PATH": f"{BIN}:{os.environ['PATH']}"}
    text = ddpkit("launch", "--dry-run", *line, env=env).stdout
    command = TORCHRUN.search(text)
    assert command, text
    assert ddpkit("launch", *line, env=env).returncode == 0
    ours = found(tmp_path)
    done = run("bash", "-c", f"exec env {command[1]}", cwd=tmp_path, env=env)
    assert done.returncode == 0, done.stderr
    theirs = found(tmp_path)
    assert ours.keys() == theirs.keys() == told(text).keys()
    for rank, worker in told(text).items():
        known = {name for name, value in worker.items() if not value.startswith(TO_COME)}
        assert ours[rank].keys() - THE_SHELL_S == theirs[rank].keys() - THE_SHELL_S
        for name in {*known, "arguments"} - THE_SHELL_S:
            assert ours[rank][name] == theirs[rank][name]


@pytest.mark.slow
def test_dry_run_shows_gpus_cores_and_program_of_each_rank(
    ddpkit: Command, script: Callable[[str], Path], machine: Callable[..., dict[str, str]]
) -> None:
    env = THREADS_UNSET | machine(1, 0, 0)
    run = ddpkit("launch", "--dry-run", "--gpus", "2", script("pass"), "--to=${local_rank}", env=env)
    head, first, second = tables(run.stdout)[0]
    assert head.split() == ["rank", "host", "GPU", "cores", "program"]
    assert first.split()[:5] == ["0", socket.gethostname(), "1:", "Fake", "GPU"]
    assert second.split()[2] == "2:"
    assert second.endswith("script.py --to=1")
    assert "CUDA_VISIBLE_DEVICES" in run.stdout
    assert re.search(r"CUDA_VISIBLE_DEVICES +--gpus 2 +1,2\n", run.stdout)
    assert "CUDA_VISIBLE_DEVICES=1,2 CUDA_DEVICE_ORDER=PCI_BUS_ID OMP_NUM_THREADS=1 torchrun" in run.stdout


@pytest.mark.slow
def test_dry_run_shows_the_gpus_of_each_process(ddpkit: Command, machine: Callable[..., dict[str, str]]) -> None:
    run = ddpkit("launch", "--dry-run", "--gpus-per-process", 2, "-m", "this", env=machine(0, 0, 0, 0))
    assert run.returncode == 0, run.stderr
    rows = tables(run.stdout)[0]
    assert [re.findall(r"(\d): ", row) for row in rows[1:]] == [["0", "1"], ["2", "3"]]
    assert re.search(r"  DDPKIT_GPUS_PER_PROCESS +--gpus-per-process 2 +2\n", run.stdout)
    assert "DDPKIT_GPUS_PER_PROCESS=2 " in TORCHRUN.search(run.stdout)[1]  # type: ignore[index]


def test_dry_run_shows_a_plan_command_that_can_be_pasted() -> None:
    nodes = "--nnodes 2 --nproc-per-node 3 --master-addr n0"
    command = "`ddpkit plan --gpus 3 --nodes 2 --memory {} train.py --lr 0.1 --key '****'`"
    said = "To estimate the memory, run {}\n"
    text = described(f"{nodes} train.py --lr 0.1 --key sk_abcdefgh")
    assert said.format(f"{command.format('80GiB')} (80 GiB is an example).") in text
    here = tuple(Gpu(n, f"GPU-{n}", "GPU", memory_total=size << 20, memory_used=0) for n, size in enumerate((90, 80)))
    text = described("--gpus 2 train.py", machine=here)
    assert said.format("`ddpkit plan --gpus 2 --memory 80MiB train.py`.") in text
    for other in ("--module train", "--no-python train.sh"):
        assert "ddpkit plan" not in described(other)


def test_dry_run_shows_cores_as_ranges() -> None:
    text = described("--nproc-per-node 2 train.py", cpus=(0, 1, 2, 3, 8))
    assert tables(text)[0][1].split()[:4] == ["0", "node7", "-", "0-3,8"]
    assert "torchrun command, which does not bind processes to cores:" in text
    assert tables(described("train.py"))[0][1].split()[3] == "any"


def test_dry_run_leaves_values_of_the_rendezvous_open() -> None:
    text = described("--nnodes 2:4 --rdzv-backend c10d --rdzv-endpoint n1:29400 --nproc-per-node 2 train.py")
    assert "  first + 1  node7" in text
    assert (
        settings(text).items()
        >= {
            "min_nodes": ["--nnodes", "2"],
            "max_nodes": ["--nnodes", "4"],
            "node_rank": ["default", "assigned at the rendezvous"],
            "host": ["--rdzv-endpoint", "n1"],
            "port": ["--rdzv-endpoint", "29400"],
            "join_timeout": ["default", "600 s"],
        }.items()
    )
    for name in ("WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT"):
        assert re.search(rf"  {name} .*  assigned at the rendezvous\n", text)
    assert "assigned at the rendezvous  0           assigned at the rendezvous" in text


@pytest.mark.parametrize(
    ("words", "name", "origin", "value"),
    [
        ("", "log_dir", "default", "not kept"),
        ("--log-dir logs", "log_dir", "--log-dir", "a new folder in logs"),
        ("-r 3", "redirects", "--redirects", "3"),
        ("-r 3", "log_dir", "default", "a new folder in the directory for temporary files, chosen when the job starts"),
        ("", "shutdown_timeout", "default", "25 s"),
        ("--shutdown-timeout 5", "shutdown_timeout", "--shutdown-timeout", "5 s"),
        ("--max-restarts 3", "max_restarts", "--max-restarts", "3"),
        ("--nnodes 2 --master-addr n0", "host", "--master-addr and --master-port", "n0"),
        ("--nnodes 2 --master-addr n0", "port", "--master-addr and --master-port", "29500"),
        ("--numa-binding node", "numa_binding", "--numa-binding", "node"),
        ("--hang-timeout 7", "hang_timeout", "--hang-timeout", "7 s"),
        ("--hang-timeout 0", "hang_timeout", "--hang-timeout", "no limit"),
        ("", "hang_timeout", "default", "300 s, but only in scripts with a Trainer"),
        ("", "role", "PET_ROLE", "worker"),
        ("", "signals_to_handle", "default", "SIGTERM,SIGINT,SIGHUP,SIGQUIT"),
    ],
)
def test_dry_run_shows_settings_with_their_origin(words: str, name: str, origin: str, value: str) -> None:
    assert settings(described(f"{words} train.py", PET_ROLE="worker"))[name] == [origin, value]


def test_dry_run_shows_the_variables_of_the_cluster() -> None:
    slurm = {
        "SLURM_JOB_ID": "7",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_NODES": "2",
        "SLURM_NODEID": "1",
        "SLURM_STEP_NUM_TASKS": "2",
    }
    env = slurm | {"SLURM_STEP_NODELIST": "a[1-2]", "SLURM_GPUS_ON_NODE": "4"}
    text = described("train.py", **env)
    assert "Slurm; command-line flags override these values:" in text
    assert (
        settings(text).items()
        >= {
            "nodes": ["SLURM_STEP_NUM_NODES", "2"],
            "node rank": ["SLURM_NODEID", "1"],
            "max_nodes": ["Slurm", "2"],
            "node_rank": ["Slurm", "1"],
        }.items()
    )


def test_dry_run_torchrun_command_omits_flags_read_from_variables() -> None:
    text = described("train.py", TORCH_ELASTIC_SHUTDOWN_TIMEOUT="40", TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE="<${rank}>")
    above, _, command = text.partition("The equivalent torchrun command")
    assert settings(above)["shutdown_timeout"] == ["TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "40 s"]
    assert settings(above)["log_line_prefix_template"] == ["TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE", "<${rank}>"]
    for word in ("40", "shutdown-timeout", "prefix-template"):
        assert word not in command


@pytest.mark.parametrize(
    ("words", "command"), [("train.py -- -- x", "-- train.py -- x"), ("train.py -- x", "train.py x")]
)
def test_torchrun_command_keeps_the_dashes_of_the_script(words: str, command: str) -> None:
    assert described(words).endswith(f" {command}")
    assert spec.parse(shlex.split(command), {}).torchrun == spec.parse(words.split(), {}).torchrun


TWO_NODES = "--nnodes 2 --nproc-per-node 2 --rdzv-backend c10d --rdzv-endpoint n1:1 --log-dir logs"


@pytest.mark.parametrize(
    "words",
    [
        "--nnodes 2:3",
        "--nproc-per-node 3",
        "--rdzv-backend static",
        "--rdzv-endpoint n2:1",
        "--rdzv-id other",
        "--standalone",
        "--rdzv-conf join_timeout=7",
        "--rdzv-conf last_call_timeout=7",
        "--rdzv-conf replacement_timeout=7",
        "--rdzv-conf keep_alive_interval=7",
        "--rdzv-conf is_host=1",
        "--rdzv-conf is_host=0",
        "--max-restarts 7",
        "--role other",
        "--local-addr other",
        "--event-log-handler console",
        "--module",
        "--no-python",
        "--run-path",
        "--log-dir other",
        "--redirects 3",
        "--tee 3",
        "--local-ranks-filter 1",
        "--log-line-prefix-template other",
        "--duplicate-stdout-filters other",
        "--duplicate-stderr-filters other",
        "--logs-specs other",
        "--numa-binding node",
        "--signals-to-handle SIGTERM",
        "--shutdown-timeout 7",
        "--virtual-local-rank",
        "--hang-timeout 7",
        "--cold",
    ],
)
def test_dry_run_shows_the_effect_of_every_flag(words: str) -> None:
    """Above the command line for torchrun, which repeats the flags."""
    before, after = (
        described(f"{TWO_NODES} {each} train.py").partition("The equivalent torchrun command")[0]
        for each in ("", words)
    )
    assert before != after


def test_dry_run_says_that_torchrun_itself_runs_the_job() -> None:
    text = described("--rdzv-backend etcd --rdzv-endpoint n1:1 --nproc-per-node 2 train.py")
    assert "not watched: torchrun runs the job, for --rdzv-backend etcd\n" in text


def test_dry_run_with_a_rank_without_a_gpu_is_refused() -> None:
    with pytest.raises(UsageError, match="--virtual-local-rank: there is no GPU for local rank 1"):
        described("--virtual-local-rank --nproc-per-node 2 train.py", CUDA_VISIBLE_DEVICES="3")


def test_dry_run_starts_no_server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "t.py").touch()
    monkeypatch.delattr(client.WarmServer, "__init__")  # a start would fail
    assert launch.run(["--dry-run", str(tmp_path / "t.py")], Terminal(os.environ)) == 0


def test_may_fork_is_false_only_for_flags_before_the_script_or_variables() -> None:
    for words in (["--cold", "t.py"], ["--no-python", "t"], ["--nproc", "2", "--run_p", "t.py"], ["-m", "--cold", "t"]):
        assert not spec.parse(words, {}).may_fork({})
    for words in (
        ["t.py", "--cold"],
        ["-m", "t", "--no-python"],
        ["--gpus", "2", "t.py", "--cold"],
        ["--", "t", "--cold"],
    ):
        assert spec.parse(words, {}).may_fork({})
        assert not spec.parse(words, {}).may_fork({"PYTHON_EXEC": "python3"})


SECRETS = {"HF_TOKEN": "hf_abcdefgh", "DATABASE": "postgres://me:pg_abcdefgh@db/x", "WANDB_API_KEY": "wb_abcdefgh"}
ARGUMENTS = ["--api-key=ap_abcdefgh", "--password", "pw_abcdefgh", "s3://me:ur_abcdefgh@store", "login=hf_abcdefgh"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["--dry-run", "fails.py", *ARGUMENTS], 0),
        (["--dry-run", f"--rdzv-conf={ARGUMENTS[0]}", "--log-dir", ARGUMENTS[3], "fails.py"], 0),
        (["-r", "3", "--log-dir", "logs", "fails.py", *ARGUMENTS], 1),
        (["-r", "3", "--log-dir", "logs", "--cold", "--max-restarts=1", "fails.py", *ARGUMENTS], 1),
        (["missing.py", *ARGUMENTS], 2),
        (["--dry-run", f"{ARGUMENTS[3]}/missing.py"], 2),
        ([ARGUMENTS[0], "fails.py"], 2),
        (["--gpus", ARGUMENTS[3], "fails.py"], 2),
        (["--max-restarts", "hf_abcdefgh", "fails.py"], 2),
        (["--r=hf_abcdefgh", "fails.py"], 2),
        (["-r", "3", "--log-dir", "logs", "records.py", *ARGUMENTS], 1),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_launcher_prints_no_secrets(ddpkit: Command, tmp_path: Path, words: list[str], code: int) -> None:
    (tmp_path / "fails.py").write_text("import os, sys\nraise ValueError(f'no login with {sys.argv} {os.environ}')")
    (tmp_path / "records.py").write_text((PROGRAMS / "raises_secret.py").read_text())
    run = ddpkit("launch", *words, env=THREADS_UNSET | SECRETS | {"FAKE_NVML": ""})
    assert run.returncode == code, run.stderr
    assert "abcdefgh" not in run.stdout + run.stderr
    assert len(run.stdout + run.stderr) > 50
    assert all("abcdefgh" not in verdict.read_text() for verdict in tmp_path.rglob("verdict.json"))


@pytest.mark.parametrize("command", [[], ["devices"], ["doctor"]], ids=str)
def test_launcher_does_not_quote_an_invalid_command_line_with_its_secrets(ddpkit: Command, command: list[str]) -> None:
    run = ddpkit(*command, "--api-key=ap_abcdefgh", "hf_abcdefgh", env=SECRETS)
    assert run.returncode == 2
    assert "usage: ddpkit" in run.stderr
    assert "abcdefgh" not in run.stdout + run.stderr


@pytest.mark.slow
def test_launcher_of_another_node_prints_no_secret_that_it_does_not_know(ddpkit: Command, tmp_path: Path) -> None:
    (tmp_path / "fails.py").write_text(
        "import os\nif os.environ['RANK'] == '1': raise ValueError(os.environ['HF_TOKEN'])"
    )
    words = ["--nnodes=2", "--master-addr=127.0.0.1", f"--master-port={free_port()}", "fails.py"]
    with ThreadPoolExecutor() as pool:
        first = pool.submit(ddpkit, "launch", "--nproc-per-node=1", "--node-rank=0", *words)
        other = pool.submit(ddpkit, "launch", "--nproc-per-node=1", "--node-rank=1", "-r3", *words, env=SECRETS)
        run = first.result()
        other.result()
    assert "ValueError: ****" in run.stderr
    assert "abcdefgh" not in run.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["--nnodes", "2:1"],
        ["--nproc-per-node", "several"],
        ["--redirects", "9"],
        ["--rdzv-conf", "join_timeout"],
        ["--rdzv-backend", "c10d", "--rdzv-conf", "join_timeout=soon"],
    ],
)
def test_dry_run_refuses_like_a_start_and_creates_no_folder(
    forked_ddpkit: Command, tmp_path: Path, words: list[str]
) -> None:
    (tmp_path / "train.py").touch()
    folder = tmp_path / "temporary"
    folder.mkdir()
    env = {"TMPDIR": str(folder)}
    told = forked_ddpkit("launch", "--dry-run", *words, "train.py", cwd=tmp_path, env=env)
    assert told.returncode == 2, told.stderr
    assert "Nothing was started" not in told.stdout
    assert not list(folder.iterdir())
